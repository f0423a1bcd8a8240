"""The engine: the same tokens whatever shares the batch, the slots, the pages, the chunks; errors that stop nothing."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
import torch
from hal_models import PAGE_SIZE
from hal_models.commands.loading import SHIPPED
from hal_models.engine import Engine, Event, Request, score
from hal_models.qwen3_5.model import Qwen35
from hal_models.tasks import lines
from stepping import model_of

import hal
from hal.batch import Sampling
from hal.errors import HalError
from hal.fixed import FixedBatch

# one token, below the convolution's width, around a page, several pages; and lines with right answers
ODD = [list(b"7"), list(b"12"), list(b"3*4"), *(list(b"ab1 cd2 ef3 gh4 "[:15] * 4)[:n] for n in (15, 16, 17, 33, 60))]
PROMPTS = ODD + [list(prompt.encode()) for _, prompt, _ in lines(3, 5)]
GREEDY = [Request(prompt, 3 + 4 * index % 11) for index, prompt in enumerate(PROMPTS)]
SAMPLED = [
    replace(request, sampling=Sampling(temperature=1.5, top_p=0.95, top_k=40, seed=index % 5))
    for index, request in enumerate(GREEDY)
]
MIXED = [pair[index % 2] for index, pair in enumerate(zip(GREEDY, SAMPLED, strict=True))]
KINDS = {"greedy": GREEDY, "sampled": SAMPLED, "mixed": MIXED}
Tokens = list[list[int]]


@pytest.fixture(scope="module")
def model() -> Qwen35:
    torch.set_num_threads(1)
    return model_of(SHIPPED / "dense")


@pytest.fixture(scope="module")
def alone(model: Qwen35) -> dict[str, Tokens]:
    """Tokens of each request in an engine of its own."""
    return {kind: [poisoned(model).generate([r])[0] for r in requests] for kind, requests in KINDS.items()}


def poison(engine: Engine) -> Engine:
    for pools in engine.state:
        for pool in pools:
            pool.fill_(float("nan"))
    return engine


def poisoned(model: Qwen35, **sizes: int) -> Engine:
    """An engine whose memory holds NaN before it starts."""
    return poison(Engine(model, **{"slots": 1, "pages": 8, **sizes}))


@pytest.mark.parametrize("sizes", [{}, {"slots": 3, "pages": 7}, {"slots": 16, "pages": 9}, {"slots": 16, "pages": 64}])
@pytest.mark.parametrize("kind", KINDS)
def test_requests_together_give_what_each_gives_alone(
    kind: str, sizes: dict[str, int], model: Qwen35, alone: dict[str, Tokens]
) -> None:
    assert poisoned(model, **sizes).generate(KINDS[kind]) == alone[kind]


@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 17, 512])
def test_chunks_of_any_size(chunk: int, model: Qwen35, alone: dict[str, Tokens]) -> None:
    assert poisoned(model, slots=4, pages=16, chunk=chunk).generate(MIXED) == alone["mixed"]


def test_any_order_of_arrival(model: Qwen35, alone: dict[str, Tokens]) -> None:
    assert poisoned(model, slots=4, pages=12).generate(MIXED[::-1]) == alone["mixed"][::-1]


def test_a_request_that_comes_during_a_run(model: Qwen35, alone: dict[str, Tokens]) -> None:
    engine, found = poisoned(model, slots=2, pages=12), dict[int, list[int]]()
    waiting = list(MIXED)
    engine.add(waiting.pop(0))
    for event in engine.run():
        if event.token is not None:
            found.setdefault(event.request, []).append(event.token)
        if waiting:
            engine.add(waiting.pop(0))
    assert [found[index] for index in range(len(MIXED))] == alone["mixed"]


def test_what_a_slot_held_before_never_shows(model: Qwen35, alone: dict[str, Tokens]) -> None:
    engine = poisoned(model, slots=2, pages=12)
    assert engine.generate(GREEDY) == alone["greedy"]
    assert engine.generate(GREEDY[::-1]) == alone["greedy"][::-1]
    assert poison(engine).generate(GREEDY) == alone["greedy"]


def test_every_slot_and_page_comes_back(model: Qwen35) -> None:
    engine = Engine(model, slots=3, pages=10)
    fills = Request(PROMPTS[0], 10 * PAGE_SIZE - len(PROMPTS[0]), stops=frozenset(range(256)))
    for _ in range(3):
        engine.generate([*GREEDY, fills])
        assert sorted(engine._slots) == [0, 1, 2]
        assert sorted(engine._pages) == list(range(10))


def ended(model: Qwen35, request: Request) -> tuple[list[int | None], str]:
    engine = poisoned(model)
    engine.add(request)
    events = list(engine.run())
    assert [event.finish for event in events[:-1]] == [""] * (len(events) - 1)
    return [event.token for event in events[:-1]], events[-1].finish


def test_where_a_request_ends(model: Qwen35) -> None:
    asked = Request(list(b"12+34="), 12)
    whole = ended(model, asked)[0]
    assert whole[:3] == list(b"46\n")
    assert ended(model, asked) == (whole, "length")
    assert ended(model, replace(asked, max_tokens=1)) == (whole[:1], "length")
    assert ended(model, replace(asked, stops=frozenset(b"\n"))) == (whole[:2], "stop")
    assert ended(model, replace(asked, stops=frozenset(b"\n"), max_tokens=2)) == (whole[:2], "length")
    assert ended(model, replace(asked, stops=frozenset(b"\n"), max_tokens=3)) == (whole[:2], "stop")
    assert ended(model, replace(asked, stops=frozenset(b"4"))) == ([], "stop")
    # a stop token of the prompt stops nothing
    assert ended(model, replace(asked, stops=frozenset(b"+\n"))) == (whole[:2], "stop")


def test_events_tell_each_request_in_order_and_its_end_once(model: Qwen35, alone: dict[str, Tokens]) -> None:
    engine = poisoned(model, slots=4, pages=12)
    numbers = [engine.add(request) for request in MIXED]
    assert numbers == list(range(len(MIXED)))
    events = list(engine.run())
    for number, tokens in zip(numbers, alone["mixed"], strict=True):
        end = Event(number, None, "length")
        assert [e for e in events if e.request == number] == [*(Event(number, t) for t in tokens), end]
    assert list(engine.run()) == []
    first = list(dict.fromkeys(event.request for event in events))
    assert first == numbers, "who came first starts first"


@pytest.mark.parametrize("size", ["slots", "pages", "chunk"])
def test_an_engine_of_nothing(size: str, model: Qwen35) -> None:
    with pytest.raises(HalError, match=f"engine: {size}: expected 1 or more, got 0"):
        Engine(model, **{size: 0})


BAD = [
    (Request([], 4), "prompt: expected at least one token"),
    (Request([1], 0), "max_tokens: expected 1 or more, got 0"),
    (Request([1, 320], 4), r"expected tokens of 0\.\.319, got 320"),
    (Request([1, -1], 4), r"expected tokens of 0\.\.319, got -1"),
    (Request([1] * 120, 9), "129 tokens in all; the engine holds 128"),
]


@pytest.mark.parametrize(("bad", "words"), BAD)
def test_a_request_that_cannot_run_leaves_the_others_alone(
    bad: Request, words: str, model: Qwen35, alone: dict[str, Tokens]
) -> None:
    engine = poisoned(model)
    with pytest.raises(HalError, match=words):
        engine.generate([GREEDY[1], bad])
    engine.add(GREEDY[0])
    with pytest.raises(HalError, match=words):
        engine.add(bad)
    events = list(engine.run())
    assert [event.token for event in events[:-1]] == alone["greedy"][0]
    assert engine.generate(GREEDY[:3]) == alone["greedy"][:3]


def test_positions_limit_a_request_too(model: Qwen35) -> None:
    with pytest.raises(HalError, match="4097 tokens in all; the engine holds 4096"):
        Engine(model, pages=300).add(Request([1] * 4000, 97))


@pytest.mark.parametrize("heard", [0, 1, 3, 4, 9])
def test_a_run_that_is_left_early_goes_on_in_the_next(heard: int, model: Qwen35, alone: dict[str, Tokens]) -> None:
    engine, fresh = poisoned(model, slots=3, pages=12), poisoned(model, slots=3, pages=12)
    for request in MIXED[:5]:
        engine.add(request)
        fresh.add(request)
    events = list(islice(engine.run(), heard))
    assert events + list(engine.run()) == list(fresh.run())


@pytest.mark.parametrize("heard", [0, 1, 4])
def test_a_run_that_is_left_early_disturbs_no_other(heard: int, model: Qwen35, alone: dict[str, Tokens]) -> None:
    engine = poisoned(model, slots=3, pages=12)
    for request in SAMPLED[:5]:
        engine.add(request)
    assert len(list(islice(engine.run(), heard))) == heard
    assert engine.generate(GREEDY) == alone["greedy"]


def test_scores_of_a_line_are_those_it_was_written_with(model: Qwen35, alone: dict[str, Tokens]) -> None:
    whole = [[*request.prompt, *tokens] for request, tokens in zip(GREEDY, alone["greedy"], strict=True)]
    for request, tokens, logits in zip(GREEDY, alone["greedy"], score(model, whole), strict=True):
        assert logits.shape == (len(request.prompt) + len(tokens), 320)
        assert logits[len(request.prompt) - 1 : -1].argmax(-1).tolist() == tokens


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch, model: Qwen35) -> None:
    """Graphs without a GPU: what was recorded runs again, its results at fixed addresses.

    Kernels here read the host's numbers, so those are made anew from the tensors that a graph reads.
    """

    def capture(self: Any, work: Any) -> Any:
        results = [tensor.clone() for tensor in work()]

        def replay() -> None:
            for result, fresh in zip(results, work(), strict=True):
                result.copy_(fresh)

        return replay, tuple(results)

    def seen(method: Any) -> Any:
        def run(self: FixedBatch, *args: Any) -> None:
            method(self, *args)
            batch = self.batch
            contexts, slots = (tuple(t.tolist()) for t in (batch.contexts, batch.slots))
            batch.host = replace(batch.host, lengths=(1,) * self.rows, contexts=contexts, slots=slots)
            model.runtime.begin(batch)

        return run

    monkeypatch.setattr(hal.Runtime, "capture", capture)
    monkeypatch.setattr(hal.Runtime, "can_capture", True)
    monkeypatch.setattr(hal.Runtime, "uncaptured", lambda self, rows: [])
    monkeypatch.setattr(FixedBatch, "fill", seen(FixedBatch.fill))
    monkeypatch.setattr(FixedBatch, "advance", seen(FixedBatch.advance))


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize("sizes", [{}, {"slots": 3, "pages": 7}, {"slots": 16, "pages": 64}])
@pytest.mark.parametrize("kind", KINDS)
def test_steps_by_graph_give_the_same_tokens(
    kind: str, sizes: dict[str, int], model: Qwen35, alone: dict[str, Tokens]
) -> None:
    engine = poisoned(model, **sizes)
    assert not engine.eager
    assert engine.generate(KINDS[kind]) == alone[kind]
    assert len(engine._slots) == sizes.get("slots", 1)
    assert engine._under_way is None


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize("heard", [1, 5, 9, 14])
def test_a_request_that_comes_while_a_step_is_under_way(heard: int, model: Qwen35, alone: dict[str, Tokens]) -> None:
    engine = poisoned(model, slots=4, pages=32)
    early = [engine.add(r) for r in GREEDY[:3]]
    found: dict[int, list[int]] = {index: [] for index in (*early, *range(3, len(GREEDY)))}
    events = engine.run()
    heard_events = list(islice(events, heard))
    for request in GREEDY[3:]:
        engine.add(request)
    for event in [*heard_events, *events]:
        if event.token is not None:
            found[event.request].append(event.token)
    assert [found[i] for i in range(len(GREEDY))] == alone["greedy"]


@pytest.mark.usefixtures("recorded")
def test_a_stop_token_ends_one_while_its_next_step_is_under_way(model: Qwen35, alone: dict[str, Tokens]) -> None:
    for index, tokens in enumerate(alone["greedy"]):
        for at, stop in enumerate(tokens[:3]):
            requests = [
                replace(r, stops=frozenset({stop}) if i == index else frozenset()) for i, r in enumerate(GREEDY)
            ]
            wanted = list(alone["greedy"])
            wanted[index] = tokens[: tokens.index(stop)]
            if at == tokens.index(stop):
                assert poisoned(model, slots=3, pages=24).generate(requests) == wanted
