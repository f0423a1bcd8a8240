"""Verification over many steps: after flush, states are those of having decoded exactly the accepted tokens."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from facts import fill, runtime, value

from hal.batch import Sampling, make_batch
from hal.errors import CheckError, HalError
from hal.layout import StateLayout
from hal.ops import Accept, GatedDeltaDecode, GatedDeltaPrefill, GatedDeltaVerify
from hal.ops.base import Problem
from hal.ops.gated_delta import DeltaSizes
from hal.runtime import Group, Runtime

SIZES: dict[str, Any] = {"key_heads": 2, "value_heads": 4, "key_head_dim": 16, "value_head_dim": 8, "dtype": "float32"}
SLOTS = 5


class Tracked:
    """Sequences verified step by step by the kernels here, and decoded token by token by the float64 reference."""

    def __init__(self, queries: int, on: Runtime | None = None, seed: int = 0, **sizes: Any) -> None:
        from hal.formats import Tensor

        sizes = {**SIZES, **sizes}
        sizes["out"] = Tensor(sizes["dtype"])
        self.rt = on or runtime()
        self.op, self.one = GatedDeltaVerify(**sizes, queries=queries), GatedDeltaDecode(**sizes)
        self.group: Group = self.rt.bind_group(
            name="core", prefill=GatedDeltaPrefill(**sizes), decode=self.one, verify=self.op
        )
        fill(self.group)
        self.params = {p.name: value(p.name, p.shape, p.dtype, *p.init).double() for p in self.op.params()}
        self.state = self.group.new_state(SLOTS)
        for pool in self.state:
            pool.fill_(float("nan"))
        self.seen, self.pending = [0] * SLOTS, [0] * SLOTS
        self.truth = {s.name: torch.zeros(SLOTS, *s.shape, dtype=torch.float64) for s in self.one.states()}
        self.random = torch.Generator().manual_seed(seed)

    def rows(self, count: int) -> tuple[torch.Tensor, ...]:
        """Made-up rows as a projection leaves them: views of one buffer."""
        widths = [self.op.conv_dim, self.op.value_dim, self.op.value_heads, self.op.value_heads]
        whole = torch.randn(count, sum(widths), generator=self.random).to(getattr(torch, self.op.dtype))
        return whole.split(widths, 1)

    def step(self, slots: list[int], lengths: list[int], accepted: list[int]) -> None:
        """Verify so many rows, of which so many are accepted; outputs of all are the reference's."""
        given = self.rows(sum(lengths))
        contexts, waits = [self.seen[s] for s in slots], [self.pending[s] for s in slots]
        batch = make_batch("verify", lengths, contexts, slots, accepted=waits).to(self.rt.place)
        self.rt.begin(batch)
        args = (tuple(x.to(self.rt.place) for x in given), self.state, batch)
        self.op.check(*args)
        out = self.group.verify(*args).cpu()
        row = 0
        for slot, length, stands in zip(slots, lengths, accepted, strict=True):
            kept = {n: s.clone() for n, s in self.truth.items()}
            for t in range(length):
                want = self.decoded(slot, [x[row + t : row + t + 1] for x in given], self.seen[slot] + t)
                close(out[row + t], want[0], self.op.dtype)
                if t + 1 == stands:
                    kept = {n: s.clone() for n, s in self.truth.items()}
            self.truth = kept
            self.seen[slot] += stands
            self.pending[slot] = stands
            row += length

    def decoded(self, slot: int, row: list[torch.Tensor], context: int) -> torch.Tensor:
        """One token by the reference, whose states move on."""
        names = ("qkv", "z", "b", "a")
        given = {name: x.double() for name, x in zip(names, row, strict=True)}
        batch = make_batch("decode", [1], [context], [slot])
        (out,), self.truth = self.one.reference(Problem(given, self.params, self.truth, batch))
        return out

    def decode(self, slot: int) -> None:
        """One token by the decode kernel over the same pools."""
        given = self.rows(1)
        batch = make_batch("decode", [1], [self.seen[slot]], [slot]).to(self.rt.place)
        self.rt.begin(batch)
        out = self.group.decode(tuple(x.to(self.rt.place) for x in given), self.state[:2], batch).cpu()
        close(out[0], self.decoded(slot, list(given), self.seen[slot])[0], self.op.dtype)
        self.seen[slot] += 1

    def release(self, slot: int) -> None:
        """Another sequence may have the slot: nothing is done to it."""
        self.seen[slot] = self.pending[slot] = 0
        for states in self.truth.values():
            states[slot] = float("nan")

    def flush(self, *slots: int) -> None:
        """Apply what is pending, and compare both states."""
        self.step(list(slots), [0] * len(slots), [0] * len(slots))
        for state, pool in zip(self.one.states(), self.state[:2], strict=True):
            layout = self.group.layouts[state.name]
            assert isinstance(layout, StateLayout)
            have = layout.read(pool.cpu(), state, self.seen)
            for slot in slots:
                close(have[slot], self.truth[state.name][slot], state.dtype)


def close(have: torch.Tensor, want: torch.Tensor, kind: str) -> None:
    share = {"float32": 2.0**-16, "bfloat16": 2.0**-7}[kind]
    assert not have.isnan().any()
    assert (have.double() - want).abs().max() <= share * max(1e-3, float(want.abs().max()))


def test_steps_of_2_4_and_3_tokens_with_1_4_and_2_accepted() -> None:
    tracked = Tracked(4)
    for lengths, accepted in (([2, 4, 3], [1, 4, 2]), ([4, 2, 4], [4, 1, 2]), ([3, 3, 1], [2, 3, 1])):
        tracked.step([3, 0, 4], lengths, accepted)
    tracked.flush(3, 0, 4)
    for slot in (3, 0, 4):
        tracked.decode(slot)
    tracked.flush(4, 3, 0)


@pytest.mark.parametrize("queries", [1, 2, 4, 8])
def test_every_count_of_accepted_tokens(queries: int) -> None:
    for accepted in range(1, queries + 1):
        tracked = Tracked(queries)
        tracked.step([1], [queries], [queries])
        tracked.step([1], [queries], [accepted])
        tracked.flush(1)
        tracked.step([1], [queries], [accepted])
        tracked.step([1], [1], [1])
        tracked.flush(1)


def test_64_random_steps_over_slots_that_are_given_on() -> None:
    """Between steps slots are flushed, decoded, or given to a sequence that starts."""
    draw, tracked, given_on = random.Random(5), Tracked(4), 0
    for _ in range(64):
        slots = draw.sample(range(SLOTS), draw.randint(1, SLOTS))
        for slot in slots:
            if tracked.seen[slot] and draw.random() < 0.1:
                tracked.release(slot)
                given_on += 1
        lengths = [draw.randint(0, 4) for _ in slots]
        tracked.step(slots, lengths, [draw.randint(min(n, 1), n) for n in lengths])
        if draw.random() < 0.2:
            some = [s for s in slots if tracked.seen[s]]
            tracked.flush(*some)
            for slot in some:
                tracked.decode(slot)
    tracked.flush(*(s for s in range(SLOTS) if tracked.seen[s]))
    assert given_on > 5


def test_a_step_that_takes_no_pending_tokens_is_an_error() -> None:
    for mode in ("decode", "prefill"):
        with pytest.raises(HalError, match=rf"accepted: 2 tokens wait to be taken .* a {mode} step does not do"):
            make_batch(mode, [1], [5], [0], accepted=[2])
    with pytest.raises(HalError, match="accepted: expected at most the 1 tokens before this step, got 2"):
        make_batch("verify", [1], [1], [0], accepted=[2])


def test_more_tokens_than_a_slot_keeps_are_an_error() -> None:
    tracked = Tracked(2)
    for lengths, accepted, said in (([3], [0], "a sequence"), ([1], [3], "accepted")):
        batch = make_batch("verify", lengths, [9], [0], accepted=accepted)
        with pytest.raises(CheckError, match=f"GatedDeltaVerify: batch: {said}: expected at most 2, got 3"):
            tracked.op.check(tracked.rows(lengths[0]), tracked.state, batch)


def test_traffic_counts_the_state_once_for_all_rows_of_a_sequence() -> None:
    op, one = GatedDeltaVerify(**SIZES), GatedDeltaDecode(**SIZES)
    pending = 2 * 4 * 4 * op.left
    assert op.state_bytes(4) == one.state_bytes(1) + pending
    assert op.state_bytes(8) == 2 * op.state_bytes(4)
    assert isinstance(op, DeltaSizes)


def drawn(sampling: Sampling, logits: torch.Tensor, drafts: list[int], seeds: range) -> list[list[int]]:
    """The tokens that one verified step gives, for each seed."""
    count, each = len(seeds), 1 + len(drafts)
    ids = torch.tensor([0, *drafts]).repeat(count)
    how = [replace(sampling, seed=seed) for seed in seeds]
    batch = make_batch("verify", [each] * count, [3] * count, range(count), sampling=how)
    picks, accepted = ACCEPT(logits.repeat(count, 1), ids, batch)
    return [row[:n] for row, n in zip(picks.view(count, each).tolist(), accepted.tolist(), strict=True)]


ACCEPT = runtime().bind(Accept(vocab=8, dtype="float32"), "accept")


def test_sampled_drafts_keep_the_target_s_distribution() -> None:
    """The first token's counts over 20,000 seeds, whatever was drafted, are the target's: chi-square."""
    logits = torch.randn(3, 8, generator=torch.Generator().manual_seed(1)) * 1.5
    sampling = Sampling(temperature=0.8, top_k=6, top_p=0.95)
    p = (logits[0].double() / 0.8).softmax(0)
    kept = p.sort(descending=True)
    whole = kept.values[:6].sum()
    count = int((kept.values[:6].cumsum(0) < 0.95 * whole).sum()) + 1
    target = torch.zeros(8, dtype=torch.float64)
    target[kept.indices[:count]] = kept.values[:count] / kept.values[:count].sum()
    runs = 20_000
    for drafts in ([int(p.argmax()), 1], [int(p.argmin()), 2], [int(kept.indices[1]), 3]):
        found = drawn(sampling, logits, drafts, range(runs))
        first = Counter(tokens[0] for tokens in found)
        assert all(target[token] > 0 for token in first)
        expected = [runs * float(target[token]) for token in range(8) if target[token] > 0]
        have = [first[token] for token in range(8) if target[token] > 0]
        chi = sum((h - e) ** 2 / e for h, e in zip(have, expected, strict=True))
        assert chi < 24, (drafts, have, expected)  # 5 degrees of freedom: 1 in 5,000
        # a draft is accepted as often as it is likely, and what follows it is drawn for itself
        stood = sum(len(tokens) > 1 for tokens in found) / runs
        assert abs(stood - float(target[drafts[0]])) < 0.015


def test_sampled_tokens_are_those_of_decoding_with_the_same_seed() -> None:
    logits = torch.randn(4, 8, generator=torch.Generator().manual_seed(2))
    from hal.ops import Sample

    sample = runtime().bind(Sample(vocab=8, dtype="float32"), "sample")
    for seed in range(40):
        how = Sampling(temperature=1.2, seed=seed)
        alone = [
            int(sample(logits[t : t + 1], make_batch("decode", [1], [3 + t], [0], sampling=[how]))[0]) for t in range(4)
        ]
        assert drawn(how, logits, alone[:3], range(seed, seed + 1)) == [alone]
        wrong = [alone[0], (alone[1] + 1) % 8, alone[2]]
        assert drawn(how, logits, wrong, range(seed, seed + 1)) == [alone[:2]]
