"""Parameters arrive in any order and any slices, at addresses that never change; nothing is filled by halves."""

from itertools import permutations

import pytest
import torch

from hal.errors import StorageError
from hal.layout import Packed, Padded, Param, ParamLayout, Separate
from hal.storage import Storage

PARTS = (Param("q", (4, 3), "bfloat16"), Param("k", (2, 3), "bfloat16"), Param("b", (1, 3), "bfloat16"))
LAYOUTS = [Packed(), Padded(8), Padded(4), Separate()]
SCALED = (Param("weight", (4, 3), "float8_e4m3fn"),)


def storage(layout: ParamLayout | None = None, parts: tuple[Param, ...] = PARTS) -> Storage:
    """Fresh memory, poisoned."""
    made = Storage("in_proj.weight", parts, layout or Packed(), "cpu")
    for buffer in made.buffers.values():
        buffer.view(torch.uint8).fill_(0xFF)
    return made


def rows(part: Param, first: float = 1.0) -> torch.Tensor:
    return (torch.arange(part.rows * part.columns).reshape(part.shape) + first).to(torch.bfloat16)


def whole(first: float = 1.0) -> torch.Tensor:
    return torch.cat([rows(part, first) for part in PARTS])


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("order", [*permutations(range(3))], ids=str)
def test_parts_come_in_any_order(layout: ParamLayout, order: tuple[int, ...]) -> None:
    have = storage(layout)
    for index in order:
        have.put(PARTS[index].name, rows(PARTS[index]))
    have.seal()
    assert {n: v.tolist() for n, v in have.read(Separate()).items()} == {p.name: rows(p).tolist() for p in PARTS}


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_reload_goes_to_the_same_addresses(layout: ParamLayout) -> None:
    have = storage(layout)
    kept = have.read(Separate())
    at = {n: b.data_ptr() for n, b in have.buffers.items()}
    for first in (1.0, 50.0):
        for part in PARTS:
            have.put(part.name, rows(part, first))
        have.seal()
    assert {n: b.data_ptr() for n, b in have.buffers.items()} == at
    assert torch.equal(torch.cat(list(kept.values())), whole(50.0))


@pytest.mark.parametrize("layout", LAYOUTS[:3], ids=str)
def test_what_is_packed_reads_as_one_tensor_without_a_copy(layout: ParamLayout) -> None:
    have = storage(layout)
    for part in PARTS:
        have.put(part.name, rows(part))
    have.seal()
    packed = have.read(Packed())
    assert torch.equal(packed, whole())
    assert packed.data_ptr() == have.read(Separate())["q"].data_ptr() == have.read().data_ptr()


@pytest.mark.parametrize(("multiple", "padded"), [(8, 8), (4, 8), (5, 10), (7, 7)])
def test_padding_is_zero_after_seal_though_the_memory_held_nan(multiple: int, padded: int) -> None:
    have = storage(Padded(multiple))
    assert have.read().isnan().all()
    for part in PARTS:
        have.put(part.name, rows(part))
    have.seal()
    assert have.read().shape == (padded, 3)
    assert not have.read()[7:].any()
    assert have.nbytes == padded * 3 * 2


@pytest.mark.parametrize(
    ("layout", "wanted", "readable"),
    [
        (Padded(8), Padded(4), True),
        (Padded(8), Packed(), True),
        (Padded(8), Separate(), True),
        (Padded(4), Padded(8), False),
        (Packed(), Separate(), True),
        (Packed(), Padded(8), False),
        (Separate(), Packed(), False),
        (Separate(), Padded(8), False),
    ],
)
def test_padded_reads_as_packed_and_packed_as_separate(layout, wanted, readable: bool) -> None:
    assert layout.reads_as(wanted) is readable
    if readable:
        storage(layout).read(wanted)
    else:
        with pytest.raises(StorageError, match=f"lies {layout}, which cannot be read as {wanted}"):
            storage(layout).read(wanted)


def test_slices_go_to_their_offsets() -> None:
    have = storage(parts=(Param("experts", (2, 4, 3), "bfloat16"),))
    value = torch.arange(24.0).reshape(2, 4, 3).to(torch.bfloat16)
    for expert in (1, 0):
        have.put("experts", value[expert, 2:], (expert, 2))
        have.put("experts", value[expert, 0], (expert, 0))
        have.put("experts", value[expert, 1:2, :2], (expert, 1))
        assert have.missing() == ["experts"]
        have.put("experts", value[expert, 1:2, 2:], (expert, 1, 2))
    have.seal()
    assert torch.equal(have.read(), value)


@pytest.mark.parametrize(
    ("puts", "missing"),
    [
        ([], ["q", "k", "b"]),
        ([("q", 4, 0), ("b", 1, 0)], ["k"]),
        ([("q", 3, 0), ("k", 2, 0), ("b", 1, 0)], ["q"]),
        # as many rows as it has, and one of them never
        ([("q", 3, 0), ("q", 1, 1), ("k", 2, 0), ("b", 1, 0)], ["q"]),
        ([("q", 2, 0), ("q", 2, 1), ("k", 2, 0), ("b", 1, 0)], ["q"]),
    ],
)
def test_seal_names_what_is_missing(puts, missing: list[str]) -> None:
    have = storage()
    for part, count, at in puts:
        have.put(part, torch.ones(count, 3), (at,))
    assert have.missing() == missing
    with pytest.raises(StorageError, match=rf"in_proj\.weight: not filled: {', '.join(missing)}$"):
        have.seal()


@pytest.mark.parametrize(
    "puts", [[(4, 0)], [(3, 0), (1, 3)], [(3, 0), (3, 1)], [(1, 3), (1, 2), (1, 1), (1, 0)], [(2, 0), (2, 2), (4, 0)]]
)
def test_a_part_is_whole_however_it_was_cut(puts: list[tuple[int, int]]) -> None:
    have = storage(parts=PARTS[:1])
    for count, at in puts:
        have.put("q", rows(PARTS[0])[at : at + count], (at,))
    have.seal()
    assert torch.equal(have.read(), rows(PARTS[0]))


@pytest.mark.parametrize(
    ("part", "shape", "at", "says"),
    [
        ("q", (5, 3), (), r"q: \[5, 3\] at \[0, 0\] does not fit \[4, 3\]"),
        ("q", (4, 2, 1), (), r"q: \[4, 2, 1\] at \[0, 0\] does not fit \[4, 3\]"),
        ("q", (2, 3), (3,), r"q: \[2, 3\] at \[3, 0\] does not fit"),
        ("q", (1, 3), (-1,), r"q: \[1, 3\] at \[-1, 0\] does not fit"),
        ("q", (1, 3), (0, 0, 0), r"q: \[1, 3\] at \[0, 0, 0\] does not fit"),
        ("q", (3, 4), (), r"q: \[3, 4\] at \[0, 0\] does not fit"),
        ("v", (4, 3), (), r"no part 'v'; the parts are q, k, b"),
    ],
)
def test_what_does_not_fit_is_an_error_that_names_the_part(part: str, shape, at, says: str) -> None:
    with pytest.raises(StorageError, match=rf"^in_proj\.weight: {says}"):
        storage().put(part, torch.ones(shape), at)


@pytest.mark.parametrize("kind", ["float64", "float32", "float16"])
def test_wide_floating_formats_are_rounded(kind: str) -> None:
    have = storage(parts=PARTS[:1])
    have.put("q", torch.full((4, 3), 1.01, dtype=getattr(torch, kind)))
    assert have.read().eq(torch.tensor(1.01).bfloat16()).all()


@pytest.mark.parametrize(
    ("parts", "kind"),
    [
        (SCALED, "bfloat16"),
        (SCALED, "float32"),
        (SCALED, "float8_e4m3fnuz"),
        (SCALED, "uint8"),
        (PARTS, "float8_e4m3fn"),
        (PARTS, "int64"),
        (PARTS, "int8"),
    ],
)
def test_nothing_is_encoded_or_decoded_silently(parts: tuple[Param, ...], kind: str) -> None:
    have = torch.ones(4, 3).to(getattr(torch, kind))
    with pytest.raises(StorageError, match=rf"{parts[0].name}: expected torch\.\w+, got torch\.{kind}"):
        storage(parts=parts).put(parts[0].name, have)


def test_bytes_of_fp8_are_taken_as_they_are() -> None:
    have = storage(parts=SCALED)
    codes = torch.arange(12, dtype=torch.uint8).view(torch.float8_e4m3fn).reshape(4, 3)
    have.put("weight", codes)
    assert torch.equal(have.read().view(torch.uint8), codes.view(torch.uint8))


def test_one_buffer_holds_one_dtype() -> None:
    mixed = (PARTS[0], Param("k", (2, 3), "float32"))
    assert Storage("w", mixed, Separate(), "cpu").nbytes == 4 * 3 * 2 + 2 * 3 * 4
    with pytest.raises(StorageError, match=r"w: packed holds one dtype, the parts have \['bfloat16', 'float32'\]"):
        Storage("w", mixed, Packed(), "cpu")
