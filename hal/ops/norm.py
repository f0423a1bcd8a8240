"""Norms: plain, with residual and reduction, gated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hal.formats import EDGES, TOKEN_FP8, Format, Made, Tensor
from hal.layout import Param
from hal.ops.base import Arg, Case, Op, Outcome, Pack, Problem, Signature
from hal.ops.formulas import rms_norm, silu

if TYPE_CHECKING:
    import torch

BF16 = Tensor("bfloat16")


def to_edges(op: RMSNorm | AddRMSNorm | GatedRMSNorm, rows: int) -> list[Case]:
    """The op with each format that an edge may have."""
    return [Case(f"to {name}", replace(op, out=form), (rows,)) for name, form in EDGES.items()]


@dataclass(frozen=True, kw_only=True)
class RMSNorm(Op[["torch.Tensor"], "torch.Tensor"]):
    """``x / sqrt(mean(x^2) + eps) * (offset + w)`` over hidden, in float32; offset 1 is Gemma's form.

    ``offset + w`` is formed in float32, never in the dtype of w.
    """

    hidden: int
    eps: float = 1e-6
    offset: float = 1.0
    dtype: str = "bfloat16"
    out: Format = BF16

    def signature(self) -> Signature:
        x = Arg("x", ("rows", self.hidden), Tensor(self.dtype), free=(0,))
        return Signature((x,), (Arg("value", ("rows", self.hidden), self.out),))

    def params(self) -> tuple[Param, ...]:
        return (Param("norm", (self.hidden,), self.dtype, "norm", init=(0.0, 0.1)),)

    def reference(self, problem: Problem) -> Outcome:
        return (rms_norm(problem.args["x"], problem.params["norm"], self.eps, self.offset),), {}

    @classmethod
    def cases(cls) -> Sequence[Case]:
        op = cls(hidden=96)
        return [
            Case("rows", op, (7,)),
            Case("no rows", op, (0,)),
            Case("small weight", op, (4,), variant="small weight"),
            Case("weight zero", op, (4,), variant="weight zero"),
            Case("plain", replace(op, offset=0.0), (4,)),
            *to_edges(op, 4),
        ]

    def adjust(self, variant: str, problem: Problem) -> None:
        problem.params["norm"].fill_({"small weight": 0.003, "weight zero": 0.0}[variant])


@dataclass(frozen=True, kw_only=True)
class AddRMSNorm(Op[["torch.Tensor", "torch.Tensor"], "tuple[torch.Tensor, torch.Tensor]"]):
    """``residual += sum over ranks of partial``, then RMSNorm of it; gives (value, residual).

    The sum is formed in float32, rounded once to the dtype, and normalised as rounded. Several
    formats as ``out``: the value in each of them, as a tuple.
    """

    hidden: int
    eps: float = 1e-6
    offset: float = 1.0
    dtype: str = "bfloat16"
    out: Made = BF16

    def signature(self) -> Signature:
        form, shape = Tensor(self.dtype), ("rows", self.hidden)
        args = (Arg("partial", shape, form), Arg("residual", shape, form))
        if isinstance(self.out, tuple):
            value: Arg | Pack = Pack("value", tuple(Arg(f"value{i}", shape, out) for i, out in enumerate(self.out)))
        else:
            value = Arg("value", shape, self.out)
        return Signature(args, (value, args[1]))

    def params(self) -> tuple[Param, ...]:
        return (Param("norm", (self.hidden,), self.dtype, "norm", init=(0.0, 0.1)),)

    def reference(self, problem: Problem) -> Outcome:
        residual = problem.args["residual"] + problem.args["partial"]
        value = rms_norm(residual, problem.params["norm"], self.eps, self.offset)
        return (*(value,) * (len(self.out) if isinstance(self.out, tuple) else 1), residual), {}

    @classmethod
    def cases(cls) -> Sequence[Case]:
        op = cls(hidden=96)
        return [
            Case("rows", op, (7,)),
            Case("no rows", op, (0,)),
            Case("weight zero", op, (4,), variant="weight zero"),
            *to_edges(op, 4),
            Case("to two formats", replace(op, out=(TOKEN_FP8, BF16)), (4,)),
        ]

    def adjust(self, variant: str, problem: Problem) -> None:
        problem.params["norm"].zero_()


@dataclass(frozen=True, kw_only=True)
class GatedRMSNorm(Op[["torch.Tensor", "torch.Tensor"], "torch.Tensor"]):
    """``rms_norm(x) * w * silu(z)`` per head: plain weight, the gate after the norm, all in float32."""

    value_heads: int
    value_head_dim: int
    eps: float = 1e-6
    dtype: str = "bfloat16"
    out: Format = BF16

    def signature(self) -> Signature:
        width = self.value_heads * self.value_head_dim
        x = Arg("x", ("rows", self.value_heads, self.value_head_dim), Tensor(self.dtype))
        z = Arg("z", ("rows", width), Tensor(self.dtype), free=(0,))
        return Signature((x, z), (Arg("value", ("rows", width), self.out),))

    def params(self) -> tuple[Param, ...]:
        return (Param("norm", (self.value_head_dim,), self.dtype, "norm", init=(1.0, 0.1)),)

    def reference(self, problem: Problem) -> Outcome:
        x = rms_norm(problem.args["x"], problem.params["norm"], self.eps, 0.0)
        return (x.flatten(1) * silu(problem.args["z"]),), {}

    @classmethod
    def cases(cls) -> Sequence[Case]:
        op = cls(value_heads=6, value_head_dim=16)
        return [
            Case("rows", op, (5,)),
            Case("no rows", op, (0,)),
            Case("weight zero", op, (3,), variant="weight zero"),
            *to_edges(op, 5),
        ]

    def adjust(self, variant: str, problem: Problem) -> None:
        problem.params["norm"].zero_()
