"""What is known about a device, each fact with its source.

The names of facts are a closed list. A Device states all of them: a value that nobody
knows is ``None`` and passes no gate; a fact whose probe failed says why.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

from hal.errors import HalError, UnknownName
from hal.schema import read_object

Value = str | int | float | bool | None
Source = Literal["probed", "declared", "failed"]
SOURCES: tuple[str, ...] = get_args(Source)
SCHEMA = "hal.device/1"
STACK_SCHEMA = "hal.stack/1"

HARDWARE: dict[str, tuple[type, str]] = {
    "vendor": (str, "who made it: cuda, rocm or cpu (the name of the programming interface)"),
    "arch": (str, "architecture: sm_90, gfx942, x86_64"),
    "name": (str, "marketing name"),
    "uuid": (str, "identity of this very device"),
    "compute_units": (int, "SMs, CUs or cores"),
    "memory_bytes": (int, "device memory, bytes"),
    "bandwidth": (float, "memory bandwidth, bytes per second"),
    "l2_bytes": (int, "last cache before memory, bytes"),
    "shared_bytes": (int, "shared memory or LDS that one program may ask for, bytes"),
    "wave_size": (int, "threads that step together"),
    "gemm_row_bytes": (int, "matrix rows that are no multiple of this many bytes get slow GEMM kernels"),
    "fp8_e4m3fn": (bool, "converts and multiplies OCP e4m3 in hardware"),
    "fp8_e4m3fnuz": (bool, "converts and multiplies e4m3 fnuz in hardware"),
    "fp4_e2m1": (bool, "multiplies e2m1 with block scales in hardware"),
    "mma": (bool, "matrix instructions: tensor cores, MFMA or WMMA"),
    "tma": (bool, "tensor memory accelerator (bulk tensor copies)"),
    "pdl": (bool, "programmatic dependent launch"),
    "link": (str, "how it reaches its peers: nvlink, xgmi, pcie, none"),
    "link_bandwidth": (float, "to all peers together, one direction, bytes per second"),
}
LIBRARIES: dict[str, tuple[type, str]] = {
    "driver": (str, "version of the kernel-mode driver"),
    "cuda": (str, "CUDA version that torch is built with"),
    "rocm": (str, "HIP version that torch is built with"),
    "python": (str, "Python"),
    "torch": (str, "torch"),
    "triton": (str, "triton"),
    "fla_core": (str, "fla-core, flash-linear-attention's kernels"),
    "flashinfer": (str, "flashinfer-python"),
    "flashinfer_jit_cache": (str, "flashinfer-jit-cache, FlashInfer's kernels compiled ahead"),
    "cutlass_dsl": (str, "nvidia-cutlass-dsl, which FlashInfer's GDN kernels need"),
    "nvcc": (str, "CUDA's compiler, which FlashInfer's other kernels are built with on first use"),
    "cuda_core": (str, "cuda-core, for probing without torch"),
    "cuda_bindings": (str, "cuda-bindings, through which CUDA C++ is compiled and launched"),
    "aiter": (str, "aiter, AMD's kernel library"),
}
FACTS = HARDWARE | LIBRARIES
_PARTS: dict[str, dict[str, type]] = {
    SCHEMA: {"label": str, "stack": str, "facts": dict},
    STACK_SCHEMA: {"libraries": dict},
}


@dataclass(frozen=True, slots=True)
class Fact:
    """A value and where it comes from. ``None`` is unknown, or for a library: not installed."""

    value: Value
    source: Source
    why: str = ""


def fits(name: str, value: object) -> bool:
    """Whether a value is of the type that the fact of this name has; ``None`` always is."""
    kind = FACTS[name][0]
    fitting = isinstance(value, (int, float) if kind is float else kind)
    return value is None or (fitting and isinstance(value, bool) == (kind is bool))


class Device:
    """Frozen facts about one device, real or absent. ``label`` is how a report calls it."""

    def __init__(self, label: str, stack: str, facts: Mapping[str, Fact]) -> None:
        for name in facts:
            if name not in FACTS:
                raise UnknownName("fact", name, FACTS)
        if missing := [name for name in FACTS if name not in facts]:
            raise HalError(f"device {label}: facts not stated: {', '.join(missing)}")
        for name, fact in facts.items():
            if not fits(name, fact.value):
                kind = FACTS[name][0].__name__
                raise HalError(f"device {label}: fact {name} is {kind}, got {fact.value!r}")
            if isinstance(fact.value, (int, float)) and not isinstance(fact.value, bool) and not fact.value > 0:
                raise HalError(f"device {label}: fact {name} is above 0, got {fact.value!r}")
        self.label = label
        self.stack = stack
        self._facts = {name: facts[name] for name in FACTS}

    def __getitem__(self, name: str) -> Fact:
        try:
            return self._facts[name]
        except KeyError:
            raise UnknownName("fact", name, FACTS) from None

    def value(self, name: str) -> Any:
        """The value of a fact, ``None`` where it is unknown."""
        return self[name].value

    def known(self) -> dict[str, Any]:
        """The values of all facts that are known."""
        return {name: fact.value for name, fact in self._facts.items() if fact.value is not None}

    def __iter__(self) -> Iterator[str]:
        return iter(self._facts)

    @cached_property
    def _key(self) -> tuple[Any, ...]:
        return (self.label, self.stack, *self._facts.values())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Device) and self._key == other._key

    @cached_property
    def _hash(self) -> int:
        return hash(self._key)

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return f"Device({self.label}: {self.value('vendor')} {self.value('arch')}, stack {self.stack})"

    def replaced(self, **values: Value) -> Device:
        """A copy with some facts declared otherwise; for questions and tests."""
        changed = {name: Fact(value, "declared", "replaced by hand") for name, value in values.items()}
        return Device(self.label, self.stack, self._facts | changed)

    def with_stack(self, stack: str) -> Device:
        """The same hardware under a shipped stack."""
        return Device(self.label, stack, {**self._facts, **load_stack(stack)})

    def to_json(self) -> dict[str, Any]:
        """What ``hal dump --json`` prints and ``--device FILE`` reads."""
        facts = {name: [f.value, f.source, f.why] for name, f in self._facts.items()}
        return {"schema": SCHEMA, "label": self.label, "stack": self.stack, "facts": facts}


def _folder(kind: str) -> Path:
    return Path(__file__).parent / kind


def profiles() -> list[str]:
    """Names of the shipped device profiles."""
    return sorted(path.stem for path in _folder("devices").glob("*.json"))


def stacks() -> list[str]:
    """Names of the shipped stacks."""
    return sorted(path.stem for path in _folder("stacks").glob("*.json"))


def load_device(name: str, stack: str | None = None) -> Device:
    """A device by the name of a shipped profile or the path of a dumped file."""
    path = Path(name)
    if name in profiles():
        path = _folder("devices") / f"{name}.json"
    elif not (path.suffix == ".json" or path.is_file()):
        raise UnknownName("device profile", name, profiles())
    data = _read(path, SCHEMA)
    libraries = {} if stack is None else load_stack(stack)
    try:
        facts = {key: _fact(key, entry) for key, entry in data["facts"].items()}
        if stack is None and not any(key in LIBRARIES for key in facts):
            libraries = load_stack(data["stack"])
        return Device(data["label"], stack or data["stack"], facts | libraries)
    except HalError as error:
        raise HalError(f"{path}: {error}") from None


def load_stack(name: str) -> dict[str, Fact]:
    """The library facts of a shipped stack, all declared."""
    if name not in stacks():
        raise UnknownName("stack", name, stacks())
    data = _read(_folder("stacks") / f"{name}.json", STACK_SCHEMA)
    return {key: Fact(data["libraries"].get(key), "declared", f"stack {name}") for key in LIBRARIES}


def _read(path: Path, schema: str) -> dict[str, Any]:
    data = read_object(path, schema)
    for key, kind in _PARTS[schema].items():
        if not isinstance(data.get(key), kind):
            raise HalError(f"{path}: {key} is a {kind.__name__}, got {data.get(key)!r}")
    return data


def _fact(key: str, entry: Any) -> Fact:
    match entry:
        case [value, source, str(why)] if source in SOURCES:
            return Fact(value, source, why)
    raise HalError(f"fact {key} is [value, {'|'.join(SOURCES)}, why], got {entry!r}")
