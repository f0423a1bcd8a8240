"""What the portable kernels launch on a device that is not here: every setting that their tables can choose.

Problems are those of the published models over 1 to 8 ranks and the ops' own cases. A kernel is bound
to meta tensors and called; its launches are kept instead of run. So nothing is listed by hand, and a
new kernel, op or model is in the list by itself.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from math import prod
from typing import Any

import hal_torch
import hal_triton
import torch
from triton.runtime.jit import JITFunction

import hal
import hal.composed
from hal.bench.problem import problem
from hal.errors import HalError
from hal.family import families
from hal.kernel import Kernel
from hal.ops import OPS
from hal.ops.base import Op
from hal.registry import Registry

WORLDS = (1, 2, 4, 8)
DRAFT = 7  # most tokens drafted a step, on one rank
MANY = 4096  # rows where a kernel takes any number
TYPES = {
    torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64",
    torch.int8: "i8", torch.uint8: "u8", torch.int32: "i32", torch.int64: "i64", torch.bool: "i1",
    torch.float8_e4m3fn: "fp8e4nv", torch.float8_e4m3fnuz: "fp8e4b8",
}  # fmt: skip


@dataclass(frozen=True)
class Launch:
    """One specialisation of a Triton function, as its compiler is asked for it; plain values only.

    ``aligned``: arguments that are multiples of 16, all pointers among them.
    """

    module: str
    function: str
    signature: dict[str, str]
    constants: dict[str, Any]
    options: dict[str, Any]
    aligned: tuple[str, ...]

    @property
    def key(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)


@dataclass(frozen=True)
class Found:
    """The launches of one kernel with one choice of settings; ``first`` of those that it has on the device."""

    kernel: str
    settings: str
    op: str
    first: bool
    launches: tuple[Launch, ...]


class Alone:
    """One of several ranks, whose others are only said to be there."""

    def __init__(self, world: int) -> None:
        self.rank, self.world = 0, world

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return [tensor] * self.world

    def all_gather_object(self, value: str) -> list[str]:
        return [value] * self.world


@cache
def registry() -> Registry:
    """The portable kernels and what they are composed with; vendors' own would stand before them."""
    return Registry.of(hal.composed.backend, hal_torch.backend, hal_triton.backend)


def ops(world: int, device: hal.Device, draft: int = 0) -> tuple[Op[..., Any], ...]:
    """All ops that the published models bind over so many ranks, parts included, drafting so many tokens."""
    found: dict[Op[..., Any], None] = {}
    first = hal.Runtime(device, hal.Policy(), registry(), load=False, world=world)
    for family in families()[0]:
        for name in family.published:
            runtime = first.fresh(load=False)
            family.model(family.configure(name), runtime, draft)
            for group in runtime.groups:
                found |= {choice.op: None for _, choice in group.walk()}
    return tuple(found)


def portable(registry: Registry) -> dict[str, list[Kernel[Any]]]:
    """By op, the kernels that are written here; libraries' own are for their GPUs."""
    found: dict[str, list[Kernel[Any]]] = {}
    for title, op in OPS.items():
        for kernel in registry.kernels(op):
            if type(kernel).__module__.startswith("hal_triton.") and kernel.tier != "library":
                found.setdefault(title, []).append(kernel)
    return found


def found(device: hal.Device) -> list[Found]:
    """For each kernel and each choice of its settings on the device, what the largest problem launches."""
    kernels = portable(registry())
    problems = [case.op for op in OPS.values() for case in op.cases()]
    problems += [op for world in WORLDS for op in ops(world, device)]
    problems += ops(1, device, DRAFT)
    largest: dict[tuple[str, str], tuple[Kernel[Any], Op[..., Any]]] = {}
    for op in dict.fromkeys(problems):
        for kernel in kernels.get(op.title(), ()):
            if kernel.refuses(op, device) or any(need.kind != "software" and need(device) for need in kernel.needs):
                continue
            if (form := getattr(op, "out", None)) is not None and form not in kernel.makes(op):
                continue
            forms = f"{getattr(op, 'dtype', '')} {getattr(op, 'state_dtype', '')} {form or ''} {op.world > 1}"
            settings = json.dumps(kernel.settings(op, device), sort_keys=True)
            key = (f"{op.title()} {kernel.name}", f"{forms} {settings}")
            if key not in largest or _size(op) > _size(largest[key][1]):
                largest[key] = kernel, op
    made: list[Found] = []
    seen: set[str] = set()
    runtimes: dict[int, hal.Runtime] = {}
    for (name, settings), (kernel, op) in largest.items():
        if op.world not in runtimes:
            comm = Alone(op.world)
            runtimes[op.world] = hal.Runtime(device, hal.Policy(), registry(), place="meta", comm=comm)
        launches = tuple({one.key: one for one in _launches(runtimes[op.world], kernel, op)}.values())
        made.append(Found(name, settings, str(op), name not in seen, launches))
        seen.add(name)
    return made


def _size(op: Op[..., Any]) -> int:
    memory = sum(prod(p.shape) for p in op.params()) + sum(prod(s.shape) for s in op.states())
    return memory + op.traffic(1).bytes


def _launches(runtime: hal.Runtime, kernel: Kernel[Any], op: Op[..., Any]) -> Iterator[Launch]:
    """Of its least and most rows; of powers of two between, those whose constants are others."""
    least, most = kernel.rows(op, runtime.device)
    most = min(most or MANY, MANY)
    known: set[str] = set()
    for rows in (*sorted({least, most}), *(2**n for n in range(MANY.bit_length()) if least < 2**n < most)):
        try:
            made = problem(runtime, op, kernel.name, rows, rotated=0)
        except HalError as error:
            raise HalError(f"{kernel.name} at {rows} rows of {op}: {error}") from error
        with recorded() as launches:
            made.calls[0]()
        for one in launches:
            constants = f"{one.function} {one.constants}"
            if rows in (least, most) or constants not in known:
                yield one
            known.add(constants)


@contextmanager
def recorded() -> Iterator[list[Launch]]:
    """What Triton functions are launched with, within; nothing is compiled and nothing runs."""
    kept: list[Launch] = []
    given = JITFunction.run

    def record(self: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
        kept.append(launch(self, args, named))

    JITFunction.run = record
    try:
        yield kept
    finally:
        JITFunction.run = given


def launch(fn: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Launch:
    """The specialisation that Triton makes of a call: ones and None are constants, multiples of 16 are told."""
    values = dict(zip(fn.arg_names, args, strict=False)) | {n: v for n, v in named.items() if n in fn.arg_names}
    for name, parameter in inspect.signature(fn.fn).parameters.items():
        values.setdefault(name, parameter.default)
    signature, constants, aligned = {}, {}, []
    for p in fn.params:
        value = values[p.name]
        whole = isinstance(value, int) and not isinstance(value, bool)
        if p.is_constexpr or value is None or (whole and value == 1 and not p.do_not_specialize):
            signature[p.name], constants[p.name] = "constexpr", value
            continue
        signature[p.name] = kind(value)
        if isinstance(value, torch.Tensor) or (whole and value % 16 == 0 and not p.do_not_specialize):
            aligned.append(p.name)
    options = {name: value for name, value in named.items() if name not in fn.arg_names}
    return Launch(fn.fn.__module__, fn.fn.__name__, signature, constants, options, tuple(aligned))


def kind(value: Any) -> str:
    """An argument's type as the compiler writes it."""
    if isinstance(value, torch.Tensor):
        return "*" + TYPES[value.dtype]
    if isinstance(value, bool):
        return "i1"
    if isinstance(value, int):
        return "i32" if -(2**31) <= value < 2**31 else "i64"
    return "fp32"
