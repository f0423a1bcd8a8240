"""Drafted tokens: how a draft head opens; the target's core and attention over them; which of them stand.

A sequence of T rows is its last token and T - 1 drafts after it. What a core's state becomes is
known only when the drafts are judged, so it waits: the next step applies the tokens that stand,
``batch.accepted`` of them, before it reads the state. Contexts count them; the state lags a step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from hal.errors import CheckError
from hal.formats import STATIC_FP8, Tensor
from hal.layout import Layout, Param, Ring, State, Tail
from hal.ops.attention import Attention
from hal.ops.base import Arg, Case, Op, Outcome, Problem, Signature
from hal.ops.ends import pick
from hal.ops.formulas import rms_norm, sequences, silu
from hal.ops.gated_delta import GatedDelta

if TYPE_CHECKING:
    import torch

    from hal.batch import Batch

STEP = ((2, 4), (3, 9), (5, 0))  # lengths, contexts, slots


@dataclass(frozen=True, kw_only=True)
class DraftIn(Op[["torch.Tensor", "torch.Tensor"], "torch.Tensor"]):
    """Opens a draft head: ``cat(norm(token), norm(hidden)) @ weight.T``; gives partial sums over ranks.

    ``token``: rows of the embedding as Embed gives them, summed over ranks here; ``hidden``: rows after
    the target's final norm, or the draft head's own. Both norms are Gemma's. The weight is split by columns.
    """

    hidden: int
    dtype: str = "bfloat16"
    eps: float = 1e-6
    coarse: ClassVar[bool] = True

    @property
    def columns(self) -> int:
        """This rank's columns of the weight."""
        return 2 * self.hidden // self.world

    def signature(self) -> Signature:
        form, shape = Tensor(self.dtype), ("rows", self.hidden)
        return Signature((Arg("token", shape, form), Arg("hidden", shape, form)), (Arg("partial", shape, form),))

    def params(self) -> tuple[Param, ...]:
        norms = (Param(n, (self.hidden,), self.dtype, n, init=(0.0, 0.1)) for n in ("token_norm", "hidden_norm"))
        init = (0.0, (2 * self.hidden) ** -0.5)
        return (*norms, Param("weight", (self.hidden, self.columns), self.dtype, shard=1, init=init))

    def reference(self, problem: Problem) -> Outcome:
        import torch

        pairs = (("token", "token_norm"), ("hidden", "hidden_norm"))
        x = torch.cat([rms_norm(problem.args[a], problem.params[p], self.eps, 1.0) for a, p in pairs], -1)
        return (x @ problem.params["weight"].T,), {}

    @classmethod
    def cases(cls) -> Sequence[Case]:
        op = cls(hidden=96)
        return [Case("one row", op, (1,)), Case("rows", op, (9,)), Case("no rows", op, (0,))]


@dataclass(frozen=True, kw_only=True)
class GatedDeltaVerify(GatedDelta):
    """Rows of each sequence, at most ``queries``, none of which moves the state yet.

    ``pending`` keeps of the last ``queries`` tokens what ``delta_step`` says they change: unit keys,
    errors ``sigmoid(b) (v - S k)`` and log decays, in float32. First the last ``batch.accepted`` of
    them are applied to the slot's state, which then is that of ``batch.contexts`` tokens: it starts
    from zero where all tokens are pending. Then the rows are computed on from there, and are pending.
    The convolution's inputs of all rows are kept. A sequence of no rows applies what is pending:
    that is how to flush a slot. Decode and prefill take no pending tokens. A slot that is given to
    another sequence needs nothing: what lies before its start is not read.
    """

    queries: int = 4

    @property
    def mode(self) -> str:
        return "verify"

    @property
    def left(self) -> int:
        """Numbers that a token leaves."""
        return self.key_dim + self.value_dim + self.value_heads

    def states(self) -> tuple[State, ...]:
        return (*super().states(), State("pending", (self.queries, self.left), "float32", Tail(2 * self.queries)))

    def rings(self) -> Mapping[str, tuple[Layout, ...]]:
        """Where pools lie that have a place for every row beside those that are read: none is both in one step."""
        return {"conv": (Ring(self.conv_width - 1 + self.queries),), "pending": (Tail(2 * self.queries),)}

    def state_bytes(self, rows: int) -> int:
        """State in and out once for a sequence of ``queries`` rows."""
        return super().state_bytes(-(-rows // self.queries))

    def check(self, *args: object) -> None:
        super().check(*args)
        host = args[-1].host  # type: ignore[attr-defined]
        for name, counts in (("a sequence", host.lengths), ("accepted", host.accepted)):
            if max(counts, default=0) > self.queries:
                raise CheckError(f"{self.title()}: batch: {name}: expected at most {self.queries}, got {max(counts)}")

    def reference(self, problem: Problem) -> Outcome:
        import torch

        args, params, batch = problem.args, problem.params, problem.batch
        weight = torch.cat([params[n] for n in ("conv_q", "conv_k", "conv_v")])
        conv, delta, pending = (problem.states[n].clone() for n in ("conv", "delta", "pending"))
        out = args["z"].new_zeros(args["z"].shape)
        for index, slot, context, start, end in sequences(batch):
            accepted = batch.host.accepted[index]
            if slot < 0 or (start == end and not accepted):
                continue
            c = conv[slot] if context else torch.zeros_like(conv[slot])
            s = delta[slot] if context > accepted else torch.zeros_like(delta[slot])
            left = list(pending[slot] if context else torch.zeros_like(pending[slot]))
            for row in left[self.queries - accepted :]:
                s = self.delta_again(s, row)
            delta[slot] = s
            for t in range(start, end):
                x, c = self.conv_step(weight, c, args["qkv"][t])
                o, s, row = self.delta_step(params, s, x, args["b"][t], args["a"][t])
                out[t] = rms_norm(o, params["norm"], self.eps, 0.0).flatten() * silu(args["z"][t])
                left.append(row)
            conv[slot], pending[slot] = c, torch.stack(left[-self.queries :])
        return (out,), {"conv": conv, "delta": delta, "pending": pending}

    @classmethod
    def cases(cls) -> Sequence[Case]:
        op = cls(key_heads=2, value_heads=4, key_head_dim=16, value_head_dim=8)
        few = replace(op, key_heads=1, value_heads=2)
        wide = replace(few, key_head_dim=32, value_head_dim=16)

        def case(name: str, op: GatedDeltaVerify, *where: tuple[int, ...], variant: str = "") -> Case:
            lengths, contexts, slots, accepted = where if len(where) == 4 else (*where, ())
            return Case(name, op, lengths, contexts, slots, variant, "verify", accepted)

        return [
            case("ratio 1", replace(op, value_heads=2), *STEP, (2, 1)),
            case("ratio 3", replace(op, key_heads=1, value_heads=3, key_head_dim=8), *STEP, (2, 1)),
            case("ratio 4", replace(op, key_heads=1), *STEP, (2, 1)),
            *(case(v, few, *STEP, (2, 3), variant=v) for v in ("no decay", "full decay", "zero keys")),
            case("2, 4 and 3 after 1, 4 and 2", wide, (2, 4, 3), (3, 9, 2), (5, 0, 3), (1, 4, 2)),
            case("nothing pending", wide, *STEP),
            case("every count", few, (3, 3, 3, 3, 3), (4, 5, 6, 7, 8), (4, 2, 0, 1, 5), (0, 1, 2, 3, 4)),
            case("first tokens", few, (4, 2), (0, 0), (1, 0)),
            case("all that came before is pending", few, (1, 4), (4, 2), (1, 0), (4, 2)),
            case("no rows apply what is pending", wide, (0, 2, 0), (5, 3, 4), (2, 0, 3), (3, 0, 0)),
            case("only flushes", wide, (0, 0), (5, 4), (2, 0), (3, 4)),
            case("padding", wide, (2, 3, 1), (4, 0, 7), (2, -1, 5), (2, 0, 1), variant="padding is nan"),
            case("all padding", few, (1, 4), (0, 0), (-1, -1)),
            case("no sequences", wide, (), (), ()),
            case("eight", replace(few, queries=8), (1, 8, 5), (9, 8, 3), (4, 1, 0), (8, 5, 0)),
            case("one", replace(op, queries=1), (1, 1), (3, 9), (1, 0), (1, 0)),
            case("head dim 128", replace(wide, key_head_dim=128, value_head_dim=128), (3,), (9,), (0,), (4,)),
            case("conv width 2", replace(few, conv_width=2), *STEP, (1, 2)),
            case("bfloat16 state", replace(wide, state_dtype="bfloat16"), *STEP, (1, 4)),
            case("float32", replace(few, dtype="float32", out=Tensor("float32")), *STEP, (1, 4)),
            case("to fp8", replace(wide, out=STATIC_FP8), *STEP, (2, 1)),
        ]


@dataclass(frozen=True, kw_only=True)
class AttentionVerify(Attention):
    """The same as prefill for at most ``queries`` rows of each sequence, after long contexts."""

    queries: int = 4

    @property
    def mode(self) -> str:
        return "verify"

    def check(self, *args: object) -> None:
        super().check(*args)
        if (most := max(args[-1].host.lengths, default=0)) > self.queries:  # type: ignore[attr-defined]
            raise CheckError(f"{self.title()}: batch: a sequence: expected at most {self.queries} rows, got {most}")

    @classmethod
    def cases(cls) -> Sequence[Case]:
        op = cls(heads=4, kv_heads=2, head_dim=16, page_size=4)
        # so many that a kernel need not split their keys
        count = 18
        many = tuple(1 + i % 4 for i in range(count)), tuple(i % 7 for i in range(count)), (*range(count - 1), -1)
        return [
            Case("ragged", op, (4, 1, 0, 3, 2), (0, 13, 5, 4, 33), (2, 0, 1, 4, 3), mode="verify"),
            Case("one kv head", replace(op, kv_heads=1), (3, 2), (3, 8), (0, 1), mode="verify"),
            Case("eight", replace(op, queries=8), (8, 5, 1), (3, 0, 30), (0, 1, 2), mode="verify"),
            Case("a block of keys ends among the rows", op, (4, 4, 2), (14, 30, 63), (0, 1, 2), mode="verify"),
            Case("padding", op, (2, 3, 4), (3, 0, 1), (0, -1, 1), mode="verify"),
            Case("no rows", op, (), (), (), mode="verify"),
            Case("to fp8", replace(op, out=STATIC_FP8), (4, 2), (3, 8), (0, 1), mode="verify"),
            Case("many rows", replace(op, heads=8, kv_heads=8), *many, mode="verify"),
        ]


@dataclass(frozen=True, kw_only=True)
class Accept(Op[["torch.Tensor", "torch.Tensor", "Batch"], "tuple[torch.Tensor, torch.Tensor]"]):
    """Which of the verified tokens stand: (the id that ``Sample`` picks after each row, accepted ``[sequences]``).

    ``ids`` are the rows' tokens. Row by row, the token after a row is picked; as long as it is the one
    drafted there, the draft stands, and so the first row always does. The sequence goes on with the
    picks of its accepted rows, the last of which is no draft. As a draft d is one token and not a
    distribution, picking from p accepts it with p(d), and else takes one of p without d: the
    target's own distribution. ``batch.uniform`` has a number for each row, the same one that
    decoding has at this position. Padding accepts 0.
    """

    vocab: int
    dtype: str = "bfloat16"
    coarse: ClassVar[bool] = True

    @property
    def mode(self) -> str:
        return "verify"

    def signature(self) -> Signature:
        ids = Tensor("int64")
        args = (Arg("logits", ("rows", self.vocab), Tensor(self.dtype), free=(0,)), Arg("ids", ("rows",), ids))
        results = (Arg("picks", ("rows",), ids), Arg("accepted", ("sequences",), Tensor("int32")))
        return Signature(args, results, batch=True)

    def reference(self, problem: Problem) -> Outcome:
        import torch

        batch, (logits, ids) = problem.batch, (problem.args[n] for n in ("logits", "ids"))
        picks, accepted = torch.zeros_like(ids), []
        for index, slot, _, start, end in sequences(batch):
            temperature, top_p, top_k = (float(x[index]) for x in (batch.temperature, batch.top_p, batch.top_k))
            for t in range(start, end):
                picks[t] = pick(logits[t], temperature, top_p, top_k, float(batch.uniform[t]))
            stands = (t for t in range(start, end) if t + 1 == end or picks[t] != ids[t + 1])
            accepted.append(next(stands) + 1 - start if slot >= 0 and start < end else 0)
        return (picks, torch.tensor(accepted, dtype=torch.int32)), {}

    @classmethod
    def cases(cls) -> Sequence[Case]:
        op = cls(vocab=32, dtype="float32")
        rows = ((4, 1, 3, 2, 4), (3, 4, 5, 6, 0), (0, 1, 2, 3, 4))
        return [
            Case("greedy", op, *rows, "greedy", "verify"),
            Case("ties", op, *rows, "ties", "verify"),
            Case("sampled", op, *rows, "sampled", "verify"),
            Case("nothing drafted", op, (1, 1, 1), (3, 4, 5), (0, 1, 2), "sampled", "verify"),
            Case("padding", op, (4, 2, 0, 4), (3, 0, 5, 6), (0, -1, 2, 3), "greedy", "verify"),
            Case("no rows", op, (), (), (), mode="verify"),
        ]

    def adjust(self, variant: str, problem: Problem) -> None:
        """Drafts that are right for 0, 1, 2 ... rows of the sequences in turn."""
        import torch

        batch, ids = problem.batch, problem.args["ids"]
        count = batch.sequences
        if variant == "ties":
            problem.args["logits"].zero_()
        if variant == "sampled":
            batch.host = replace(batch.host, greedy=False)
            batch.temperature.copy_(torch.tensor([1.0, 0.7, 0.0, 2.0, 1.0])[:count])
            batch.top_p.copy_(torch.tensor([1.0, 0.8, 1.0, 0.5, 0.9])[:count])
            batch.top_k.copy_(torch.tensor([0, 5, 0, 20, 3], dtype=torch.int32)[:count])
            batch.uniform.copy_(torch.linspace(0.0, 0.999, batch.host.tokens))
        (picks, _), _ = self.reference(problem)
        for index, _, _, start, end in sequences(batch):
            for t in range(start, end - 1):
                right = t - start < (index + 3) % 4
                ids[t + 1] = picks[t] if right else (picks[t] + 1) % self.vocab
