"""Both ends of a model: Embed, Head, Sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from hal.formats import SCHEMES, Scheme, Tensor
from hal.layout import Param
from hal.ops.base import Arg, Case, Op, Outcome, Problem, Signature, Traffic
from hal.ops.formulas import descending, rms_norm, weight_of
from hal.ops.linear import input_params, weight_params

if TYPE_CHECKING:
    import torch

    from hal.batch import Batch


@dataclass(frozen=True, kw_only=True)
class Embed(Op[["torch.Tensor"], "tuple[torch.Tensor, torch.Tensor]"]):
    """Rows of the embedding for ids ``[rows]``; starts the pair (partial, residual), residual zero.

    ``vocab`` is this rank's share: ids of other ranks give zero rows, which their owner fills.
    """

    vocab: int
    hidden: int
    dtype: str = "bfloat16"
    coarse: ClassVar[bool] = True

    def signature(self) -> Signature:
        form = Tensor(self.dtype)
        results = (Arg("partial", ("rows", self.hidden), form), Arg("residual", ("rows", self.hidden), form))
        return Signature((Arg("ids", ("rows",), Tensor("int64")),), results)

    def params(self) -> tuple[Param, ...]:
        return (Param("weight", (self.vocab, self.hidden), self.dtype, shard=0),)

    def flops(self, rows: int) -> int:
        return 0

    def traffic(self, rows: int) -> Traffic:
        return Traffic(3 * Tensor(self.dtype).nbytes(rows * self.hidden), 0)

    def reference(self, problem: Problem) -> Outcome:
        rows = problem.params["weight"][problem.args["ids"]]
        return (rows, rows * 0), {}

    @classmethod
    def cases(cls) -> Sequence[Case]:
        op = cls(vocab=40, hidden=24)
        return [Case("rows", op, (5,)), Case("no rows", op, (0,))]


@dataclass(frozen=True, kw_only=True)
class Head(Op[["torch.Tensor", "torch.Tensor"], "tuple[torch.Tensor, torch.Tensor]"]):
    """Closes the model: reduce, add, final norm, logits ``[rows, world * vocab]``; gives (logits, hidden).

    ``hidden`` are the rows after the final norm, which a draft head takes. ``vocab`` is this
    rank's share; every rank gets all logits.
    """

    hidden: int
    vocab: int
    dtype: str = "bfloat16"
    eps: float = 1e-6
    scheme: Scheme | None = None
    coarse: ClassVar[bool] = True

    def signature(self) -> Signature:
        form, shape = Tensor(self.dtype), ("rows", self.hidden)
        args = (Arg("partial", shape, form), Arg("residual", shape, form))
        logits = Arg("logits", ("rows", self.world * self.vocab), form, free=(0,))
        return Signature(args, (logits, Arg("hidden", shape, form)))

    def params(self) -> tuple[Param, ...]:
        return (
            Param("norm", (self.hidden,), self.dtype, "norm", init=(0.0, 0.1)),
            *weight_params("weight", (self.vocab, self.hidden), self.dtype, self.scheme, shard=0),
            *input_params(self.scheme),
        )

    def reference(self, problem: Problem) -> Outcome:
        residual = problem.args["residual"] + problem.args["partial"]
        x = rms_norm(residual, problem.params["norm"], self.eps, 1.0)
        return (x @ weight_of(problem.params, "weight", self.scheme).T, x), {}

    @classmethod
    def cases(cls) -> Sequence[Case]:
        op = cls(hidden=24, vocab=40)
        quantized = [
            Case(name, replace(op, hidden=64, scheme=scheme.within(40, columns=64)), (5,))
            for name, scheme in SCHEMES.items()
        ]
        return [Case("rows", op, (5,)), Case("no rows", op, (0,)), *quantized]


@dataclass(frozen=True, kw_only=True)
class ArgMax(Op[["torch.Tensor"], "torch.Tensor"]):
    """The id of the largest logit of each row ``[rows, vocab]``, the lower one on a tie, NaN above all."""

    vocab: int
    dtype: str = "bfloat16"

    def signature(self) -> Signature:
        logits = Arg("logits", ("rows", self.vocab), Tensor(self.dtype), free=(0,))
        return Signature((logits,), (Arg("ids", ("rows",), Tensor("int64")),))

    def reference(self, problem: Problem) -> Outcome:
        return (problem.args["logits"].argmax(-1),), {}

    @classmethod
    def cases(cls) -> Sequence[Case]:
        op = cls(vocab=5000)
        return [
            Case("one row", op, (1,)),
            Case("rows", replace(op, dtype="float32"), (5,)),
            Case("ties", op, (4,), variant="ties"),
            Case("all equal", op, (3,), variant="all equal"),
            Case("nothing finite", op, (3,), variant="nothing finite"),
            Case("no rows", op, (0,)),
        ]

    def adjust(self, variant: str, problem: Problem) -> None:
        logits = problem.args["logits"]
        if variant == "ties":
            for row, (first, second) in enumerate(((0, 4999), (2047, 2048), (4097, 4998), (17, 18))):
                logits[row, [first, second]] = 9.0
        else:
            logits.fill_(float("-inf") if variant == "nothing finite" else -3.0)


def pick(logits: torch.Tensor, temperature: float, top_p: float, top_k: float, u: float) -> int:
    """The id that ``Sample`` takes of one row."""
    order = descending(logits)
    if temperature == 0:
        return order[0]
    p = (logits / temperature).softmax(0)
    kept, total = [], 0.0
    whole = sum(float(p[i]) for i in order[: int(top_k) or None])
    for i in order[: int(top_k) or None]:
        kept.append(i)
        total += float(p[i])
        if total >= top_p * whole:
            break
    at = 0.0
    for i in kept:
        at += float(p[i]) / total
        if at > u:
            break
    return i


@dataclass(frozen=True, kw_only=True)
class Sample(Op[["torch.Tensor", "Batch"], "torch.Tensor"]):
    """One id per sequence from logits ``[rows, vocab]``, as ``batch`` says.

    Temperature 0: the largest logit, the lower id on a tie. Else probabilities of
    ``logits / temperature`` in float32, largest first (lower id first on a tie), cut to
    top_k, then to the fewest whose sum reaches top_p, renormalised; the first whose
    cumulated sum exceeds ``batch.uniform`` is taken.
    """

    vocab: int
    dtype: str = "bfloat16"
    coarse: ClassVar[bool] = True

    def signature(self) -> Signature:
        logits = Arg("logits", ("rows", self.vocab), Tensor(self.dtype), free=(0,))
        return Signature((logits,), (Arg("ids", ("rows",), Tensor("int64")),), batch=True)

    def reference(self, problem: Problem) -> Outcome:
        import torch

        batch, ids = problem.batch, []
        for row, logits in enumerate(problem.args["logits"]):
            how = (float(x[row]) for x in (batch.temperature, batch.top_p, batch.top_k, batch.uniform))
            ids.append(pick(logits, *how))
        return (torch.tensor(ids, dtype=torch.int64),), {}

    @classmethod
    def cases(cls) -> Sequence[Case]:
        op = cls(vocab=32, dtype="float32")
        rows = ((1,) * 4, (3, 4, 5, 6), (0, 1, 2, 3))
        return [
            Case("greedy", op, *rows, mode="decode"),
            Case("ties", op, *rows, "ties", "decode"),
            Case("sampled", op, *rows, "sampled", "decode"),
            Case("no rows", op, (), (), (), mode="decode"),
        ]

    def adjust(self, variant: str, problem: Problem) -> None:
        import torch

        batch = problem.batch
        if variant == "ties":
            problem.args["logits"].zero_()
            return
        batch.host = replace(batch.host, greedy=False)
        batch.temperature.copy_(torch.tensor([0.0, 1.0, 0.7, 2.0]))
        batch.top_p.copy_(torch.tensor([1.0, 1.0, 0.8, 0.5]))
        batch.top_k.copy_(torch.tensor([0, 0, 5, 20], dtype=torch.int32))
        batch.uniform.copy_(torch.tensor([0.5, 0.999, 0.3, 0.0]))
