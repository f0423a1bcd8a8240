"""Write what transformers answers to `lines(7, 1000)` into tests/answers-{dense,moe}.json, in float32.

Where the teacher-forced best byte is the answer's at every position, newline included, the greedy text is
the answer; only the other lines are decoded.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import oracle
import torch
import transformers
from hal_models.tasks import lines
from torch import Tensor

HERE = Path(__file__).parent
TINY = HERE.parent / "models" / "hal_models" / "tiny"
STOP = {10, 256}
PADDING = 257


@torch.inference_mode()
def forced(model: oracle.Model, pairs: list[tuple[bytes, bytes]], batch: int = 50) -> Iterator[tuple[int, Tensor]]:
    """Each pair's index and the logits that its answer's bytes were read from, in batches of like length."""
    order = sorted(range(len(pairs)), key=lambda i: len(pairs[i][0] + pairs[i][1]))
    for start in range(0, len(order), batch):
        some = order[start : start + batch]
        rows = [list(pairs[i][0] + pairs[i][1])[:-1] for i in some]
        longest = max(map(len, rows))
        # Everything is causal, so padding on the right changes nothing to its left.
        padded = torch.tensor([row + [PADDING] * (longest - len(row)) for row in rows])
        logits = model(input_ids=padded, use_cache=False).logits.float()
        for i, row, out in zip(some, rows, logits, strict=True):
            yield i, out[len(pairs[i][0]) - 1 : len(row)]


def margin(rows: Tensor) -> float:
    """The smallest distance between the two best logits of a row."""
    best = rows.topk(2).values
    return round(float((best[:, 0] - best[:, 1]).min()), 6)


def answers(folder: Path) -> tuple[dict[str, object], list[dict[str, object]]]:
    """The totals and the entry of every line for one checkpoint."""
    model = oracle.load(folder)
    pairs = [(prompt.encode(), answer.encode() + b"\n") for _, prompt, answer in lines(7, 1000)]
    entries: list[dict[str, object]] = [{}] * len(pairs)
    exact, total = 0, 0.0
    for i, rows in forced(model, pairs):
        prompt, answer = pairs[i]
        target = torch.tensor(list(answer))
        nll = float(-rows.double().log_softmax(-1).gather(1, target[:, None]).sum())
        total += nll
        text = answer
        if torch.equal(rows.argmax(-1), target):
            exact += 1
        else:
            ids = oracle.greedy(model, list(prompt), len(answer) - 1 + 8, STOP)
            rows = oracle.logits(model, list(prompt) + ids)[len(prompt) - 1 : -1]
            text = bytes(token for token in ids if token < 256)
        shown = text.removesuffix(b"\n").decode(errors="replace")
        entries[i] = {"text": shown, "nll": round(nll, 8), "margin": margin(rows)}
    size = sum(len(answer) for _, answer in pairs)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    return {"exact": exact, "nll_per_byte": round(total / size, 8), "bytes": size, **versions}, entries


def main() -> None:
    """Write both files."""
    torch.set_num_threads(1)
    for name in ("dense", "moe"):
        totals, entries = answers(TINY / name)
        head = json.dumps(totals)[:-1] + ', "lines": [\n'
        (HERE / f"answers-{name}.json").write_text(head + ",\n".join(map(json.dumps, entries)) + "\n]}\n")
        print(name, totals)


if __name__ == "__main__":
    main()
