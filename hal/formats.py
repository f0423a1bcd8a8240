"""How values are written: dtypes with their limits, formats of edges and weights, schemes of projections."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd
from typing import Any, Literal, NamedTuple

from hal.errors import UnknownName


class DType(NamedTuple):
    """One element type: its size in bits, and its largest finite value where it is narrow."""

    bits: int
    limit: float | None = None
    floating: bool = True


DTYPES: dict[str, DType] = {
    "float64": DType(64),
    "float32": DType(32),
    "bfloat16": DType(16),
    "float16": DType(16, 65504.0),
    "float8_e4m3fn": DType(8, 448.0),  # OCP
    "float8_e4m3fnuz": DType(8, 240.0),  # gfx942; the bytes of OCP mean half there
    "float8_e8m0fnu": DType(8),  # powers of two: scales, never values
    "float4_e2m1": DType(4, 6.0),  # two in a byte of uint8, the first in its low half
    "int64": DType(64, floating=False),
    "int32": DType(32, floating=False),
    "uint8": DType(8, floating=False),
    "bool": DType(8, floating=False),
}


def dtype(name: str) -> DType:
    """The element type of a name; an unknown name is an error that says the nearest."""
    try:
        return DTYPES[name]
    except KeyError:
        raise UnknownName("dtype", name, DTYPES) from None


@dataclass(frozen=True)
class Tensor:
    """Plain elements of one dtype."""

    dtype: str

    def __post_init__(self) -> None:
        dtype(self.dtype)

    def __str__(self) -> str:
        return self.dtype

    def nbytes(self, elements: int) -> int:
        """Bytes of so many elements."""
        return elements * dtype(self.dtype).bits // 8


@dataclass(frozen=True)
class Scale:
    """What one scale covers, and whether the checkpoint fixes it (static) or the values do.

    ``channel`` is a row of a weight, ``token`` a row of x. ``block``: rows and columns of one.
    ``within``: what a second scale covers, float32, that multiplies the first (a global scale); the
    checkpoint fixes it always.
    """

    per: Literal["tensor", "token", "channel", "block"]
    static: bool = False
    block: tuple[int, int] | None = None
    dtype: str = "float32"
    within: Literal["", "tensor", "channel"] = ""

    def __str__(self) -> str:
        size = f" {self.block[0]}x{self.block[1]}" if self.block else ""
        whole = f" within static float32 per {self.within}" if self.within else ""
        return f"{'static' if self.static else 'dynamic'} {self.dtype} per {self.per}{size}{whole}"

    @property
    def stored(self) -> str:
        """The dtype of the memory that holds scales; powers of two are bytes."""
        return "uint8" if self.dtype == "float8_e8m0fnu" else self.dtype

    @property
    def fixed(self) -> bool:
        """Whether a number of the checkpoint is part of it."""
        return self.static or bool(self.within)

    @property
    def for_all(self) -> bool:
        """Whether one number is for the whole matrix, so that two matrices have two."""
        return "tensor" in (self.per, self.within)

    def by_rows(self) -> Scale:
        """The same with a number for each row of a weight where there was one for all."""
        per = "channel" if self.per == "tensor" else self.per
        return replace(self, per=per, within="channel" if self.within else "")

    def shape_within(self, rows: int) -> tuple[int, ...]:
        """Global scales of a matrix: ``[1]``, or ``[rows]`` of a weight."""
        return (rows,) if self.within == "channel" else (1,)

    def shape(self, rows: int, columns: int) -> tuple[int, ...]:
        """Scales of a matrix: ``[1]``, ``[rows]`` of a weight, ``[rows, 1]`` of x, or one for each block."""
        if self.block:
            return (-(-rows // self.block[0]), -(-columns // self.block[1]))
        return {"tensor": (1,), "channel": (rows,), "token": (rows, 1)}[self.per]


@dataclass(frozen=True)
class Quantized:
    """Narrow elements and their scale: real value = element x scale."""

    value: str
    scale: Scale

    def __post_init__(self) -> None:
        dtype(self.value)

    def __str__(self) -> str:
        return f"{self.value} ({self.scale})"

    @property
    def limit(self) -> float:
        """Largest finite element; an encoder saturates there."""
        limit = dtype(self.value).limit
        if limit is None:
            raise ValueError(f"{self.value} has no limit to saturate at")
        return limit

    @property
    def stored(self) -> str:
        """The dtype of the memory that holds elements."""
        return "uint8" if self.packs > 1 else self.value

    @property
    def packs(self) -> int:
        """Elements in one element of the memory."""
        return max(1, 8 // dtype(self.value).bits)

    def nbytes(self, elements: int) -> int:
        """Bytes of so many elements, without their scales."""
        return elements * dtype(self.value).bits // 8


Format = Tensor | Quantized
Made = Format | tuple[Format, ...]  # what a producer gives its value in: one format, or several at once


class Encoded(NamedTuple):
    """What runs on an edge whose format is Quantized; ``within``: the global scale ``[1]``, where it has one."""

    value: Any
    scale: Any
    within: Any = None


@dataclass(frozen=True)
class Scheme:
    """How a checkpoint quantizes a projection: its weight, and what it rounds the input to, or nothing."""

    weight: Quantized
    activations: Quantized | None = None

    def __str__(self) -> str:
        alike = [name for name, known in SCHEMES.items() if self._alike(known)]
        # by its weight, of two of one weight by its activations
        name = min(alike, key=lambda name: SCHEMES[name].activations != self.activations, default="")
        if not name:
            return f"{self.weight} (activations {self.activations or 'as they are'})"
        block, whole = self.weight.scale.block, SCHEMES[name].weight.scale.block
        # blocks of a share may be smaller than the file's
        text = name if block is None or block == whole else f"{name} in {block[0]}x{block[1]}"
        as_known = self.activations == SCHEMES[name].activations
        return text if as_known else f"{text} (activations {self.activations or 'as they are'})"

    def _alike(self, known: Scheme) -> bool:
        """Whether weights are quantized as in a known scheme, whatever size their blocks have and rows share."""
        mine, theirs = self.weight.scale, known.weight.scale
        if mine.block and theirs.block:
            theirs = replace(theirs, block=mine.block)
        return self.weight in (replace(known.weight, scale=scale) for scale in (theirs, theirs.by_rows()))

    @property
    def fixed(self) -> Quantized | None:
        """The format of the inputs, where the checkpoint fixes a scale of them."""
        return self.activations if self.activations and self.activations.scale.fixed else None

    def by_rows(self) -> Scheme:
        """The same with a scale for each row of the weight where there was one: rows of several parts then pack."""
        return replace(self, weight=replace(self.weight, scale=self.weight.scale.by_rows()))

    def within(self, *rows: int, columns: int) -> Scheme:
        """The same with blocks that divide these rows and columns: no part and no rank holds a piece of one."""
        scale = self.weight.scale
        if scale.block is None:
            return self
        block = (gcd(scale.block[0], *rows), gcd(scale.block[1], columns))
        return replace(self, weight=replace(self.weight, scale=replace(scale, block=block)))


FP8 = "float8_e4m3fn"
STATIC_FP8 = Quantized(FP8, Scale("tensor", static=True))
TOKEN_FP8 = Quantized(FP8, Scale("token"))
BLOCK_FP8 = Quantized(FP8, Scale("block", block=(1, 128)))
MXFP4 = Quantized("float4_e2m1", Scale("block", block=(1, 32), dtype="float8_e8m0fnu"))
NVFP4 = Quantized("float4_e2m1", Scale("block", block=(1, 16), dtype=FP8, within="tensor"))

SCHEMES: dict[str, Scheme] = {
    "fp8_channel": Scheme(Quantized(FP8, Scale("channel", static=True)), TOKEN_FP8),
    "fp8_tensor": Scheme(Quantized(FP8, Scale("tensor", static=True)), STATIC_FP8),
    "fp8_block": Scheme(Quantized(FP8, Scale("block", static=True, block=(128, 128))), BLOCK_FP8),
    "mxfp4": Scheme(replace(MXFP4, scale=replace(MXFP4.scale, static=True)), MXFP4),
    "nvfp4": Scheme(replace(NVFP4, scale=replace(NVFP4.scale, static=True)), NVFP4),
}

# what a producer may be asked for
EDGES: dict[str, Quantized] = {
    "fp8": STATIC_FP8,
    "fp8 per token": TOKEN_FP8,
    "fp8 per 1x128": BLOCK_FP8,
    "mxfp4": MXFP4,
    "nvfp4": NVFP4,
}


def scheme(name: str) -> Scheme:
    """The scheme of a name; an unknown name is an error that says the nearest."""
    try:
        return SCHEMES[name]
    except KeyError:
        raise UnknownName("scheme", name, SCHEMES) from None
