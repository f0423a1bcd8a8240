"""How a backend declares a kernel: what it needs, what it takes, and where its code stands."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, TypeVar

from hal.backend import load_target
from hal.formats import Format, Made, Tensor
from hal.layout import Layout
from hal.numerics import REASSOCIATED, Numerics
from hal.ops.base import Op
from hal.requirement import Reason, Requirement

if TYPE_CHECKING:
    from hal.device import Device
    from hal.runtime import Runtime
    from hal.storage import Storage

O = TypeVar("O", bound=Op[..., Any])  # noqa: E741 - an Op
K = TypeVar("K", bound="type[Kernel[Any]]")
Tier = Literal["fused", "library", "portable", "composed", "plain"]
TIERS: tuple[Tier, ...] = ("fused", "library", "portable", "composed", "plain")
Rows = tuple[int, int | None]
ALL_ROWS: Rows = (1, None)


@dataclass(frozen=True)
class Part:
    """A finer op inside a composed kernel.

    ``memory`` maps the part's memory names to the whole's, and those of scales (``out``); names it
    leaves out are the same. ``feeds`` names the parts that take this one's result, or formats that it
    is wanted in: its format is agreed on there, and is a tuple where those differ.
    """

    op: Op[..., Any]
    memory: Mapping[str, str] = field(default_factory=dict)
    feeds: tuple[str | Format, ...] = ()

    def outer(self, name: str) -> str:
        """The whole's name of a memory of the part."""
        return self.memory.get(name, name)


@dataclass(frozen=True)
class Site:
    """Where a kernel is loaded: all it may keep. Values of parameters are not there yet."""

    op: Any
    name: str
    settings: Mapping[str, Any]
    layouts: Mapping[str, Layout]
    storages: Mapping[str, Storage]
    parts: Mapping[str, Any]
    scales: Mapping[str, Any]
    runtime: Runtime
    kernel: str = ""

    def weight(self, memory: str, layout: Layout | None = None) -> Any:
        """The tensor of a memory: read as ``layout`` where given, else whole."""
        return self.storages[memory].read(layout)

    def planned(self, plan: Callable[[Any], object]) -> object:
        """Have ``plan(batch)`` run once a step for all sites of an equal op and kernel; gives its key.

        Its result is ``batch.plans[key]`` from ``Runtime.begin`` on.
        """
        return self.runtime.plan((self.kernel, self.op), plan)


class Kernel(Generic[O]):
    """One backend's declaration of how it serves an op. Stateless; one instance in the registry.

    ``op``: the class served, read off ``Kernel[InProj]``. ``layouts``: per memory, what it can
    read, the preferred one first; memory not named lies in its default. ``takes`` and
    ``makes``: the formats of a fed input and of the output. ``captures``: a graph may hold it, for
    it neither waits for the device nor depends on the host's numbers. ``quantized``: it may be asked
    for weights that a scheme quantizes, and refuses those it cannot read. Methods get facts only,
    never tensors.
    """

    name: ClassVar[str]
    code: ClassVar[str]
    serves: ClassVar[tuple[type[Op[..., Any]], ...]] = ()
    tier: ClassVar[Tier] = "plain"
    needs: ClassVar[tuple[Requirement, ...]] = ()
    layouts: ClassVar[Mapping[str, tuple[Layout, ...]]] = {}
    launches: ClassVar[int] = 1
    captures: ClassVar[bool] = True
    quantized: ClassVar[bool] = False

    def refuses(self, op: O, device: Device) -> Reason | None:
        """Why this problem is not for this kernel, or nothing."""
        return None

    def rows(self, op: O, device: Device) -> Rows:
        """Least and most rows it takes; no most is ``None``."""
        return ALL_ROWS

    def reads(self, op: O, device: Device) -> Mapping[str, tuple[Layout, ...]]:
        """Layouts per memory, for this problem."""
        return self.layouts

    def takes(self, op: O) -> tuple[Format, ...]:
        """Formats of the fed input ``x``, the preferred one first."""
        return (Tensor(op.dtype),) if hasattr(op, "dtype") else ()

    def makes(self, op: O) -> tuple[Made, ...]:
        """Formats of ``out`` that it writes in one go."""
        return (Tensor(op.dtype),) if hasattr(op, "dtype") else ()

    def numerics(self, op: O) -> Numerics:
        """What it promises of its numbers, apart from its parts."""
        return REASSOCIATED

    def settings(self, op: O, device: Device) -> Mapping[str, Any]:
        """Launch settings, for the report and the code."""
        return {}

    def parts(self, op: O) -> Mapping[str, Part]:
        """Finer ops it is composed of, in order of running."""
        return {}

    def load(self, site: Site) -> Callable[..., Any]:
        """The callable for a site: by default ``code``, ``module:function``, called with the site."""
        loaded: Callable[..., Any] = load_target(self.code)(site)
        return loaded

    def __repr__(self) -> str:
        return f"<{self.name}>"


def kernel(name: str, *, code: str = "", serves: tuple[type[Op[..., Any]], ...] = ()) -> Callable[[K], K]:
    """Name a kernel class and say where its code stands; ``serves`` where it serves several ops."""

    def named(cls: K) -> K:
        cls.name, cls.code = name, code
        cls.serves = serves or _served(cls)
        return cls

    return named


def _served(cls: type) -> tuple[type[Op[..., Any]], ...]:
    for base in cls.__dict__.get("__orig_bases__", ()):
        args = getattr(base, "__args__", ())
        if args and isinstance(args[0], type) and issubclass(args[0], Op):
            return (args[0],)
    raise TypeError(f"{cls.__name__}: name the op: class {cls.__name__}(Kernel[SomeOp])")
