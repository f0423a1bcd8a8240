"""What AMD's libraries take and refuse, as data: each rule answers with a Reason that quotes the numbers, or nothing.

aiter's per-token fp8 products: ``W [N, K]``, ``x [M, K]``. Source of the tables: aiter's heuristic
dispatch of ``gemm_a8w8_bpreshuffle`` and the checks of ``shuffle_weight``.
"""

from __future__ import annotations

from typing import NamedTuple

from hal.device import Device
from hal.requirement import Reason, Requirement, arch, library, vendor

# 0.1.20 has gemma_norm, paged attention with a plain cache, and the names used here
AITER: tuple[Requirement, ...] = (
    vendor("rocm"), arch("gfx942", "gfx950"), library("torch", ">=2.9"), library("aiter", ">=0.1.20,<0.2")
)  # fmt: skip
HIPBLASLT: tuple[Requirement, ...] = (vendor("rocm"), library("torch", ">=2.9"), library("rocm"))

BUFFER_BYTES = 2**31  # a buffer instruction reaches so far from its base
SHUFFLED_ROWS, SHUFFLED_COLUMNS = 16, 32  # of fp8: tiles that shuffle_weight moves, (16, 16) twice along K
PLAIN_COLUMNS = 16  # K of the product that is not preshuffled


class Tile(NamedTuple):
    """What divides the sizes of a preshuffled product: ``rows`` divides N, ``columns`` divides K."""

    rows: int
    columns: int


def fp8_kind(device: Device) -> str | None:
    """The e4m3 that the device multiplies: fnuz on gfx942, OCP's from gfx950 on; nothing where it has none."""
    for kind in ("e4m3fnuz", "e4m3fn"):
        if device.value(f"fp8_{kind}") is True:
            return f"float8_{kind}"
    return None


def preshuffled_tile(k: int, m: int, n: int) -> Tile | None:
    """The tile that the dispatch selects where no tuned row exists; nothing where it has none for K."""
    if k >= 1536:
        if m < 256 and k % 512 == 0:
            return Tile(32 if n < 1536 else 64, 512)
        return Tile(64 if n < 1536 or n % 128 else 128, 128)
    if k >= 512:
        if m < 64:
            return Tile(32, 128)
        return Tile(64, 128) if m <= 256 else Tile(128, 64)
    if k >= 192 and k % 64 == 0:
        return Tile(256, 64) if m <= 256 else Tile(128, 64)
    return None


def no_shuffle(k: int, n: int) -> Reason | None:
    """Why ``shuffle_weight`` refuses an fp8 weight ``[N, K]``."""
    if n % SHUFFLED_ROWS:
        return Reason("op", f"needs rows in multiples of {SHUFFLED_ROWS} to shuffle; N {n} leaves {n % SHUFFLED_ROWS}")
    if k % SHUFFLED_COLUMNS:
        left = k % SHUFFLED_COLUMNS
        return Reason("op", f"needs columns in multiples of {SHUFFLED_COLUMNS} to shuffle; K {k} leaves {left}")
    return None


def no_preshuffled(k: int, m: int, n: int) -> Reason | None:
    """Why there is no preshuffled product of these sizes."""
    if reason := no_shuffle(k, n):
        return reason
    tile = preshuffled_tile(k, m, n)
    if tile is None:
        return Reason("op", f"needs K of 512 or more, or of 192 or more in multiples of 64; K is {k}")
    if n % tile.rows:
        return Reason("op", f"needs N in multiples of {tile.rows} at K {k} and {m} rows; N {n} leaves {n % tile.rows}")
    if k % tile.columns:
        return Reason(
            "op", f"needs K in multiples of {tile.columns} at N {n} and {m} rows; K {k} leaves {k % tile.columns}"
        )
    return None


def padding(k: int) -> int | None:
    """Rows that a weight is padded to a multiple of, so that any number of rows of x has a preshuffled product.

    128, the widest tile; 256 below K 512. Nothing where no padding helps: then the plain product serves.
    """
    for multiple in (128, 256):
        if not any(no_preshuffled(k, m, n) for m in (1, 64, 256, 257) for n in (multiple, 12 * multiple)):
            return multiple
    return None


def no_plain(k: int) -> Reason | None:
    """Why the product that is not preshuffled refuses a weight ``[N, K]``; it pads any M and N itself."""
    if k % PLAIN_COLUMNS:
        return Reason("op", f"needs K in multiples of {PLAIN_COLUMNS}; K {k} leaves {k % PLAIN_COLUMNS}")
    return None


def rows_within_buffer(*row_bytes: int) -> int:
    """Most rows of which every tensor, of so many bytes a row, is reached by 32-bit offsets."""
    return max(1, (BUFFER_BYTES - 1) // max(row_bytes))
