"""Matrix products: the input projection of a layer, row-parallel Linear, NormLinear, plain Gemm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, ClassVar

from hal.errors import HalError
from hal.formats import STATIC_FP8, Format, Quantized, Scale, Tensor
from hal.layout import Param
from hal.ops.base import Arg, Case, Op, Outcome, Pack, Problem, Signature
from hal.ops.formulas import rms_norm

if TYPE_CHECKING:
    import torch

    from hal.formats import Encoded

BF16 = Tensor("bfloat16")
FP8_WEIGHT = Quantized("float8_e4m3fn", Scale("tensor", static=True))


@dataclass(frozen=True)
class Projection:
    """One part of an input projection: its local rows, the output it goes to, its weight format.

    ``shard`` and ``copies`` as in ``Param``: rank r holds slice r // copies.
    """

    name: str
    rows: int
    output: str
    weight_format: Format = BF16
    copies: int = 1

    def __str__(self) -> str:
        return f"{self.name}:{self.rows}"


def weight_params(
    name: str,
    rows: int,
    columns: int,
    form: Format,
    *,
    shard: int | None,
    copies: int = 1,
    memory: str = "weight",
) -> tuple[Param, ...]:
    """The parameters of one weight matrix: itself, and its scale where it is quantized."""
    init = (0.0, columns**-0.5)
    if isinstance(form, Tensor):
        return (Param(name, (rows, columns), form.dtype, memory, shard, copies=copies, init=init),)
    scale = Param(f"{name}_scale", (1,), form.scale.dtype, f"{memory}_scale", init=(0.02, 0.0))
    return (Param(name, (rows, columns), form.value, memory, shard, copies=copies, init=(0.0, 2.0)), scale)


@dataclass(frozen=True, kw_only=True)
class InProj(Op[["torch.Tensor", "torch.Tensor"], "tuple[tuple[torch.Tensor, ...], torch.Tensor]"]):
    """Opens a layer: reduce over ranks, add to the residual, Gemma RMSNorm, project to several outputs.

    ``residual += sum over ranks of partial``; ``x = norm(residual) * (1 + w)`` in float32;
    each output is x times the rows of its parts, one part after the other. Outputs may be
    views of one buffer: their row stride is free. Padding of the weight never shows.
    """

    hidden: int
    parts: tuple[Projection, ...]
    dtype: str = "bfloat16"
    eps: float = 1e-6
    coarse: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        runs = [name for name, _ in groupby(p.output for p in self.parts)]
        if len(set(runs)) != len(runs):
            raise HalError(f"InProj: parts: the parts of an output must stand together, got outputs {', '.join(runs)}")

    def outputs(self) -> dict[str, int]:
        """Width of each output, in order."""
        found: dict[str, int] = {}
        for part in self.parts:
            found[part.output] = found.get(part.output, 0) + part.rows
        return found

    def signature(self) -> Signature:
        form = Tensor(self.dtype)
        hidden = (Arg("partial", ("rows", self.hidden), form), Arg("residual", ("rows", self.hidden), form))
        value = tuple(Arg(name, ("rows", width), form, free=(0,)) for name, width in self.outputs().items())
        return Signature(hidden, (Pack("value", value), Arg("residual", ("rows", self.hidden), form)))

    def params(self) -> tuple[Param, ...]:
        found = [Param("norm", (self.hidden,), self.dtype, "norm", init=(0.0, 0.1))]
        for p in self.parts:
            found += weight_params(p.name, p.rows, self.hidden, p.weight_format, shard=0, copies=p.copies)
        return tuple(found)

    def reference(self, problem: Problem) -> Outcome:
        import torch

        residual = problem.args["residual"] + problem.args["partial"]
        x = rms_norm(residual, problem.params["norm"], self.eps, 1.0)
        outputs = {
            name: torch.cat([x @ problem.params[p.name].T for p in self.parts if p.output == name], -1)
            for name in self.outputs()
        }
        return (*outputs.values(), residual), {}

    @classmethod
    def cases(cls) -> Sequence[Case]:
        parts = tuple(
            Projection(n, rows, out)
            for n, rows, out in (
                ("q", 32, "qkv"), ("k", 32, "qkv"), ("v", 48, "qkv"), ("z", 48, "z"), ("b", 3, "b"), ("a", 3, "a")
            )
        )  # fmt: skip
        odd, even = cls(hidden=64, parts=parts), cls(hidden=64, parts=(*parts[:4], *_widened(parts[4:], 4)))
        return [
            Case("one row", even, (1,)),
            Case("odd width", odd, (5,)),
            Case("many rows", odd, (1030,)),
            Case("no rows", even, (0,)),
            Case("large residual", even, (3,), variant="large residual"),
        ]

    def adjust(self, variant: str, problem: Problem) -> None:
        problem.args["residual"].mul_(100.0)


def _widened(parts: Sequence[Projection], rows: int) -> tuple[Projection, ...]:
    return tuple(replace(p, rows=rows) for p in parts)


@dataclass(frozen=True, kw_only=True)
class Linear(Op[["torch.Tensor | Encoded"], "torch.Tensor"]):
    """Closes a mixer: ``x [rows, columns]`` times a weight split by columns over ranks; gives partial sums.

    The consumer of the result reduces over ranks. With a quantized weight the value is
    ``(x_code * x_scale) @ (w_code * w_scale).T``; ``input_scale``: the checkpoint fixes the
    scale of x, a buffer of this op's storage that the producer of x reads.
    """

    columns: int
    rows: int
    x: Format = BF16
    weight: Format = BF16
    input_scale: bool = False
    dtype: str = "bfloat16"
    coarse: ClassVar[bool] = True

    def signature(self) -> Signature:
        x = Arg("x", ("rows", self.columns), self.x, free=(0,))
        return Signature((x,), (Arg("partial", ("rows", self.rows), Tensor(self.dtype)),))

    def params(self) -> tuple[Param, ...]:
        found = weight_params("weight", self.rows, self.columns, self.weight, shard=1)
        if self.input_scale:
            found += (Param("input_scale", (1,), "float32", "input_scale", init=(0.02, 0.0)),)
        return found

    def reference(self, problem: Problem) -> Outcome:
        weight = problem.params["weight"]
        if isinstance(self.weight, Quantized):
            weight = weight * problem.params["weight_scale"]
        return (problem.args["x"] @ weight.T,), {}

    @classmethod
    def cases(cls) -> Sequence[Case]:
        plain = cls(columns=96, rows=64)
        fp8 = replace(plain, weight=FP8_WEIGHT, input_scale=True)
        return [
            Case("one row", plain, (1,)),
            Case("few rows", plain, (7,)),
            Case("rows", plain, (33,)),
            Case("no rows", plain, (0,)),
            Case("fp8 weight", fp8, (5,)),
            Case("fp8 both", replace(fp8, x=STATIC_FP8), (5,)),
            Case("fp8 both, no rows", replace(fp8, x=STATIC_FP8), (0,)),
        ]


@dataclass(frozen=True, kw_only=True)
class NormLinear(Op[["torch.Tensor", "torch.Tensor"], "tuple[torch.Tensor, torch.Tensor]"]):
    """Opens an attention layer: like InProj with one output, ``[rows, sum of the parts' rows]``."""

    hidden: int
    parts: tuple[Projection, ...]
    dtype: str = "bfloat16"
    eps: float = 1e-6
    coarse: ClassVar[bool] = True

    @property
    def width(self) -> int:
        """Columns of the result."""
        return sum(p.rows for p in self.parts)

    def signature(self) -> Signature:
        form = Tensor(self.dtype)
        hidden = (Arg("partial", ("rows", self.hidden), form), Arg("residual", ("rows", self.hidden), form))
        return Signature(hidden, (Arg("value", ("rows", self.width), form, free=(0,)), hidden[1]))

    def params(self) -> tuple[Param, ...]:
        found = [Param("norm", (self.hidden,), self.dtype, "norm", init=(0.0, 0.1))]
        for p in self.parts:
            found += weight_params(p.name, p.rows, self.hidden, p.weight_format, shard=0, copies=p.copies)
        return tuple(found)

    def reference(self, problem: Problem) -> Outcome:
        import torch

        residual = problem.args["residual"] + problem.args["partial"]
        x = rms_norm(residual, problem.params["norm"], self.eps, 1.0)
        return (torch.cat([x @ problem.params[p.name].T for p in self.parts], -1), residual), {}

    @classmethod
    def cases(cls) -> Sequence[Case]:
        op = cls(hidden=64, parts=tuple(Projection(n, r, "qkv") for n, r in (("q", 64), ("k", 16), ("v", 16))))
        return [Case("one row", op, (1,)), Case("rows", op, (17,)), Case("no rows", op, (0,))]


@dataclass(frozen=True, kw_only=True)
class Gemm(Op[["torch.Tensor"], "torch.Tensor"]):
    """``x [rows, columns] @ weight[rows, columns].T``; a part of composed kernels."""

    columns: int
    rows: int
    x: Format = BF16
    weight: Format = BF16
    dtype: str = "bfloat16"

    def signature(self) -> Signature:
        x = Arg("x", ("rows", self.columns), self.x, free=(0,))
        return Signature((x,), (Arg("value", ("rows", self.rows), Tensor(self.dtype), free=(0,)),))

    def params(self) -> tuple[Param, ...]:
        return weight_params("weight", self.rows, self.columns, self.weight, shard=0)

    def reference(self, problem: Problem) -> Outcome:
        return (problem.args["x"] @ problem.params["weight"].T,), {}

    @classmethod
    def cases(cls) -> Sequence[Case]:
        op = cls(columns=96, rows=64)
        odd = cls(columns=200, rows=37)
        return [
            Case("one row", op, (1,)),
            Case("few rows", odd, (7,)),
            Case("long rows", cls(columns=8192, rows=16), (5,)),
            Case("rows", op, (33,)),
            Case("no rows", op, (0,)),
        ]
