"""Matrix products: the input projection of a layer, row-parallel Linear, NormLinear, plain Gemm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import log2
from typing import TYPE_CHECKING, ClassVar

from hal.errors import HalError
from hal.formats import SCHEMES, Format, Scheme, Tensor
from hal.layout import Param
from hal.ops.base import Arg, Case, Op, Outcome, Pack, Problem, Signature
from hal.ops.formulas import rms_norm, weight_of

if TYPE_CHECKING:
    import torch

    from hal.formats import Encoded

BF16 = Tensor("bfloat16")


@dataclass(frozen=True)
class Projection:
    """One part of an input projection: its local rows, the output it goes to, how it is quantized.

    ``shard`` and ``copies`` as in ``Param``: rank r holds slice r // copies. ``inputs`` tells parts apart
    whose schemes are equal and whose inputs have fixed scales of their own.
    """

    name: str
    rows: int
    output: str
    scheme: Scheme | None = None
    copies: int = 1
    inputs: int = 0

    def __str__(self) -> str:
        return f"{self.name}:{self.rows}" + (f":{self.scheme}" if self.scheme else "")


def weight_params(
    name: str,
    shape: tuple[int, ...],
    dtype: str,
    scheme: Scheme | None,
    *,
    shard: int | None,
    sections: tuple[int, ...] = (),
    copies: int = 1,
    memory: str = "",
) -> tuple[Param, ...]:
    """The parameters of a weight ``[..., rows, columns]``: itself, its scale where it is quantized, its global scale.

    ``shard`` counts axes of the weight; a scale is split where it covers no more than its rank's share.
    """
    memory = memory or name
    rows, columns = shape[-2:]
    spread = columns**-0.5
    if scheme is None:
        return (Param(name, shape, dtype, memory, shard, sections, copies, (0.0, spread)),)
    form, lead = scheme.weight, shape[:-2]
    if columns % form.packs:
        raise HalError(f"{name}: expected columns in multiples of {form.packs} to pack {form.value}, got {columns}")
    # bytes of packed elements are any
    codes = Param(
        name, (*shape[:-1], columns // form.packs), form.stored, memory, shard, sections, copies,
        (127.5, 64.0) if form.packs > 1 else (0.0, 2.0),
    )  # fmt: skip
    held, block = (*lead, *form.scale.shape(rows, columns)), form.scale.block
    split, per = None, 1
    if block and shard is not None:
        split, per = shard, block[shard - len(lead)]
    elif form.scale.per == "channel" and shard == len(lead):
        split = shard
    # rows differ, so that one scaled as its neighbour shows
    made = (spread / 2, 0.0 if form.scale.per == "tensor" else spread / 16)
    if form.scale.within:  # the scale of a block is a large part of the global one, which is small
        made = (128.0, 32.0)
    if form.scale.stored == "uint8":
        made = (round(log2(spread / 2)) + 127.0, 1.0)
    scale = Param(
        f"{name}_scale", held, form.scale.stored, f"{memory}_scale", split,
        tuple(size // per for size in sections) if split is not None else (), copies if split is not None else 1, made,
    )  # fmt: skip
    if not form.scale.within:
        return (codes, scale)
    by_rows = form.scale.within == "channel" and shard == len(lead)
    whole = Param(
        f"{name}_global", (*lead, *form.scale.shape_within(rows)), "float32", f"{memory}_global",
        shard if by_rows else None, sections if by_rows else (), copies if by_rows else 1,
        (spread / 256, 0.0 if form.scale.within == "tensor" else spread / 2048),
    )  # fmt: skip
    return (codes, scale, whole)


def input_params(scheme: Scheme | None, memory: str = "weight", count: int = 1) -> tuple[Param, ...]:
    """The scale of the input, where the checkpoint fixes it: a buffer that the producer of x reads.

    Where the scheme has blocks under a global scale, it is that one. ``count``: of experts, one each.
    """
    if scheme is None or not scheme.fixed:
        return ()
    name = input_scale(memory)
    return (Param(name, (count,), "float32", name, init=(0.1, 0.0)),)  # made-up inputs stay below its limit


def input_scale(memory: str) -> str:
    """The memory of the static scale of what is multiplied with a weight: ``input_scale``, ``input_scale_down``."""
    rest = memory.removeprefix("weight")
    return f"input_scale{rest}" if rest != memory else f"input_scale_{memory}"


@dataclass(frozen=True)
class PartGroup:
    """Parts of an opening that are quantized alike: their rows lie one after the other in memories of their own."""

    suffix: str  # of the memories; empty where there is one group
    parts: tuple[Projection, ...]
    scheme: Scheme | None

    @property
    def rows(self) -> int:
        return sum(p.rows for p in self.parts)

    def __str__(self) -> str:
        return f"{','.join(p.name for p in self.parts)} {self.scheme or 'as dtype'}"


def part_groups(parts: Sequence[Projection]) -> tuple[PartGroup, ...]:
    """The parts by scheme and fixed scale of their input, in the order of their first ones."""
    keys = list(dict.fromkeys((p.scheme, p.inputs) for p in parts))
    alike = [tuple(p for p in parts if (p.scheme, p.inputs) == key) for key in keys]
    names = ["_" + "".join(p.name for p in some) if len(keys) > 1 else "" for some in alike]
    return tuple(PartGroup(name, some, some[0].scheme) for name, some in zip(names, alike, strict=True))


def _opening_params(op: InProj | NormLinear) -> tuple[Param, ...]:
    found = [Param("norm", (op.hidden,), op.dtype, "norm", init=(0.0, 0.1))]
    for group in part_groups(op.parts):
        for p in group.parts:
            found += weight_params(
                p.name, (p.rows, op.hidden), op.dtype, p.scheme,
                shard=0, copies=p.copies, memory=f"weight{group.suffix}",
            )  # fmt: skip
        found += input_params(group.scheme, f"weight{group.suffix}")
    return tuple(found)


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

    def quantized(self) -> str:
        return "; ".join(map(str, part_groups(self.parts))) if self.schemes() else ""

    def params(self) -> tuple[Param, ...]:
        return _opening_params(self)

    def reference(self, problem: Problem) -> Outcome:
        import torch

        residual = problem.args["residual"] + problem.args["partial"]
        x = rms_norm(residual, problem.params["norm"], self.eps, 1.0)
        outputs = {
            name: torch.cat(
                [x @ weight_of(problem.params, p.name, p.scheme).T for p in self.parts if p.output == name], -1
            )
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
            *(
                Case(f"{name}{text}", replace(odd, parts=(*_quantized(parts[:n], scheme), *parts[n:])), (5,))
                for name, scheme in SCHEMES.items()
                for n, text in ((6, ""), (4, ", b and a plain"))
            ),
        ]

    def adjust(self, variant: str, problem: Problem) -> None:
        problem.args["residual"].mul_(100.0)


def _widened(parts: Sequence[Projection], rows: int) -> tuple[Projection, ...]:
    return tuple(replace(p, rows=rows) for p in parts)


def _quantized(parts: Sequence[Projection], scheme: Scheme) -> tuple[Projection, ...]:
    held = scheme.by_rows().within(*(p.rows for p in parts), columns=64)
    return tuple(replace(p, scheme=held) for p in parts)


@dataclass(frozen=True, kw_only=True)
class Linear(Op[["torch.Tensor | Encoded"], "torch.Tensor"]):
    """Closes a mixer: ``x [rows, columns]`` times a weight split by columns over ranks; gives partial sums.

    The consumer of the result reduces over ranks. With a quantized weight the value is
    ``(x_code * x_scale) @ (w_code * w_scale).T``; where the scheme fixes the scale of x, it is a
    buffer of this op's storage that the producer of x reads.
    """

    columns: int
    rows: int
    x: Format = BF16
    scheme: Scheme | None = None
    dtype: str = "bfloat16"
    coarse: ClassVar[bool] = True

    @property
    def weight(self) -> Format:
        """The weight's format."""
        return self.scheme.weight if self.scheme else Tensor(self.dtype)

    def signature(self) -> Signature:
        x = Arg("x", ("rows", self.columns), self.x, free=(0,))
        return Signature((x,), (Arg("partial", ("rows", self.rows), Tensor(self.dtype)),))

    def params(self) -> tuple[Param, ...]:
        shape = (self.rows, self.columns)
        return (*weight_params("weight", shape, self.dtype, self.scheme, shard=1), *input_params(self.scheme))

    def reference(self, problem: Problem) -> Outcome:
        return (problem.args["x"] @ weight_of(problem.params, "weight", self.scheme).T,), {}

    @classmethod
    def cases(cls) -> Sequence[Case]:
        plain = cls(columns=96, rows=64)
        return [
            Case("one row", plain, (1,)),
            Case("few rows", plain, (7,)),
            Case("rows", plain, (33,)),
            Case("no rows", plain, (0,)),
            *quantized_cases(plain),
        ]


def quantized_cases(op: Linear | Gemm) -> list[Case]:
    """Each scheme with x as it is and as the scheme rounds it, and with no rows."""
    found = []
    for name, scheme in SCHEMES.items():
        mine = replace(op, scheme=scheme.within(op.rows, columns=op.columns))
        found.append(Case(f"{name} weight", mine, (5,)))
        if scheme.activations:
            both = replace(mine, x=scheme.activations)
            found += [Case(f"{name} both", both, (5,)), Case(f"{name} both, no rows", both, (0,))]
    return found


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

    def quantized(self) -> str:
        return "; ".join(map(str, part_groups(self.parts))) if self.schemes() else ""

    def params(self) -> tuple[Param, ...]:
        return _opening_params(self)

    def reference(self, problem: Problem) -> Outcome:
        import torch

        residual = problem.args["residual"] + problem.args["partial"]
        x = rms_norm(residual, problem.params["norm"], self.eps, 1.0)
        return (torch.cat([x @ weight_of(problem.params, p.name, p.scheme).T for p in self.parts], -1), residual), {}

    @classmethod
    def cases(cls) -> Sequence[Case]:
        op = cls(hidden=64, parts=tuple(Projection(n, r, "qkv") for n, r in (("q", 64), ("k", 16), ("v", 16))))
        quantized = [
            Case(name, replace(op, parts=_quantized(op.parts, scheme)), (5,)) for name, scheme in SCHEMES.items()
        ]
        fixed = _quantized(op.parts, SCHEMES["fp8_tensor"])
        several = Case("each its own", replace(op, parts=(fixed[0], op.parts[1], replace(fixed[2], inputs=1))), (5,))
        return [Case("one row", op, (1,)), Case("rows", op, (17,)), Case("no rows", op, (0,)), *quantized, several]


@dataclass(frozen=True, kw_only=True)
class Gemm(Op[["torch.Tensor"], "torch.Tensor"]):
    """``x [rows, columns] @ weight[rows, columns].T``; a part of composed kernels. Quantized as Linear is."""

    columns: int
    rows: int
    x: Format = BF16
    scheme: Scheme | None = None
    dtype: str = "bfloat16"

    @property
    def weight(self) -> Format:
        """The weight's format."""
        return self.scheme.weight if self.scheme else Tensor(self.dtype)

    def signature(self) -> Signature:
        x = Arg("x", ("rows", self.columns), self.x, free=(0,))
        return Signature((x,), (Arg("value", ("rows", self.rows), Tensor(self.dtype), free=(0,)),))

    def params(self) -> tuple[Param, ...]:
        shape = (self.rows, self.columns)
        return (*weight_params("weight", shape, self.dtype, self.scheme, shard=0), *input_params(self.scheme))

    def reference(self, problem: Problem) -> Outcome:
        return (problem.args["x"] @ weight_of(problem.params, "weight", self.scheme).T,), {}

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
            *quantized_cases(replace(odd, columns=256)),
        ]
