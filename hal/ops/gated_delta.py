"""The core of a Gated DeltaNet layer: convolution, delta rule, gated norm; whole and in parts.

For value head h with key head h // (value_heads / key_heads), all in float32:

    qkv = silu(causal_conv(qkv));  q, k = l2_norm(q) / sqrt(K), l2_norm(k)
    S <- exp(-exp(A_log) * softplus(a + dt_bias)) * S        S is [V, K]; decay comes first
    e = sigmoid(b) * (v - S k);  S <- S + e k^T;  o = S q
    out = rms_norm(o) * w * silu(z)

A sequence whose context is 0 starts from zero, whatever its slot holds. A negative slot is
padding: its output rows are exactly zero, nothing moves. Nor does anything for a sequence of no
tokens: its slot keeps what it holds, whatever its context.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from hal.formats import STATIC_FP8, Format, Tensor
from hal.layout import VK, Param, Shift, State
from hal.ops.base import Arg, Case, Op, Outcome, Pack, Problem, Signature
from hal.ops.formulas import l2_norm, moving, rms_norm, sequences, silu, softplus

if TYPE_CHECKING:
    import torch

    from hal.batch import Batch

BF16 = Tensor("bfloat16")
DECAYS = ("no decay", "full decay", "one full decay")
# lengths, contexts, slots: two sequences have no tokens, one of them nothing before
RAGGED = ((3, 0, 1, 5, 0), (0, 7, 2, 1, 0), (4, 1, 6, 2, 0))


@dataclass(frozen=True, kw_only=True)
class DeltaSizes:
    """The sizes that all ops of this family share; heads are this rank's."""

    key_heads: int
    value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_width: int = 4
    dtype: str = "bfloat16"
    state_dtype: str = "float32"

    @property
    def key_dim(self) -> int:
        return self.key_heads * self.key_head_dim

    @property
    def value_dim(self) -> int:
        return self.value_heads * self.value_head_dim

    @property
    def conv_dim(self) -> int:
        """Channels of the convolution: q, k and v side by side."""
        return 2 * self.key_dim + self.value_dim

    @property
    def widths(self) -> tuple[int, int, int]:
        """Channels of q, of k and of v."""
        return self.key_dim, self.key_dim, self.value_dim

    def conv_params(self) -> tuple[Param, ...]:
        """The convolution's weight ``[channels, width]``, in its three parts."""
        return tuple(
            Param(f"conv_{name}", (rows, self.conv_width), self.dtype, "conv_weight", 0, init=(0.0, 0.5))
            for name, rows in zip("qkv", self.widths, strict=True)
        )

    def gate_params(self) -> tuple[Param, ...]:
        """``A_log`` in float32 and ``dt_bias``, one number per value head."""
        return (
            Param("A_log", (self.value_heads,), "float32", "A_log", 0, init=(0.5, 0.5)),
            Param("dt_bias", (self.value_heads,), self.dtype, "dt_bias", 0, init=(0.0, 1.0)),
        )

    def norm_params(self) -> tuple[Param, ...]:
        """The gated norm's plain weight over one head."""
        return (Param("norm", (self.value_head_dim,), self.dtype, "norm", init=(1.0, 0.1)),)

    def mixed(self) -> Pack:
        """q, k and v after the convolution ``[rows, heads * dim]``: views of one buffer, or apart."""
        named = zip("qkv", self.widths, strict=True)
        return Pack("mixed", tuple(Arg(name, ("rows", n), Tensor(self.dtype), free=(0,)) for name, n in named))

    def conv_state(self) -> State:
        return State("conv", (self.conv_dim, self.conv_width - 1), self.dtype, Shift())

    def delta_state(self) -> State:
        shape = (self.value_heads, self.value_head_dim, self.key_head_dim)
        return State("delta", shape, self.state_dtype, VK())

    def at_limits(self, variant: str, problem: Problem) -> None:
        """Gates that let all pass or nothing: the variants of DECAYS."""
        a = {"no decay": -60.0, "full decay": 50.0, "one full decay": -60.0}[variant]
        args, params = problem.args, problem.params
        params["A_log"].zero_()
        params["dt_bias"].zero_()
        args["a"].fill_(a)
        if variant == "one full decay":
            args["a"][args["a"].shape[0] // 2] = 100.0
        args["b"].fill_(30.0)

    def conv_step(
        self, weight: torch.Tensor, state: torch.Tensor, x: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One token through the convolution: (output, new state); state is ``[channels, width - 1]``."""
        import torch

        window = torch.cat([state, x[:, None]], 1)
        return silu((window * weight).sum(1)), window[:, 1:]

    def delta_step(
        self, params: Any, state: torch.Tensor, qkv: torch.Tensor, b: torch.Tensor, a: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """One token through the delta rule, head by head: (o ``[value_heads, V]``, new state, what it was changed by).

        The last is ``[k | e | log decay]`` in a row: with it, ``delta_again`` makes the same change.
        """
        import torch

        q, k, v = qkv.split(self.widths)
        q = l2_norm(q.view(self.key_heads, -1)) * self.key_head_dim**-0.5
        k = l2_norm(k.view(self.key_heads, -1))
        v = v.view(self.value_heads, -1)
        decay = -params["A_log"].exp() * softplus(a + params["dt_bias"])
        out, after, errors, group = v.new_zeros(v.shape), state.clone(), [], self.value_heads // self.key_heads
        for h in range(self.value_heads):
            key = k[h // group]
            held = decay[h].exp() * state[h]
            errors.append(b[h].sigmoid() * (v[h] - held @ key))
            after[h] = held + errors[h][:, None] * key
            out[h] = after[h] @ q[h // group]
        return out, after, torch.cat([k.flatten(), *errors, decay])

    def delta_again(self, state: torch.Tensor, left: torch.Tensor) -> torch.Tensor:
        """The new state of a ``delta_step`` from what it left."""
        k, errors, decay = left.split((self.key_dim, self.value_dim, self.value_heads))
        keys = k.view(self.key_heads, -1).repeat_interleave(self.value_heads // self.key_heads, 0)
        after: torch.Tensor = decay.exp()[:, None, None] * state + errors.view(self.value_heads, -1, 1) * keys[:, None]
        return after


@dataclass(frozen=True, kw_only=True)
class GatedDelta(DeltaSizes, Op[["tuple[torch.Tensor, ...]", "tuple[torch.Tensor, ...]", "Batch"], "torch.Tensor"]):
    """A whole core: what its ops for one token, many and drafted ones have in common."""

    eps: float = 1e-6
    out: Format = BF16
    coarse: ClassVar[bool] = True

    def signature(self) -> Signature:
        form = Tensor(self.dtype)
        widths = {"qkv": self.conv_dim, "z": self.value_dim, "b": self.value_heads, "a": self.value_heads}
        projected = Pack("projected", tuple(Arg(n, ("rows", w), form, free=(0,)) for n, w in widths.items()))
        return Signature((projected,), (Arg("value", ("rows", self.value_dim), self.out),), state=True, batch=True)

    def params(self) -> tuple[Param, ...]:
        return (*self.conv_params(), *self.gate_params(), *self.norm_params())

    def states(self) -> tuple[State, ...]:
        return (self.conv_state(), self.delta_state())

    def flops(self, rows: int) -> int:
        state = self.value_dim * self.key_head_dim
        return rows * (7 * state + 2 * self.conv_dim * self.conv_width)

    def reference(self, problem: Problem) -> Outcome:
        import torch

        args, params = problem.args, problem.params
        weight = torch.cat([params[n] for n in ("conv_q", "conv_k", "conv_v")])
        conv, delta = problem.states["conv"].clone(), problem.states["delta"].clone()
        out = args["z"].new_zeros(args["z"].shape)
        for _, slot, context, start, end in moving(problem.batch):
            c = conv[slot] if context else torch.zeros_like(conv[slot])
            s = delta[slot] if context else torch.zeros_like(delta[slot])
            for t in range(start, end):
                x, c = self.conv_step(weight, c, args["qkv"][t])
                o, s, _ = self.delta_step(params, s, x, args["b"][t], args["a"][t])
                out[t] = rms_norm(o, params["norm"], self.eps, 0.0).flatten() * silu(args["z"][t])
            conv[slot], delta[slot] = c, s
        return (out,), {"conv": conv, "delta": delta}

    def adjust(self, variant: str, problem: Problem) -> None:
        args = problem.args
        if variant in DECAYS:
            self.at_limits(variant, problem)
        elif variant == "zero keys":
            args["qkv"][:, self.key_dim : 2 * self.key_dim] = 0.0
            problem.states["conv"].zero_()
        elif variant == "padding is nan":
            for _, slot, _, start, end in sequences(problem.batch):
                if slot < 0:
                    for tensor in args.values():
                        tensor[start:end] = float("nan")
        else:
            super().adjust(variant, problem)


def _ratios(op: Any) -> list[tuple[str, Any]]:
    return [
        (
            f"ratio {ratio}, K {k}, V {v}",
            replace(op, key_heads=h, value_heads=h * ratio, key_head_dim=k, value_head_dim=v),
        )
        for ratio, h, k, v in ((1, 3, 16, 16), (2, 2, 16, 8), (3, 2, 8, 16), (4, 1, 16, 16), (8, 1, 8, 16))
    ]


@dataclass(frozen=True, kw_only=True)
class GatedDeltaPrefill(GatedDelta):
    """Many tokens of several sequences, told apart by ``batch.cu_seqlens``; empty ones are valid."""

    @property
    def mode(self) -> str:
        return "prefill"

    def state_bytes(self, rows: int) -> int:
        """State in and out once, as for one sequence."""
        return super().state_bytes(1)

    @classmethod
    def cases(cls) -> Sequence[Case]:
        op = cls(key_heads=2, value_heads=4, key_head_dim=16, value_head_dim=8)
        found = [Case(name, o, *RAGGED, mode="prefill") for name, o in _ratios(op)]
        for variant in (*DECAYS, "zero keys"):
            found.append(Case(variant, op, (64, 65), (0, 3), (1, 0), variant, "prefill"))
        return [
            *found,
            Case("chunks", op, (130,), (0,), (2,), mode="prefill"),
            Case("padding", op, (3, 2, 2), (0, 1, 4), (1, -1, 0), "padding is nan", "prefill"),
            Case("no tokens", op, (), (), (), mode="prefill"),
            Case("bfloat16 state", replace(op, state_dtype="bfloat16"), *RAGGED, mode="prefill"),
            Case("float32", replace(op, dtype="float32", out=Tensor("float32")), *RAGGED, mode="prefill"),
            Case("to fp8", replace(op, out=STATIC_FP8), *RAGGED, mode="prefill"),
        ]


@dataclass(frozen=True, kw_only=True)
class GatedDeltaDecode(GatedDelta):
    """One token of each sequence; row i belongs to ``batch.slots[i]``."""

    @property
    def mode(self) -> str:
        return "decode"

    @classmethod
    def cases(cls) -> Sequence[Case]:
        op = cls(key_heads=2, value_heads=4, key_head_dim=16, value_head_dim=8)
        wide = replace(op, key_heads=1, value_heads=2, key_head_dim=64, value_head_dim=64)
        three = ((1, 1, 1), (1, 9, 2), (5, 0, 3))
        found = [Case(name, o, *three, mode="decode") for name, o in _ratios(op)]
        for variant in ("no decay", "full decay", "zero keys"):
            found.append(Case(variant, op, *three, variant, "decode"))
        return [
            *found,
            Case("head dim 64", wide, *three, mode="decode"),
            Case("head dim 128", replace(wide, key_head_dim=128, value_head_dim=128), *three, mode="decode"),
            Case("first token", wide, (1, 1), (0, 4), (1, 0), mode="decode"),
            Case("padding", wide, (1, 1, 1), (2, 0, 4), (2, -1, 5), "padding is nan", "decode"),
            Case("all padding", op, (1, 1), (0, 0), (-1, -1), mode="decode"),
            Case("no rows", wide, (), (), (), mode="decode"),
            Case("bfloat16 state", replace(wide, state_dtype="bfloat16"), *three, mode="decode"),
            Case("float32", replace(op, dtype="float32", out=Tensor("float32")), *three, mode="decode"),
            Case("to fp8", replace(wide, out=STATIC_FP8), *three, mode="decode"),
            Case("wide, no decay", wide, *three, "no decay", "decode"),
            Case("wide, one to one", replace(wide, key_heads=2), *three, mode="decode"),
        ]


@dataclass(frozen=True, kw_only=True)
class CausalConv(DeltaSizes, Op[["torch.Tensor", "tuple[torch.Tensor, ...]", "Batch"], "tuple[torch.Tensor, ...]"]):
    """The convolution with SiLU alone: ``qkv [rows, channels]`` to q, k and v, decoding or whole sequences."""

    decode: bool = False

    @property
    def mode(self) -> str:
        return "decode" if self.decode else "prefill"

    def signature(self) -> Signature:
        form = Tensor(self.dtype)
        args = (Arg("qkv", ("rows", self.conv_dim), form, free=(0,)),)
        return Signature(args, (self.mixed(),), state=True, batch=True)

    def params(self) -> tuple[Param, ...]:
        return self.conv_params()

    def states(self) -> tuple[State, ...]:
        return (self.conv_state(),)

    def reference(self, problem: Problem) -> Outcome:
        import torch

        weight = torch.cat([problem.params[n] for n in ("conv_q", "conv_k", "conv_v")])
        conv = problem.states["conv"].clone()
        out = torch.zeros_like(problem.args["qkv"])
        for _, slot, context, start, end in moving(problem.batch):
            c = conv[slot] if context else torch.zeros_like(conv[slot])
            for t in range(start, end):
                out[t], c = self.conv_step(weight, c, problem.args["qkv"][t])
            conv[slot] = c
        return out.split(self.widths, 1), {"conv": conv}

    @classmethod
    def cases(cls) -> Sequence[Case]:
        op = cls(key_heads=2, value_heads=4, key_head_dim=8, value_head_dim=4)
        one = replace(op, decode=True)
        return [
            Case("ragged", op, *RAGGED, mode="prefill"),
            Case("long", op, (70, 3), (5, 0), (1, 0), mode="prefill"),
            Case("padding among sequences", op, (2, 3, 2), (1, 0, 4), (1, -1, 0), mode="prefill"),
            Case("decode", one, (1, 1, 1), (1, 9, 0), (5, 0, 3), mode="decode"),
            Case("padding", one, (1, 1), (1, 9), (5, -1), mode="decode"),
            Case("no rows", one, (), (), (), mode="decode"),
        ]


@dataclass(frozen=True, kw_only=True)
class GatedDeltaUpdate(
    DeltaSizes,
    Op[
        ["tuple[torch.Tensor, ...]", "torch.Tensor", "torch.Tensor", "tuple[torch.Tensor, ...]", "Batch"],
        "torch.Tensor",
    ],
):
    """The delta rule alone: q, k, v after the convolution, b and a as projected; ``o [rows, value_heads, V]``."""

    decode: bool = False

    @property
    def mode(self) -> str:
        return "decode" if self.decode else "prefill"

    def signature(self) -> Signature:
        form = Tensor(self.dtype)
        heads = ("rows", self.value_heads)
        args = (
            self.mixed(),
            Arg("b", heads, form, free=(0,)),
            Arg("a", heads, form, free=(0,)),
        )
        return Signature(args, (Arg("value", (*heads, self.value_head_dim), form),), state=True, batch=True)

    def params(self) -> tuple[Param, ...]:
        return self.gate_params()

    def states(self) -> tuple[State, ...]:
        return (self.delta_state(),)

    def reference(self, problem: Problem) -> Outcome:
        import torch

        args = problem.args
        qkv = torch.cat([args[name] for name in ("q", "k", "v")], 1)
        delta = problem.states["delta"].clone()
        out = qkv.new_zeros((qkv.shape[0], self.value_heads, self.value_head_dim))
        for _, slot, context, start, end in moving(problem.batch):
            s = delta[slot] if context else torch.zeros_like(delta[slot])
            for t in range(start, end):
                out[t], s, _ = self.delta_step(problem.params, s, qkv[t], args["b"][t], args["a"][t])
            delta[slot] = s
        return (out,), {"delta": delta}

    def adjust(self, variant: str, problem: Problem) -> None:
        if variant in DECAYS:
            self.at_limits(variant, problem)
        else:
            super().adjust(variant, problem)

    @classmethod
    def cases(cls) -> Sequence[Case]:
        op = cls(key_heads=2, value_heads=4, key_head_dim=16, value_head_dim=8)
        one = replace(op, decode=True)
        wide = replace(op, key_heads=1, value_heads=2, key_head_dim=128, value_head_dim=128)
        among = (2, 3, 2), (1, 0, 4), (1, -1, 0)
        return [
            Case("ragged", op, *RAGGED, mode="prefill"),
            Case("padding among sequences", op, *among, mode="prefill"),
            Case("head dim 128", wide, (66, 0, 3), (0, 7, 3), (1, 2, 0), mode="prefill"),
            Case("head dim 128, one to one", replace(wide, key_heads=2), *RAGGED, mode="prefill"),
            Case("head dim 128, padding", replace(wide, state_dtype="bfloat16"), *among, mode="prefill"),
            *(Case(f"head dim 128, {v}", wide, (5,), (3,), (0,), v, "prefill") for v in DECAYS),
            *(Case(name, o, (1, 1, 1), (1, 9, 0), (5, 0, 3), mode="decode") for name, o in _ratios(one)),
            Case("padding", one, (1, 1), (1, 9), (5, -1), mode="decode"),
            Case("no rows", one, (), (), (), mode="decode"),
        ]
