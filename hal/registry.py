"""Every kernel of every op, by name; backends that failed are kept with their errors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import Any

from hal.backend import Backend, Broken, discover, said
from hal.errors import DuplicateName, UnknownName
from hal.kernel import Kernel
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
        registry = cls(broken=broken)
        for backend in found:
            registry.add_backend(backend)
        return registry

    def add_backend(self, backend: Backend) -> None:
        """Import a backend's declarations; one that fails is remembered with its error."""
        self.backends.append(backend)
        for module in backend.declarations:
            try:
                kernels = declared(module)
            except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever a backend raises becomes a row
                self.broken.append(Broken(f"{backend.name} ({module})", said(error)))
                continue
            for kernel in kernels:
                self.add(kernel)

    def add(self, cls: type[Kernel[Any]]) -> None:
        """Register one kernel for the ops it serves; a name twice for an op is an error."""
        if self._closed:
            raise DuplicateName(f"{cls.name}: the registry is closed, something was resolved with it already")
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
