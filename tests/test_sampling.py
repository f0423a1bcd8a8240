"""Sampled decoding: reproducible by seed, cut as asked; values out of range are errors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hal_models.commands.loading import SHIPPED
from hal_models.engine import Engine, Request, score
from hal_models.qwen3_5.model import Qwen35
from stepping import model_of

from hal.batch import Sampling, make_batch
from hal.errors import HalError

Draw = Callable[..., list[list[int]]]


@pytest.fixture(scope="module")
def model() -> Qwen35:
    torch.set_num_threads(1)
    return model_of(SHIPPED / "dense")


@pytest.fixture(scope="module")
def draw(model: Qwen35) -> Draw:
    def drawn(seeds: Sequence[int], **sampling: Any) -> list[list[int]]:
        made = [Request(list(b"ab"), 8, Sampling(**{"temperature": 3.0, **sampling}, seed=seed)) for seed in seeds]
        return Engine(model, slots=4, pages=8).generate(made)

    return drawn


def test_a_seed_gives_its_tokens_whatever_is_beside_it(draw: Draw) -> None:
    found = draw([1, 2, 1, 3, 4])
    assert found == draw([1, 2, 1, 3, 4])
    assert found[0] == found[2] == draw([1])[0]
    assert len({tuple(tokens) for tokens in found}) == 4


@pytest.mark.parametrize("chunk", [2, 512])
def test_each_token_is_decided_by_the_number_of_its_own_position(chunk: int, model: Qwen35) -> None:
    prompt = list(b"ab cd")
    drawn = [Sampling(temperature=8.0, seed=seed) for seed in range(4)]
    found = Engine(model, slots=4, pages=8, chunk=chunk).generate([Request(prompt, 6, each) for each in drawn])
    for sampling, tokens in zip(drawn, found, strict=True):
        logits = score(model, [prompt + tokens])[0][len(prompt) - 1 : -1]
        # the first is decided after len(prompt) tokens, the next after one more
        before = range(len(prompt) - 1, len(prompt) + 5)
        batch = make_batch("decode", [1] * 6, list(before), [0] * 6, sampling=[sampling] * 6)
        assert model.sample(logits, batch).tolist() == tokens


def test_cuts_that_leave_one_token_are_greedy(draw: Draw) -> None:
    greedy = draw([0], temperature=0.0)[0]
    assert draw([1, 2], top_k=1) == [greedy] * 2
    assert draw([3, 4], top_p=1e-9) == [greedy] * 2
    assert draw([5], temperature=1e-4)[0] == greedy
    assert draw([5], temperature=0.0, top_k=3, top_p=0.5)[0] == greedy


def test_cuts_keep_to_the_likeliest(draw: Draw) -> None:
    wide, narrow = draw(range(12)), draw(range(12), top_k=2)
    assert len({tokens[0] for tokens in narrow}) == 2
    assert len({tokens[0] for tokens in wide}) > 2


@pytest.mark.parametrize("chosen", [{"temperature": 1e4}, {"top_k": 320}, {"top_k": 10**6}, {"top_p": 1e-30}])
def test_extremes_give_tokens(chosen: dict[str, Any], draw: Draw) -> None:
    assert all(0 <= token < 320 for tokens in draw([1, 2], **chosen) for token in tokens)


@pytest.mark.parametrize(
    ("sampling", "words"),
    [
        ({"temperature": -0.1}, r"temperature .* -0\.1"),
        ({"temperature": float("nan")}, "temperature .* nan"),
        ({"top_p": 0.0}, r"top_p .* 0\.0"),
        ({"top_p": 1.01}, r"top_p .* 1\.01"),
        ({"top_p": float("nan")}, "top_p .* nan"),
        ({"top_k": -1}, "top_k .* -1"),
    ],
)
def test_sampling_out_of_range(sampling: dict[str, Any], words: str) -> None:
    with pytest.raises(HalError, match=words):
        Sampling(**sampling)
