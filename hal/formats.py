"""How values are written: dtypes with their limits, and the formats that travel on an edge."""

from __future__ import annotations

from dataclasses import dataclass
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
    "int64": DType(64, floating=False),
    "int32": DType(32, floating=False),
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
    """What one scale covers, and whether the checkpoint fixes it (static) or the values do."""

    per: Literal["tensor", "token", "channel", "block"]
    static: bool = False
    block: tuple[int, int] | None = None
    dtype: str = "float32"

    def __str__(self) -> str:
        size = f" {self.block[0]}x{self.block[1]}" if self.block else ""
        return f"{'static' if self.static else 'dynamic'} {self.dtype} per {self.per}{size}"


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

    def nbytes(self, elements: int) -> int:
        """Bytes of so many elements, without their scales."""
        return elements * dtype(self.value).bits // 8


Format = Tensor | Quantized


class Encoded(NamedTuple):
    """What runs on an edge whose format is Quantized."""

    value: Any
    scale: Any


STATIC_FP8 = Quantized("float8_e4m3fn", Scale("tensor", static=True))
