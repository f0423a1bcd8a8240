"""A sequence fed in any pieces gives the same outputs and the same states, in every layout."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hal_models.commands.loading import SHIPPED
from stepping import Feed, model_of

SPLITS = [(9,), (5, 4), (8, 1), (1, 8), (1,) * 9, (2, 2, 2, 3)]
WAYS = {
    "as chosen": {},
    "ring": {"force": ["GatedDeltaDecode=torch.decode_ring"]},
    "decode of parts": {"force": ["GatedDeltaDecode=composed.gated_delta"]},
    "prefill of parts": {"force": ["GatedDeltaPrefill=composed.gated_delta"]},
}


def outcome(folder: Path, split: tuple[int, ...], way: str) -> tuple[torch.Tensor, list[torch.Tensor]]:
    ids = list(b"sort 6030")
    feed, rows = Feed(model_of(folder, **WAYS[way]), len(ids)), []
    for start, length in zip([sum(split[:i]) for i in range(len(split))], split, strict=True):
        rows.append(feed(ids[start : start + length]))
    return torch.cat(rows), feed.states()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("split", SPLITS[1:], ids=str)
def test_pieces_give_what_the_whole_gives(split: tuple[int, ...], way: str) -> None:
    wanted, states = outcome(SHIPPED / "dense", SPLITS[0], "as chosen")
    got, after = outcome(SHIPPED / "dense", split, way)
    assert (got - wanted).abs().max() <= 2e-4
    for have, want in zip(after, states, strict=True):
        assert (have - want).abs().max() <= 2e-5 * max(1.0, float(want.abs().max()))


def test_a_first_token_starts_from_zero_and_a_later_one_does_not() -> None:
    model = model_of(SHIPPED / "dense")
    fresh, later = Feed(model, 8), Feed(model, 8)
    later(list(b"9*"))
    first, second = fresh(list(b"3"), "decode"), later(list(b"3"))
    assert torch.isfinite(first).all()
    assert (first - second).abs().max() > 0.1
