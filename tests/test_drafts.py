"""Drafts: the tokens of plain decoding, accepted as often as a reference of its own accepts, ends where they belong."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hal_models import PAGE_SIZE
from hal_models.commands.loading import SHIPPED
from hal_models.drafted import room
from hal_models.engine import Engine, Request
from hal_models.qwen3_5.model import Qwen35
from hal_models.tasks import lines
from safetensors.torch import load_file, save_file
from stepping import model_of

import hal
from hal.batch import Sampling, make_batch
from hal.errors import CheckpointError, HalError
from hal.fixed import Behind, FixedBatch
from hal.layout import Ring, Tail

ASKED = [list(prompt.encode()) for _, prompt, _ in lines(11, 9)]
GREEDY = [Request(prompt, 3 + 5 * index % 17) for index, prompt in enumerate([*ASKED, [55], list(b"12")])]
SAMPLED = [
    replace(request, sampling=Sampling(temperature=1.5, top_p=0.95, top_k=40, seed=index % 5))
    for index, request in enumerate(GREEDY)
]
MIXED = [pair[index % 2] for index, pair in enumerate(zip(GREEDY, SAMPLED, strict=True))]
KINDS = {"greedy": GREEDY, "sampled": SAMPLED, "mixed": MIXED}


@cache
def model(name: str, draft: int) -> Qwen35:
    return model_of(SHIPPED / name, draft=draft)


@cache
def plain(name: str, kind: str) -> list[list[int]]:
    return Engine(model(name, 0), slots=16, pages=64).generate(KINDS[kind])


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def poisoned(name: str, draft: int, **sizes: int) -> Engine:
    engine = Engine(model(name, draft), **{"slots": 4, "pages": 24, **sizes})
    for pools in engine.state:
        for pool in pools:
            pool.fill_(float("nan"))
    return engine


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("name", "draft"), [("dense", 1), ("dense", 3), ("dense", 7), ("moe", 2)])
def test_drafts_give_the_tokens_of_plain_decoding(name: str, draft: int, kind: str) -> None:
    engine = poisoned(name, draft, slots=4)
    assert engine.generate(KINDS[kind]) == plain(name, kind)
    assert 1 < engine.acceptance <= draft + 1
    assert sorted(engine._slots) == list(range(4))
    assert sorted(engine._pages) == list(range(24))


@pytest.mark.parametrize("sizes", [{"slots": 1, "pages": 8}, {"slots": 16, "pages": 64}, {"chunk": 3}, {"chunk": 17}])
def test_any_slots_pages_and_chunks(sizes: dict[str, int]) -> None:
    assert poisoned("dense", 3, **sizes).generate(MIXED) == plain("dense", "mixed")


@pytest.mark.parametrize("draft", [2, 5])
def test_a_stop_token_inside_a_draft_ends_the_sequence_there(draft: int) -> None:
    for index, tokens in enumerate(plain("dense", "greedy")[:6]):
        stop = tokens[len(tokens) // 2]
        engine = poisoned("dense", draft)
        engine.add(replace(GREEDY[index], stops=frozenset({stop})))
        events = list(engine.run())
        assert [e.token for e in events] == [*tokens[: tokens.index(stop)], None]
        assert events[-1].finish == "stop"


def test_a_request_that_comes_during_a_run() -> None:
    engine, found = poisoned("dense", 3, slots=2), dict[int, list[int]]()
    waiting = list(GREEDY)
    engine.add(waiting.pop(0))
    for event in engine.run():
        if event.token is not None:
            found.setdefault(event.request, []).append(event.token)
        if waiting:
            engine.add(waiting.pop(0))
    assert [found[index] for index in range(len(GREEDY))] == plain("dense", "greedy")


def test_pages_have_room_for_what_is_drafted_in_vain() -> None:
    built = model("dense", 7)
    engine = Engine(built, slots=1, pages=2)
    assert room(built) == 14
    fills = Request([1] * 10, 8)
    assert len(engine.generate([fills])[0]) == 8
    with pytest.raises(HalError, match="19 tokens in all; the engine holds 18"):
        engine.add(replace(fills, max_tokens=9))


def test_a_draft_that_cannot_be() -> None:
    with pytest.raises(HalError, match=r"draft: expected 0 \(none\) to 7 tokens, got 8"):
        model_of(SHIPPED / "dense", draft=8)


def test_a_file_without_a_draft_head_is_an_error_only_where_drafts_are_asked_for(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((SHIPPED / "dense" / "config.json").read_text())
    found = load_file(SHIPPED / "dense" / "model.safetensors")
    save_file({n: t for n, t in found.items() if not n.startswith("mtp.")}, tmp_path / "model.safetensors")
    model_of(tmp_path)
    with pytest.raises(
        CheckpointError, match=r"2 drafts a step were asked for, and it holds no draft head: no mtp\.fc"
    ):
        model_of(tmp_path, draft=2)
    save_file({n: t for n, t in found.items() if n != "mtp.norm.weight"}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"tensors missing: mtp\.norm\.weight"):
        model_of(tmp_path, draft=2)


def test_state_lies_as_drafts_need_it_and_only_with_drafts() -> None:
    core = model("dense", 3).layers[0].mixer.core
    assert core.layouts["conv"] == Ring(7)
    assert core.layouts["pending"] == Tail(8)
    assert set(model("dense", 0).layers[0].mixer.core.layouts) & {"pending"} == set()


def test_a_flushed_slot_has_the_state_of_its_accepted_tokens() -> None:
    built, ids = model("dense", 3), [5, 9, 40, 7, 100, 33, 2, 8, 61, 12, 90, 4]
    states = [built.new_state(3, 4) for _ in range(2)]
    for pool in (pool for pools in states for layer in pools for pool in layer):
        pool.fill_(float("nan"))

    def step(which: int, mode: str, tokens: list[int], context: int) -> None:
        batch = make_batch(mode, [len(tokens)], [context], [1], pages=[[2, 0]], page_size=PAGE_SIZE)
        built.runtime.begin(batch)
        built(torch.tensor(tokens), states[which], batch)

    with torch.inference_mode():
        step(0, "prefill", ids[:8], 0)
        step(0, "verify", [*ids[8:11], 77], 8)
        built.flush(states[0], [1], [11], [3])
        step(1, "prefill", ids[:11], 0)
        step(1, "decode", [ids[11]], 11)
        step(0, "decode", [ids[11]], 11)
    for drafted, decoded in zip(*states, strict=True):
        if len(drafted) == 3:
            assert (drafted[1][1] - decoded[1][1]).abs().max() <= 2e-5 * decoded[1][1].abs().max()
            assert drafted[1][[0, 2]].isnan().all()


def test_a_model_that_does_not_draft_has_nothing_to_flush() -> None:
    plain_model = model_of(SHIPPED / "dense")
    with pytest.raises(HalError, match="flush: nothing is pending in a model that does not draft"):
        plain_model.flush(plain_model.new_state(1, 1), [0], [1], [0])


def test_the_head_is_shared_and_its_norm_is_not() -> None:
    for name in ("dense", "moe"):
        built = model(name, 1)
        assert built.mtp is not None
        ours, theirs = (built.runtime.group_of(x.head).storages for x in (built, built.mtp))
        assert ours["weight"] is theirs["weight"]
        assert ours["norm"] is not theirs["norm"]


@pytest.mark.oracle
@pytest.mark.parametrize(("name", "draft"), [("dense", 3), ("dense", 7), ("moe", 4)])
def test_acceptance_is_that_of_a_reference_written_apart(name: str, draft: int) -> None:
    pytest.importorskip("transformers")
    import oracle

    theirs = oracle.load(SHIPPED / name)
    reference, most = oracle.Drafter(SHIPPED / name, theirs), 20
    asked = [list(prompt.encode()) for _, prompt, _ in lines(5, 6)]
    told = Engine(model(name, 0), slots=16, pages=64).generate([Request(p, most + draft) for p in asked])
    gains = [reference.gains(prompt, text, most, draft) for prompt, text in zip(asked, told, strict=True)]
    engine = poisoned(name, draft, pages=64)
    engine.generate([Request(p, most) for p in asked])
    wanted = sum(map(sum, gains)) / sum(map(len, gains))
    assert wanted > 1.5
    assert abs(engine.acceptance - wanted) <= 0.01 * wanted


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs without a GPU: what was recorded runs again, its result at a fixed address.

    Kernels here read the host's numbers, so those are made anew from the tensors that a graph reads.
    """
    built = model("dense", 3)
    for kind in KINDS:
        plain("dense", kind)  # without these graphs

    def capture(self: Any, work: Any) -> Any:
        result = work().clone()
        return lambda: result.copy_(work()), result

    def seen(owner: Any, method: str) -> None:
        given = getattr(owner, method)

        def run(self: Any, *args: Any) -> None:
            given(self, *args)
            self.batch.refresh()
            built.runtime.begin(self.batch)

        monkeypatch.setattr(owner, method, run)

    monkeypatch.setattr(hal.Runtime, "capture", capture)
    monkeypatch.setattr(hal.Runtime, "can_capture", True)
    monkeypatch.setattr(hal.Runtime, "uncaptured", lambda self, rows: [])
    for owner, method in ((FixedBatch, "fill"), (FixedBatch, "follow"), (Behind, "start"), (Behind, "advance")):
        seen(owner, method)


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("slots", [1, 3, 16])
def test_steps_by_graph_give_the_same_tokens(kind: str, slots: int) -> None:
    engine = poisoned("dense", 3, slots=slots, pages=64)
    assert not engine.eager
    assert engine.drafted is not None
    assert engine.drafted.graphs
    assert engine.generate(KINDS[kind]) == plain("dense", kind)
    assert engine._drafting is None
    assert len(engine._slots) == slots
