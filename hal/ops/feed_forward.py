"""Feed-forward layers: GatedMLP, MoE, and the activation between their matrices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from hal.formats import EDGES, SCHEMES, Format, Scheme, Tensor
from hal.layout import Param
from hal.ops.base import Arg, Case, Op, Outcome, Problem, Signature, Traffic
from hal.ops.formulas import descending, rms_norm, silu, weight_of
from hal.ops.linear import input_params, weight_params

if TYPE_CHECKING:
    import torch

BF16 = Tensor("bfloat16")


@dataclass(frozen=True, kw_only=True)
class _FeedForward(Op[["torch.Tensor", "torch.Tensor"], "tuple[torch.Tensor, torch.Tensor]"]):
    hidden: int
    intermediate: int
    dtype: str = "bfloat16"
    eps: float = 1e-6
    coarse: ClassVar[bool] = True

    def signature(self) -> Signature:
        form, shape = Tensor(self.dtype), ("rows", self.hidden)
        args = (Arg("partial", shape, form), Arg("residual", shape, form))
        return Signature(args, args)

    def _norm(self) -> Param:
        return Param("norm", (self.hidden,), self.dtype, "norm", init=(0.0, 0.1))


@dataclass(frozen=True, kw_only=True)
class _Gated(_FeedForward):
    """``gate_up``: how gate and up are quantized, alike."""

    gate_up: Scheme | None = None

    def _gate_up(self) -> tuple[Param, ...]:
        wide = (self.intermediate, self.hidden)
        return (
            self._norm(),
            *weight_params("gate", wide, self.dtype, self.gate_up, shard=0, memory="gate_up"),
            *weight_params("up", wide, self.dtype, self.gate_up, shard=0, memory="gate_up"),
            *input_params(self.gate_up, "gate_up"),
        )

    def _gated(self, problem: Problem) -> Outcome:
        """(silu(gate(x)) * up(x), residual)."""
        p = problem.params
        residual = problem.args["residual"] + problem.args["partial"]
        x = rms_norm(residual, p["norm"], self.eps, 1.0)
        gate, up = (weight_of(p, name, self.gate_up) for name in ("gate", "up"))
        return (silu(x @ gate.T) * (x @ up.T), residual), {}


@dataclass(frozen=True, kw_only=True)
class GatedMLP(_Gated):
    """``down(silu(gate(x)) * up(x))`` of the normed residual; gives (partial sums, residual).

    ``intermediate`` is this rank's share; opens like InProj.
    """

    down: Scheme | None = None

    def params(self) -> tuple[Param, ...]:
        down = weight_params("down", (self.hidden, self.intermediate), self.dtype, self.down, shard=1)
        return (*self._gate_up(), *down, *input_params(self.down, "down"))

    def reference(self, problem: Problem) -> Outcome:
        (value, residual), _ = self._gated(problem)
        return (value @ weight_of(problem.params, "down", self.down).T, residual), {}

    @classmethod
    def cases(cls) -> Sequence[Case]:
        op = cls(hidden=64, intermediate=48)
        quantized = [
            Case(
                name,
                replace(
                    op, intermediate=64,
                    gate_up=scheme.by_rows().within(64, columns=64), down=scheme.within(64, columns=64),
                ),
                (5,),
            )
            for name, scheme in SCHEMES.items()
        ]  # fmt: skip
        return [Case("one row", op, (1,)), Case("rows", op, (17,)), Case("no rows", op, (0,)), *quantized]


@dataclass(frozen=True, kw_only=True)
class NormGateUp(_Gated):
    """The first half of GatedMLP: ``silu(gate(x)) * up(x)`` of the normed residual; gives (value, residual)."""

    out: Format = BF16
    coarse: ClassVar[bool] = False

    def signature(self) -> Signature:
        form, shape = Tensor(self.dtype), ("rows", self.hidden)
        args = (Arg("partial", shape, form), Arg("residual", shape, form))
        return Signature(args, (Arg("value", ("rows", self.intermediate), self.out), args[1]))

    def params(self) -> tuple[Param, ...]:
        return self._gate_up()

    def reference(self, problem: Problem) -> Outcome:
        return self._gated(problem)

    @classmethod
    def cases(cls) -> Sequence[Case]:
        op = cls(hidden=64, intermediate=48)
        odd = cls(hidden=72, intermediate=40)
        return [
            Case("one row", op, (1,)),
            Case("two rows", odd, (2,)),
            Case("few rows", odd, (7,)),
            Case("rows", op, (17,)),
            Case("many rows", odd, (80,)),
            Case("no rows", op, (0,)),
            *(Case(f"to {name}", replace(op, out=form), (5,)) for name, form in EDGES.items()),
            Case("large residual", op, (3,), variant="large residual"),
            *(
                Case(name, replace(op, gate_up=scheme.by_rows().within(48, columns=64)), (5,))
                for name, scheme in SCHEMES.items()
            ),
        ]

    def adjust(self, variant: str, problem: Problem) -> None:
        problem.args["residual"].mul_(100.0)


@dataclass(frozen=True, kw_only=True)
class MoE(_FeedForward):
    """Routed experts beside a shared one; gives (partial sums, residual). Opens like InProj.

    Router: softmax over all experts in float32, the ``top_k`` largest (the lower index wins a
    tie), renormalised to sum 1. Shared expert times ``sigmoid(x . shared_gate)``.
    ``intermediate`` and ``shared_intermediate`` are this rank's shares; the router is whole.
    ``routed`` and ``shared``: how the experts, and the shared one, are quantized; what goes into both
    matrices of an expert is rounded as they say, with a scale for each expert where the checkpoint fixes it.
    """

    experts: int
    top_k: int
    shared_intermediate: int
    routed: Scheme | None = None
    shared: Scheme | None = None

    def params(self) -> tuple[Param, ...]:
        h, i, s = self.hidden, self.intermediate, self.shared_intermediate
        e, kind, routed, shared = self.experts, self.dtype, self.routed, self.shared
        return (
            self._norm(),
            Param("router", (e, h), kind, "router", init=(0.0, 1.0)),
            *weight_params("experts_gate_up", (e, 2 * i, h), kind, routed, shard=1, sections=(i, i)),
            *weight_params("experts_down", (e, h, i), kind, routed, shard=2),
            *weight_params("shared_gate", (s, h), kind, shared, shard=0, memory="shared_gate_up"),
            *weight_params("shared_up", (s, h), kind, shared, shard=0, memory="shared_gate_up"),
            *weight_params("shared_down", (h, s), kind, shared, shard=1),
            Param("shared_sigmoid", (1, h), kind, "shared_sigmoid", init=(0.0, h**-0.5)),
            *(
                param
                for scheme, matrix in ((routed, "experts"), (shared, "shared"))
                for half in ("gate_up", "down")
                for param in input_params(scheme, f"{matrix}_{half}", e if matrix == "experts" else 1)
            ),
        )

    def flops(self, rows: int) -> int:
        one = 3 * self.hidden * (self.top_k * self.intermediate + self.shared_intermediate)
        return 2 * rows * (one + self.hidden * (self.experts + 1))

    def traffic(self, rows: int) -> Traffic:
        """Only the experts touched: at most ``rows * top_k`` of them."""
        total = super().traffic(rows)
        idle = self.experts - min(self.experts, rows * self.top_k)
        form = self.routed.weight if self.routed else Tensor(self.dtype)
        return Traffic(total.bytes - idle * form.nbytes(3 * self.hidden * self.intermediate), total.flops)

    def reference(self, problem: Problem) -> Outcome:
        p = problem.params
        experts = [weight_of(p, f"experts_{half}", self.routed) for half in ("gate_up", "down")]
        gate, up, down = (weight_of(p, f"shared_{name}", self.shared) for name in ("gate", "up", "down"))
        residual = problem.args["residual"] + problem.args["partial"]
        x = rms_norm(residual, p["norm"], self.eps, 1.0)
        out = (silu(x @ gate.T) * (x @ up.T)) @ down.T
        out = out * (x @ p["shared_sigmoid"].T).sigmoid()
        weights = (x @ p["router"].T).softmax(-1)
        for row in range(x.shape[0]):
            order = descending(weights[row])[: self.top_k]
            total = sum(weights[row, e] for e in order)
            for e in order:
                gate, up = (experts[0][e] @ x[row]).chunk(2)
                out[row] += weights[row, e] / total * (experts[1][e] @ (silu(gate) * up))
        return (out, residual), {}

    @classmethod
    def cases(cls) -> Sequence[Case]:
        op = cls(hidden=32, intermediate=16, experts=6, top_k=2, shared_intermediate=24, dtype="float32")
        return [
            Case("one row", op, (1,)),
            Case("rows", op, (9,)),
            Case("many rows", op, (40,)),
            Case("no rows", op, (0,)),
            Case("one expert takes all", replace(op, top_k=1), (5,), variant="one expert"),
            Case("all experts", replace(op, top_k=6), (5,)),
            Case("bfloat16", replace(op, dtype="bfloat16", experts=16, top_k=4, hidden=64), (9,)),
            Case("bfloat16, one row", replace(op, dtype="bfloat16", experts=16, top_k=4, hidden=64), (1,)),
            *(
                Case(name, replace(op, intermediate=32, shared_intermediate=32, routed=held, shared=held), (9,))
                for name, scheme in SCHEMES.items()
                for held in (scheme.by_rows().within(32, columns=32),)
            ),
        ]

    def adjust(self, variant: str, problem: Problem) -> None:
        problem.params["router"].zero_()


@dataclass(frozen=True, kw_only=True)
class SiluMul(Op[["torch.Tensor"], "torch.Tensor"]):
    """``silu(x[:, :columns]) * x[:, columns:]`` in float32."""

    columns: int
    dtype: str = "bfloat16"
    out: Format = BF16

    def signature(self) -> Signature:
        x = Arg("x", ("rows", 2 * self.columns), Tensor(self.dtype), free=(0,))
        return Signature((x,), (Arg("value", ("rows", self.columns), self.out),))

    def reference(self, problem: Problem) -> Outcome:
        gate, up = problem.args["x"].chunk(2, -1)
        return (silu(gate) * up,), {}

    @classmethod
    def cases(cls) -> Sequence[Case]:
        op = cls(columns=48)
        return [
            Case("rows", op, (5,)),
            Case("no rows", op, (0,)),
            *(Case(f"to {name}", replace(op, out=form), (5,)) for name, form in EDGES.items()),
        ]
