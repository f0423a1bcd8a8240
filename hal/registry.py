"""Every kernel of every op, by name; backends that failed are kept with their errors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from importlib import import_module
from typing import Any

from hal.backend import Backend, Broken, discover, said
from hal.errors import DuplicateName, HalError, UnknownName
from hal.kernel import TIERS, Kernel
from hal.ops import OPS
from hal.ops.base import Op


class Registry:
    """Kernels by op. Closed once something was resolved with it: a later registration raises."""

    def __init__(self, kernels: Iterable[type[Kernel[Any]]] = (), broken: Sequence[Broken] = ()) -> None:
        self.broken = list(broken)
        self.backends: list[Backend] = []
        self._kernels: dict[type[Op[..., Any]], dict[str, Kernel[Any]]] = {}
        self._closed = False
        for cls in kernels:
            self.add(cls)

    @classmethod
    def installed(cls) -> Registry:
        """All backends that entry points name."""
        found, broken = discover()
        return cls.of(*found, broken=broken)

    @classmethod
    def of(cls, *backends: Backend, broken: Sequence[Broken] = ()) -> Registry:
        """These backends and no others; ``broken``: those that could not be had."""
        registry = cls(broken=broken)
        for backend in backends:
            registry.add_backend(backend)
        return registry

    def add_backend(self, backend: Backend) -> None:
        """Import a backend's declarations; one that fails is remembered with its error."""
        self.backends.append(backend)
        for module in backend.declarations:
            try:
                kernels = declared(module)
            except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever a backend raises becomes a row
                self.broken.append(Broken(f"{backend.name} ({module})", said(error), whole=False))
                continue
            for kernel in kernels:
                try:
                    self.add(kernel)
                except HalError:
                    raise
                except Exception as error:  # noqa: BLE001 - likewise
                    self.broken.append(
                        Broken(f"{backend.name} ({module})", f"{kernel.name}: {said(error)}", whole=False)
                    )

    def add(self, cls: type[Kernel[Any]]) -> None:
        """Register one kernel for the ops it serves; a name twice for an op is an error."""
        if self._closed:
            raise DuplicateName(f"{cls.name}: the registry is closed, something was resolved with it already")
        _sound(cls)
        for op in cls.serves:
            if OPS.get(op.title()) is not op:
                raise UnknownName("op", op.title(), OPS)
            kernels = self._kernels.setdefault(op, {})
            if cls.name in kernels:
                raise DuplicateName(f"kernel {cls.name!r} is registered twice for {op.title()}")
            kernels[cls.name] = cls()

    def kernels(self, op: type[Op[..., Any]]) -> list[Kernel[Any]]:
        """The kernels of an op, by name."""
        self._closed = True
        return [kernel for _, kernel in sorted(self._kernels.get(op, {}).items())]

    def names(self, op: type[Op[..., Any]] | None = None) -> list[str]:
        """Names of the kernels of one op, or of all."""
        chosen = self._kernels.values() if op is None else [self._kernels.get(op, {})]
        return sorted({name for kernels in chosen for name in kernels})


def _sound(cls: type[Kernel[Any]]) -> None:
    """Raise HalError for a declaration that says something no kernel says, or says it wrongly."""
    known = {name for name in dir(Kernel) if not name.startswith("_")} | {"name", "code"}
    for base in cls.__mro__:
        if base is Kernel or not issubclass(base, Kernel):
            continue
        for name in vars(base):
            # names of one's own are fine; one that all but reads like ours is a slip
            if not name.startswith("_") and name not in known and get_close_matches(name, known, 1, 0.8):
                raise UnknownName(f"attribute of kernel {cls.name}", name, known)
    if cls.tier not in TIERS:
        raise UnknownName(f"tier of kernel {cls.name}", str(cls.tier), TIERS)
    if wrong := [need for need in cls.needs if not callable(need) or not hasattr(need, "kind")]:
        raise HalError(f"kernel {cls.name}: needs are requirements, got {wrong[0]!r}")


def declared(module: str) -> list[type[Kernel[Any]]]:
    """The kernels that a module declares itself."""
    found = import_module(module)
    return [
        value
        for value in vars(found).values()
        if isinstance(value, type)
        and issubclass(value, Kernel)
        and value.__module__ == found.__name__
        and "name" in vars(value)
    ]
