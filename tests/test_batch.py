"""Batches from plain numbers: what does not fit is an error that names the argument and the value."""

from __future__ import annotations

from typing import Any

import pytest

import hal
from hal.errors import HalError

GIVEN: dict[str, Any] = {
    "lengths": [2, 3], "contexts": [4, 0], "slots": [1, 0], "pages": [[0, 2], [1]], "accepted": [3, 0]
}  # fmt: skip


def made(mode: str = "verify", **changed: Any) -> hal.Batch:
    given = {**GIVEN, **changed}
    return hal.make_batch(mode, *(given.pop(name) for name in ("lengths", "contexts", "slots")), **given)


def test_numbers_that_fit_are_taken_as_they_are() -> None:
    batch = made()
    assert batch.cu_seqlens.tolist() == [0, 2, 5]
    assert batch.kv_lengths.tolist() == [6, 3]
    assert batch.page_table.tolist() == [[0, 2], [1, -1]]
    assert batch.cells.tolist() == [4, 5, 16, 17, 18]
    assert made(contexts=range(2), accepted=[], slots=(-1, 2**31 - 1)).slots.tolist() == [-1, 2**31 - 1]
    assert made(pages=[], lengths=[], contexts=[], slots=[], accepted=[]).page_table.shape == (0, 0)
    assert made(pages=[[], []], lengths=[0, 0], contexts=[0, 0], accepted=[]).page_table.shape == (2, 0)


@pytest.mark.parametrize("value", [1.0, 1.5, True, "1", None, float("nan"), -(2**31) - 1, 2**31, 2**70])
@pytest.mark.parametrize("name", GIVEN)
def test_what_is_no_int_of_32_bits_is_an_error(name: str, value: Any) -> None:
    wrong = [*GIVEN[name][:-1], [value] if name == "pages" else value]
    with pytest.raises(HalError) as caught:
        made(**{name: wrong})
    assert str(caught.value).startswith(f"batch: {name}: expected an int from ")
    assert str(caught.value).endswith(f" to 2147483647, got {value!r}")


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"page_size": 16.0}, "page_size: expected an int from 1 to 2147483647, got 16.0"),
        ({"page_size": 0}, "page_size: expected an int from 1 to 2147483647, got 0"),
        ({"contexts": [4, -1]}, "contexts: expected an int from 0 to 2147483647, got -1"),
        ({"accepted": [3, 2]}, "accepted: expected at most the 0 tokens before this step, got 2"),
        ({"mode": "prefill"}, "accepted: 3 tokens wait to be taken into the state, which a prefill step does not do"),
        ({"contexts": [2**31 - 1, 0]}, "contexts and lengths together: expected an int from 0 to "),
        ({"lengths": [2**31 - 1, 1]}, "lengths, all together: expected an int from 0 to 2147483647, got 2147483648"),
        ({"lengths": [2, 1], "mode": "decode"}, "lengths: expected 1 (decode is one token of each), got 2"),
        ({"lengths": [1, 1.0], "mode": "decode"}, "lengths: expected 1 (decode is one token of each), got 1.0"),
    ],
)
def test_what_does_not_fit_is_named(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(HalError) as caught:
        made(**changed)
    assert str(caught.value).startswith(f"batch: {said}")
