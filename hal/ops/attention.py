"""Full attention: norm and rotation of queries and keys with the KV write, then attention with its gate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from hal.errors import CheckError
from hal.formats import STATIC_FP8, Format, Tensor
from hal.layout import Pages, Param, State
from hal.ops.base import Arg, Case, Op, Outcome, Problem, Signature
from hal.ops.formulas import moving, rms_norm

if TYPE_CHECKING:
    import torch

    from hal.batch import Batch

BF16 = Tensor("bfloat16")


@dataclass(frozen=True, kw_only=True)
class QKNormRope(Op[["torch.Tensor", "tuple[torch.Tensor, ...]", "Batch"], "tuple[torch.Tensor, torch.Tensor]"]):
    """Split, normalise and rotate q and k, write k and v to their KV cells; gives (q, gate).

    A row of qkv is ``[q_0 | gate_0 | q_1 | gate_1 ... | k ... | v ...]``. q and k get Gemma's
    RMSNorm over head_dim; of each head the first ``rotary_dim`` are rotated in pairs
    (i, i + rotary_dim / 2) with frequency ``theta^(-2 i / rotary_dim)``; v and gate stay.
    ``batch.positions`` is [rows], or [3, rows] for time, height and width, interleaved as
    ``sections`` says: frequency i takes height if i % 3 == 1 and i < 3 * sections[1], width
    if i % 3 == 2 and i < 3 * sections[2], else time. Tokens without a cell write nothing.
    """

    heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int
    theta: float
    sections: tuple[int, int, int] | None = None
    eps: float = 1e-6
    page_size: int = 16
    dtype: str = "bfloat16"
    coarse: ClassVar[bool] = True

    @property
    def width(self) -> int:
        """Columns of qkv."""
        return 2 * (self.heads + self.kv_heads) * self.head_dim

    def signature(self) -> Signature:
        form = Tensor(self.dtype)
        out = ("rows", self.heads, self.head_dim)
        return Signature(
            (Arg("qkv", ("rows", self.width), form, free=(0,)),),
            (Arg("q", out, form, free=(0, 1)), Arg("gate", out, form, free=(0, 1))),
            state=True,
            batch=True,
        )

    def params(self) -> tuple[Param, ...]:
        return tuple(Param(n, (self.head_dim,), self.dtype, n, init=(0.0, 0.1)) for n in ("q_norm", "k_norm"))

    def states(self) -> tuple[State, ...]:
        return (kv_state(self.page_size, self.kv_heads, self.head_dim, self.dtype),)

    def state_bytes(self, rows: int) -> int:
        """One key and one value row written per token."""
        return Tensor(self.dtype).nbytes(2 * rows * self.kv_heads * self.head_dim)

    def axis(self, frequency: int) -> int:
        """Which of time, height and width turns this frequency."""
        if self.sections and frequency % 3 and frequency < 3 * self.sections[frequency % 3]:
            return frequency % 3
        return 0

    def check(self, *args: object) -> None:
        super().check(*args)
        shape = tuple(args[-1].positions.shape)  # type: ignore[attr-defined]
        rows = args[-1].host.tokens  # type: ignore[attr-defined]
        if shape not in ((rows,), (3, rows)):
            raise CheckError(f"QKNormRope: batch.positions: expected [{rows}] or [3, {rows}], got {list(shape)}")

    def reference(self, problem: Problem) -> Outcome:
        import torch

        qkv, batch = problem.args["qkv"], problem.batch
        rows, half = qkv.shape[0], self.rotary_dim // 2
        n = self.heads * 2 * self.head_dim, self.kv_heads * self.head_dim
        q_gate, k, v = qkv.split([n[0], n[1], n[1]], -1)
        q, gate = q_gate.view(rows, self.heads, 2 * self.head_dim).chunk(2, -1)
        k, v = (x.view(rows, self.kv_heads, self.head_dim) for x in (k, v))
        positions = batch.positions.expand(3, rows) if batch.positions.dim() == 1 else batch.positions
        inverse = self.theta ** (-torch.arange(half, dtype=qkv.dtype) * 2 / self.rotary_dim)
        taken = torch.tensor([self.axis(i) for i in range(half)])
        angle = (positions.to(qkv.dtype)[taken].T * inverse)[:, None, :]

        def turn(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            x = rms_norm(x, weight, self.eps, 1.0)
            low, high, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
            cos, sin = angle.cos(), angle.sin()
            return torch.cat([low * cos - high * sin, high * cos + low * sin, rest], -1)

        kv = problem.states["kv"].clone()
        k = turn(k, problem.params["k_norm"])
        for row, cell in enumerate(batch.cells.tolist()):
            if cell >= 0:
                kv[cell // self.page_size, 0, cell % self.page_size] = k[row]
                kv[cell // self.page_size, 1, cell % self.page_size] = v[row]
        return (turn(q, problem.params["q_norm"]), gate), {"kv": kv}

    @classmethod
    def cases(cls) -> Sequence[Case]:
        op = cls(heads=4, kv_heads=1, head_dim=32, rotary_dim=16, theta=1e4, sections=(3, 3, 2), page_size=4)
        return [
            Case("prefill", op, (5, 3), (0, 2), (1, 0), mode="prefill"),
            Case("three positions", op, (2, 1), (0, 2), (1, 0), "three positions", "prefill"),
            Case("sliced positions", op, (2, 1), (0, 2), (1, 0), "sliced positions", "prefill"),
            Case("decode", replace(op, kv_heads=2), (1, 1, 1), (3, 4, 0), (2, 0, 1), mode="decode"),
            Case("padding", op, (1, 1), (3, 0), (2, -1), mode="decode"),
            Case("no rows", op, (), (), (), mode="decode"),
            Case("no sections", replace(op, sections=None), (5,), (1,), (0,), mode="prefill"),
            Case("whole head", replace(op, rotary_dim=32, sections=(6, 5, 5)), (5,), (1,), (0,), mode="prefill"),
        ]

    def adjust(self, variant: str, problem: Problem) -> None:
        import torch

        rows = problem.batch.host.tokens
        three = torch.stack([torch.arange(rows) + 5, torch.arange(rows) * 2 + 7, 9 - torch.arange(rows)])
        if variant == "sliced positions":
            wide = torch.full((3, 64), 1 << 20)
            wide[:, :rows] = three
            three = wide[:, :rows]
        problem.batch.positions = three


def kv_state(page_size: int, kv_heads: int, head_dim: int, dtype: str) -> State:
    """The KV pages, which QKNormRope writes and Attention reads."""
    return State("kv", (2, page_size, kv_heads, head_dim), dtype, Pages())


@dataclass(frozen=True, kw_only=True)
class Attention(Op[["torch.Tensor", "torch.Tensor", "tuple[torch.Tensor, ...]", "Batch"], "torch.Tensor"]):
    """Attention over KV pages with its gate: what its ops for one row, many and drafted ones have in common."""

    heads: int
    kv_heads: int
    head_dim: int
    page_size: int = 16
    dtype: str = "bfloat16"
    out: Format = BF16
    coarse: ClassVar[bool] = True

    def signature(self) -> Signature:
        form = Tensor(self.dtype)
        shape = ("rows", self.heads, self.head_dim)
        args = (Arg("q", shape, form, free=(0, 1)), Arg("gate", shape, form, free=(0, 1)))
        result = Arg("value", ("rows", self.heads * self.head_dim), self.out)
        return Signature(args, (result,), state=True, batch=True)

    def states(self) -> tuple[State, ...]:
        return (kv_state(self.page_size, self.kv_heads, self.head_dim, self.dtype),)

    def state_bytes(self, rows: int) -> int:
        """Zero: what is read of the KV pages depends on the contexts, not on the rows."""
        return 0

    def reference(self, problem: Problem) -> Outcome:
        import torch

        q, gate, kv = problem.args["q"], problem.args["gate"], problem.states["kv"]
        out, group = torch.zeros_like(q), self.heads // self.kv_heads
        for index, _, context, start, end in moving(problem.batch):
            total = context + end - start
            pages = problem.batch.page_table[index].tolist()[: -(-total // self.page_size)]
            keys, values = (torch.cat([kv[p, side] for p in pages] or [kv[0, side, :0]])[:total] for side in (0, 1))
            for t in range(start, end):
                seen = context + t - start + 1
                for h in range(self.heads):
                    scores = keys[:seen, h // group] @ q[t, h] * self.head_dim**-0.5
                    out[t, h] = scores.softmax(0) @ values[:seen, h // group]
        return ((out * gate.sigmoid()).flatten(1),), {"kv": kv}

    @classmethod
    def small(cls) -> Attention:
        """Sizes for cases."""
        return cls(heads=4, kv_heads=2, head_dim=16, page_size=4)


@dataclass(frozen=True, kw_only=True)
class AttentionPrefill(Attention):
    """Causal attention of many rows over the KV pages: ``softmax(q k / sqrt(head_dim)) v * sigmoid(gate)``.

    The step's own keys are in their pages already. Rows of padding sequences are zero.
    """

    @property
    def mode(self) -> str:
        return "prefill"

    @classmethod
    def cases(cls) -> Sequence[Case]:
        op = cls.small()
        wide = replace(op, head_dim=256)
        return [
            Case("ragged", op, (5, 0, 1, 9, 0), (0, 3, 7, 2, 0), (0, 1, 2, 3, 4), mode="prefill"),
            Case("one kv head", replace(op, kv_heads=1), (5, 3), (0, 3), (0, 1), mode="prefill"),
            Case("padding", op, (2, 3), (0, 0), (0, -1), mode="prefill"),
            Case("no rows", op, (), (), (), mode="prefill"),
            Case("to fp8", replace(op, out=STATIC_FP8), (5, 3), (0, 3), (0, 1), mode="prefill"),
            Case("head dim 256", wide, (5, 0, 3), (0, 3, 5), (0, 1, 2), mode="prefill"),
            Case("head dim 256, padding", wide, (2, 3, 1), (0, 0, 5), (0, -1, 1), mode="prefill"),
        ]


@dataclass(frozen=True, kw_only=True)
class AttentionDecode(Attention):
    """The same for one row of each sequence."""

    @property
    def mode(self) -> str:
        return "decode"

    @classmethod
    def cases(cls) -> Sequence[Case]:
        op = cls.small()
        # so many that a kernel need not split their keys
        count = 72
        many = (1,) * count, tuple(i % 7 for i in range(count)), tuple(-1 if i % 9 == 5 else i for i in range(count))
        return [
            Case("rows", op, (1, 1, 1), (0, 13, 4), (2, 0, 1), mode="decode"),
            Case("one kv head", replace(op, kv_heads=1), (1, 1), (3, 8), (0, 1), mode="decode"),
            Case("padding", op, (1, 1), (3, 0), (0, -1), mode="decode"),
            Case("no rows", op, (), (), (), mode="decode"),
            Case("to fp8", replace(op, out=STATIC_FP8), (1, 1), (3, 8), (0, 1), mode="decode"),
            Case("many rows", op, *many, mode="decode"),
        ]
