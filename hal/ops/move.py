"""Ops that move, encode or join: Quantize, Copy, AllReduce, AllGather."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hal.errors import HalError
from hal.formats import EDGES, STATIC_FP8, Quantized, Tensor
from hal.ops.base import Arg, Case, Op, Outcome, Problem, Signature
from hal.ops.formulas import encode

if TYPE_CHECKING:
    import torch

    from hal.formats import Encoded


@dataclass(frozen=True, kw_only=True)
class Quantize(Op[["torch.Tensor"], "Encoded"]):
    """Encode ``x [rows, columns]``: ``x / scale``, saturated at the format's limit, nearest even.

    A static scale is a buffer of the consumer's storage; a dynamic one is ``max |x| / limit`` of what it
    covers, in float32, at least 2^-126. Zero stays zero; never NaN from a number.
    """

    columns: int
    dtype: str = "bfloat16"
    out: Quantized = STATIC_FP8

    def signature(self) -> Signature:
        x = Arg("x", ("rows", self.columns), Tensor(self.dtype), free=(0,))
        return Signature((x,), (Arg("value", ("rows", self.columns), self.out),))

    def reference(self, problem: Problem) -> Outcome:
        return (encode(problem.args["x"], self.out, problem.params.get("out_scale")),), {}

    @classmethod
    def cases(cls) -> Sequence[Case]:
        return [
            case
            for name, form in EDGES.items()
            for op in (cls(columns=208, out=form),)
            for case in (
                Case(name, op, (5,)),
                Case(f"{name}, no rows", op, (0,)),
                Case(f"{name}, large", op, (3,), variant="large"),
                Case(f"{name}, small", op, (3,), variant="small"),
            )
        ]

    def adjust(self, variant: str, problem: Problem) -> None:
        problem.args["x"].mul_({"large": 1000.0, "small": 1e-12}[variant])
        problem.args["x"][0] = 0.0


@dataclass(frozen=True, kw_only=True)
class Copy(Op[["torch.Tensor"], "torch.Tensor"]):
    """Dense rows from strided ones, for a kernel that takes only those; shows as itself in a report."""

    columns: int
    dtype: str = "bfloat16"

    def signature(self) -> Signature:
        form = Tensor(self.dtype)
        args = (Arg("x", ("rows", self.columns), form, free=(0, 1)),)
        return Signature(args, (Arg("value", ("rows", self.columns), form),))

    def reference(self, problem: Problem) -> Outcome:
        return (problem.args["x"].clone(),), {}

    @classmethod
    def cases(cls) -> Sequence[Case]:
        op = cls(columns=48)
        return [
            Case("rows", op, (5,)),
            Case("no rows", op, (0,)),
            Case("float32", replace(op, dtype="float32"), (2,)),
        ]


@dataclass(frozen=True, kw_only=True)
class AllReduce(Op[["torch.Tensor"], "torch.Tensor"]):
    """Sum of ``x [rows, columns]`` over the ranks, on every rank the same bits."""

    columns: int
    dtype: str = "bfloat16"

    def signature(self) -> Signature:
        form = Tensor(self.dtype)
        args = (Arg("x", ("rows", self.columns), form),)
        return Signature(args, (Arg("value", ("rows", self.columns), form),))

    def reference(self, problem: Problem) -> Outcome:
        _alone(self)
        return (problem.args["x"].clone(),), {}

    @classmethod
    def cases(cls) -> Sequence[Case]:
        return [Case("one rank", cls(columns=48), (5,)), Case("no rows", cls(columns=48), (0,))]


@dataclass(frozen=True, kw_only=True)
class AllGather(Op[["torch.Tensor"], "torch.Tensor"]):
    """``[rows, columns]`` of every rank side by side: ``[rows, world * columns]``."""

    columns: int
    dtype: str = "bfloat16"

    def signature(self) -> Signature:
        form = Tensor(self.dtype)
        args = (Arg("x", ("rows", self.columns), form, free=(0,)),)
        return Signature(args, (Arg("value", ("rows", self.world * self.columns), form, free=(0,)),))

    def reference(self, problem: Problem) -> Outcome:
        _alone(self)
        return (problem.args["x"].clone(),), {}

    @classmethod
    def cases(cls) -> Sequence[Case]:
        return [Case("one rank", cls(columns=48), (5,)), Case("no rows", cls(columns=48), (0,))]


COLLECTIVES = (AllReduce, AllGather)


def _alone(op: Op[Any, Any]) -> None:
    if op.world != 1:
        raise HalError(f"{op.title()}: the reference is of one rank, world is {op.world}")
