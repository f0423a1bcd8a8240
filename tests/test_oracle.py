"""Against transformers' own modules, in float32: logits of prefill and of each decode step, and tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hal_models.commands.loading import SHIPPED
from hal_models.engine import Engine, Request
from hal_models.scoring import scored
from hal_models.tasks import lines
from stepping import Feed, model_of

pytest.importorskip("transformers")
pytestmark = pytest.mark.oracle
STEPS = 32
HEADS = {
    "ratio 1, tied": {"key_heads": 2, "value_heads": 2, "heads": 4, "kv_heads": 1, "tied": True},
    "ratio 2": {"key_heads": 2, "value_heads": 4, "heads": 4, "kv_heads": 1},
    "ratio 3": {"key_heads": 2, "value_heads": 6, "heads": 6, "kv_heads": 1},
    "ratio 4": {"key_heads": 1, "value_heads": 4, "heads": 4, "kv_heads": 2, "value_head_dim": 24},
    "moe, ratio 2": {"key_heads": 2, "value_heads": 4, "heads": 8, "kv_heads": 1, "moe": True},
    "moe, ratio 4": {"key_heads": 1, "value_heads": 4, "heads": 4, "kv_heads": 2, "moe": True},
    "moe, experts apart, nested": {
        "key_heads": 1, "value_heads": 2, "heads": 4, "kv_heads": 2, "moe": True, "split_experts": True, "nested": True,
    },
}  # fmt: skip


@pytest.fixture(params=HEADS)
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    import oracle

    return oracle.random_checkpoint(tmp_path / "random", seed=len(request.param), **HEADS[request.param])


def close(folder: Path, prompt: list[int]) -> None:
    import oracle

    theirs = oracle.load(folder)
    whole = oracle.logits(theirs, prompt)
    ids, wanted = oracle.decode_logits(theirs, prompt, STEPS + 1)
    feed = Feed(model_of(folder), len(prompt) + STEPS)
    ours = feed(prompt)
    assert (ours - whole).abs().max() <= 1e-4
    for step in range(STEPS):
        row = feed(ids[step : step + 1])[0]
        assert (row - wanted[step + 1]).abs().max() <= 1e-4, f"decode step {step}"


def test_logits_of_random_configurations(checkpoint: Path) -> None:
    prompt = torch.randint(96, (70,), generator=torch.Generator().manual_seed(1)).tolist()
    close(checkpoint, prompt)


@pytest.mark.parametrize("name", ["dense", "moe"])
def test_logits_of_the_tiny_checkpoints(name: str) -> None:
    _, prompt, _ = lines(3, 1, "recall")[0]
    close(SHIPPED / name, list(prompt.encode()))


REACHED = {"dense": (0.998, 0.000842), "moe": (0.985, 0.005822)}


@pytest.mark.parametrize("name", ["dense", "moe"])
def test_answers_and_likelihood_of_the_tiny_checkpoints(name: str) -> None:
    model = model_of(SHIPPED / name)
    found = scored(model, lines(7, 1000))
    least, nll = REACHED[name]
    assert found.bytes == 5679
    assert found.accuracy >= least
    assert abs(found.nll_per_byte - nll) <= 1e-5
    theirs = json.loads((Path(__file__).parent / f"answers-{name}.json").read_text())
    assert found.exact == theirs["exact"]
    assert abs(found.nll_per_byte - theirs["nll_per_byte"]) <= 1e-6


@pytest.mark.parametrize("name", ["dense", "moe"])
def test_greedy_text_is_that_of_transformers_on_every_line(name: str) -> None:
    theirs = json.loads((Path(__file__).parent / f"answers-{name}.json").read_text())["lines"]
    asked = lines(7, 1000)
    engine = Engine(model_of(SHIPPED / name), slots=64, pages=1024, chunk=2048)
    requests = [Request(p.encode(), len(a) + 8, stops=frozenset((10, 256))) for _, p, a in asked]
    texts = [bytes(t for t in ids if t < 256).decode(errors="replace") for ids in engine.generate(requests)]
    assert texts == [line["text"] for line in theirs]
