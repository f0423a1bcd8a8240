"""What only a GPU can show: tokens through graphs on every line, and the decode core's bits in any batch."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from every_line import differing
from hal_models.commands.loading import SHIPPED, loaded
from hal_models.engine import Engine, Request
from hal_models.tasks import lines
from sized import SIZED, cases

import hal
from hal.batch import make_batch
from hal.conformance import verify_kernel
from hal.layout import StateLayout
from hal.ops import OPS, GatedDeltaDecode, GatedDeltaVerify
from hal.ops.base import Case

pytestmark = pytest.mark.gpu
MOST = 33
HEADS = {"16/32": (16, 32), "4/8": (4, 8), "16/64": (16, 64)}


@pytest.mark.parametrize("name", ["dense", "moe"])
def test_tokens_through_graphs_are_the_references_on_every_line(name: str) -> None:
    theirs = json.loads((Path(__file__).parent / f"answers-{name}.json").read_text())["lines"]
    engine = Engine(loaded(SHIPPED / name, "float32"), slots=64, pages=1024, chunk=2048)
    assert not engine.eager
    requests = [Request(p.encode(), len(a) + 8, stops=frozenset((10, 256))) for _, p, a in lines(7, 1000)]
    texts = [bytes(t for t in ids if t < 256).decode(errors="replace") for ids in engine.generate(requests)]
    assert texts == [line["text"] for line in theirs]


@pytest.mark.parametrize("draft", range(1, 8))
@pytest.mark.parametrize("name", ["dense", "moe"])
def test_drafts_through_graphs_give_the_references_tokens_on_every_line(name: str, draft: int) -> None:
    model, lengths = loaded(SHIPPED / name, "float32", draft), []
    for batch in (1, 16):
        wrong, engine = differing(name, model, batch)
        assert not engine.eager
        assert wrong == []
        lengths.append(engine.acceptance)
    assert abs(lengths[0] - lengths[1]) <= 0.01 * lengths[0]


@pytest.mark.parametrize(("op", "name"), SIZED)
def test_kernels_of_aiter_at_sizes_that_it_takes(op: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = hal.Runtime()
    if runtime.device.value("arch") not in ("gfx942", "gfx950"):
        pytest.skip("aiter serves gfx942 and gfx950")
    asked = cases(op, name, runtime.device)
    monkeypatch.setattr(OPS[op], "cases", classmethod(lambda cls: asked))
    found = list(verify_kernel(runtime, OPS[op], name))
    assert not [v for v in found if v.status == "failed"]
    assert [v for v in found if v.status == "passed"], found


@pytest.mark.parametrize("queries", [2, 4, 8])
@pytest.mark.parametrize("kernel", ["cuda.verify", "triton.verify_split", "triton.verify_whole"])
def test_the_verify_core_with_heads_of_a_model(kernel: str, queries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every launch that the number of sequences chooses, against the reference: few, some, many."""
    op = GatedDeltaVerify(key_heads=16, value_heads=32, key_head_dim=128, value_head_dim=128, queries=queries)

    def case(count: int) -> Case:
        lengths, pending = [
            [(i * step + at) % (queries + 1) for i in range(count)] for step, at in ((3, queries), (5, 1))
        ]
        contexts = [n + i % 3 * 7 for i, n in enumerate(pending)]
        slots = [(i * 7 + 3) % 37 for i in range(count)]
        return Case(f"{count} sequences", op, lengths, contexts, slots, mode="verify", accepted=tuple(pending))

    asked = [case(count) for count in (1, 3, 8, 16, 24)]
    monkeypatch.setattr(GatedDeltaVerify, "cases", classmethod(lambda cls: asked))
    found = list(verify_kernel(hal.Runtime(), GatedDeltaVerify, kernel))
    assert not [v for v in found if v.status == "failed"]
    assert [v for v in found if v.status == "passed"], found


def _bucket(bound: hal.Bound, rows: int) -> tuple[str, str]:
    """The kernel that serves so many rows, and which of its launches."""
    piece = bound.choice.at(rows)
    most = [key for key in piece.settings if key.isdigit() and rows <= int(key)]
    return piece.kernel.name, min(most, key=int, default="more")


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
@pytest.mark.parametrize("heads", HEADS)
def test_a_row_has_the_same_bits_in_any_batch(heads: str, kind: str) -> None:
    keys, values = HEADS[heads]
    op = GatedDeltaDecode(
        key_heads=keys, value_heads=values, key_head_dim=128, value_head_dim=128, state_dtype=kind
    )  # fmt: skip
    runtime = hal.Runtime()
    bound = runtime.bind(op, "core")
    group = runtime.group_of(bound)
    torch.manual_seed(0)
    place = runtime.place
    group.fill({p.name: p.init[0] + p.init[1] * torch.randn(p.shape) for p in op.params()})
    wide = torch.randn(MOST, op.conv_dim + op.value_dim + 2 * values, device=place, dtype=torch.bfloat16)
    states = {s.name: 0.1 * torch.randn(MOST, *s.shape) for s in op.states()}
    contexts = [0 if row == 2 else 5 + row for row in range(MOST)]
    order = random.Random(0)
    seen: dict[tuple[str, str], dict[int, tuple[torch.Tensor, ...]]] = {}
    for count in [*range(1, MOST + 1), *range(1, MOST + 1)]:
        rows = order.sample(range(MOST), count)
        slots = order.sample(range(MOST + 7), count)
        batch = make_batch("decode", [1] * count, [contexts[r] for r in rows], slots, device=place)
        pools = group.new_state(MOST + 7)
        lengths = [0] * (MOST + 7)
        for row, slot in zip(rows, slots, strict=True):
            lengths[slot] = contexts[row]
        for state, pool in zip(op.states(), pools, strict=True):
            layout = bound.choice.layouts[state.name]
            assert isinstance(layout, StateLayout)
            canonical = torch.zeros(MOST + 7, *state.shape)
            canonical[slots] = states[state.name][rows]
            pool.fill_(float("nan"))
            layout.write(pool, canonical.to(place, pool.dtype), state, lengths)
        given = wide[rows].split([op.conv_dim, op.value_dim, values, values], 1)
        runtime.begin(batch)
        out = bound(given, pools, batch)
        found = seen.setdefault(_bucket(bound, count), {})
        for at, (row, slot) in enumerate(zip(rows, slots, strict=True)):
            mine = (out[at], pools[1][slot])
            assert not any(t.isnan().any() for t in mine)
            before = found.setdefault(row, tuple(t.clone() for t in mine))
            assert all(torch.equal(a, b) for a, b in zip(before, mine, strict=True)), (count, row, slot)
    several = list(seen.values())
    for other in several[1:]:
        for row in set(other) & set(several[0]):
            for a, b in zip(several[0][row], other[row], strict=True):
                assert (a.double() - b.double()).abs().max() <= 2**-7 * a.double().abs().max()
