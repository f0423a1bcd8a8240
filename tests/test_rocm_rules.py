"""AMD's rules as data: the preshuffled product by K, M and N, against the sizes that broke it elsewhere."""

from __future__ import annotations

from functools import partial

import fake_aiter
import pytest
import torch
from facts import device
from hal_models.qwen3_5.config import configure
from hal_rocm import rules
from hal_rocm.layouts import Shuffled, shuffled
from hal_rocm.rules import Tile, no_plain, no_preshuffled, padding, preshuffled_tile

from hal.layout import Param
from hal.storage import Storage

ROWS = (63, 64, 255, 256)
# of b and a together, by model and ranks: N, and the rows of x of which there is no product; None: not even shuffled
PAIRS = {
    ("qwen3.5-0.8b", 1): (32, (64, 255, 256)), ("qwen3.5-0.8b", 2): (16, ROWS),
    ("qwen3.5-0.8b", 4): (8, None), ("qwen3.5-0.8b", 8): (4, None),
    ("qwen3.5-27b", 1): (96, (256,)), ("qwen3.5-27b", 2): (48, ROWS),
    ("qwen3.5-27b", 4): (24, None), ("qwen3.5-27b", 8): (12, None),
    ("qwen3.5-35b-a3b", 1): (64, ()), ("qwen3.5-35b-a3b", 2): (32, (256,)),
    ("qwen3.5-35b-a3b", 4): (16, ROWS), ("qwen3.5-35b-a3b", 8): (8, None),
    ("qwen3.5-397b-a17b", 1): (128, ()), ("qwen3.5-397b-a17b", 2): (64, ()),
    ("qwen3.5-397b-a17b", 4): (32, (256,)), ("qwen3.5-397b-a17b", 8): (16, ROWS),
}  # fmt: skip


@pytest.mark.parametrize(("model", "ranks"), PAIRS)
def test_b_and_a_alone_in_a_preshuffled_product(model: str, ranks: int) -> None:
    config = configure(model)
    n, fails = PAIRS[model, ranks]
    assert n == 2 * config.value_heads // ranks
    for m in ROWS:
        reason = no_preshuffled(config.hidden, m, n)
        assert (reason is not None) == (fails is None or m in fails), (m, reason)
        if fails is None:
            assert str(reason) == f"needs rows in multiples of 16 to shuffle; N {n} leaves {n % 16}"


@pytest.mark.parametrize(("model", "ranks"), PAIRS)
def test_padded_as_the_rule_says_there_is_a_product_for_any_rows(model: str, ranks: int) -> None:
    k, n = configure(model).hidden, PAIRS[model, ranks][0]
    multiple = padding(k)
    assert multiple == 128
    wide = -(-n // multiple) * multiple
    assert not [m for m in (*range(1, 600), 4096) if no_preshuffled(k, m, wide)]


def test_the_case_of_397b_over_four_ranks_names_its_numbers() -> None:
    assert no_preshuffled(4096, 255, 32) is None
    assert str(no_preshuffled(4096, 256, 32)) == "needs N in multiples of 64 at K 4096 and 256 rows; N 32 leaves 32"


@pytest.mark.parametrize(
    ("k", "m", "n", "tile"),
    [
        (4096, 1, 1535, Tile(32, 512)), (4096, 255, 1536, Tile(64, 512)), (4096, 256, 1536, Tile(128, 128)),
        (4096, 256, 1535, Tile(64, 128)), (4096, 256, 1600, Tile(64, 128)), (1664, 1, 2048, Tile(128, 128)),
        (1535, 63, 64, Tile(32, 128)), (512, 64, 64, Tile(64, 128)), (512, 256, 64, Tile(64, 128)),
        (512, 257, 64, Tile(128, 64)), (511, 1, 64, None), (448, 256, 64, Tile(256, 64)),
        (192, 257, 64, Tile(128, 64)), (191, 1, 64, None), (128, 1, 64, None),
    ],
)  # fmt: skip
def test_tiles_at_the_edges_of_the_table(k: int, m: int, n: int, tile: Tile | None) -> None:
    assert preshuffled_tile(k, m, n) == tile


def test_below_k_512_the_padding_is_wider_and_below_192_there_is_none() -> None:
    assert [padding(k) for k in (512, 448, 256, 192, 160, 128, 4096 + 32)] == [128, 256, 256, 256, None, None, None]
    assert no_preshuffled(448, 64, 128) is not None
    assert str(no_preshuffled(160, 64, 256)).endswith("K is 160")
    assert no_plain(160) is None
    assert str(no_plain(24)) == "needs K in multiples of 16; K 24 leaves 8"


@pytest.mark.parametrize("k", [128, 160, 192, 256, 448, 512, 640, 1024, 1536, 1664, 2048, 4096])
def test_the_double_refuses_exactly_what_the_rules_refuse(k: int) -> None:
    kind = torch.float8_e4m3fnuz
    for n in (16, 32, 48, 64, 128, 256):
        weight = fake_aiter.shuffle_weight(x=torch.zeros(n, k, dtype=kind))
        for m in (1, 63, 64, 255, 256, 257):
            given = {"x_scale": torch.ones(m, 1), "w_scale": torch.ones(n, 1)}
            product = partial(fake_aiter.gemm_a8w8_bpreshuffle, XQ=torch.zeros(m, k, dtype=kind), WQ=weight, **given)
            if no_preshuffled(k, m, n) is None:
                assert product().shape == (m, n)
            else:
                with pytest.raises(RuntimeError, match=r"This GEMM is not supported|Unsupported K"):
                    product()


def test_the_kind_of_fp8_is_the_device_s() -> None:
    kinds = {"mi300x": "float8_e4m3fnuz", "mi355x": "float8_e4m3fn", "rx-9070": "float8_e4m3fn", "a100": None}
    assert {name: rules.fp8_kind(device(name)) for name in kinds} == kinds
    assert rules.fp8_kind(device("mi300x", fp8_e4m3fnuz=None)) is None


def test_rows_are_bounded_by_what_32_bits_reach() -> None:
    assert rules.rows_within_buffer(1024) == 2**21 - 1
    assert rules.rows_within_buffer(2 * 248320, 16) == 4324
    assert rules.rows_within_buffer(2**33) == 1


@pytest.mark.parametrize("kind", [torch.float8_e4m3fnuz, torch.bfloat16])
def test_shuffled_byte_for_byte_as_aiter_does(kind: torch.dtype) -> None:
    weight = torch.arange(2 * 32 * 64).remainder(251).float().view(2, 32, 64).to(kind)
    raw = weight.view(torch.uint8)
    assert torch.equal(shuffled(weight).view(torch.uint8), fake_aiter.shuffle_weight(x=weight).view(torch.uint8))
    assert not torch.equal(shuffled(weight).view(torch.uint8), raw)
    assert not torch.equal(shuffled(shuffled(weight)).view(torch.uint8), raw), "twice is not once"


def test_a_storage_is_shuffled_once_and_again_after_a_reload() -> None:
    storage = Storage("s", [Param("w", (2, 32, 64), "bfloat16")], Shuffled(), "cpu")
    for seed in (1, 2):
        weight = torch.randn(2, 32, 64, generator=torch.Generator().manual_seed(seed)).bfloat16()
        storage.put("w", weight[:1])
        storage.put("w", weight[1:], (1,))
        for _ in range(2):
            storage.seal()
        assert torch.equal(storage.read(), shuffled(weight))  # type: ignore[arg-type]


def test_what_cannot_be_shuffled_names_its_sizes() -> None:
    with pytest.raises(ValueError, match=r"rows in multiples of 16 and columns of 32 can be shuffled, got \[24, 64\]"):
        shuffled(torch.zeros(24, 64))
