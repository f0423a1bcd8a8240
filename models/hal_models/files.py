"""Tensors of a checkpoint's folder: safetensors, single or sharded, memory-mapped, never unpickled."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from hal.errors import CheckpointError

if TYPE_CHECKING:
    import torch

INDEX = "model.safetensors.index.json"


class Files:
    """The tensors of a folder by name. A context manager: the files are open, and mapped, inside it.

    Errors: CheckpointError naming the file that is missing, truncated or corrupt.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._stack = ExitStack()
        self._home: dict[str, Any] = {}

    def __enter__(self) -> Files:
        wanted = self._index()
        paths = sorted(set(wanted.values())) if wanted else sorted(p.name for p in self.folder.glob("*.safetensors"))
        if not paths:
            raise CheckpointError(f"{self.folder}: no .safetensors file")
        with self._stack as stack:
            for name in paths:
                opened = stack.enter_context(self._open(self.folder / name))
                for key in opened.keys():  # noqa: SIM118 - not a mapping
                    if wanted and wanted.get(key) != name:
                        raise CheckpointError(f"{self.folder / name}: holds {key}, which {INDEX} does not place there")
                    if key in self._home:
                        raise CheckpointError(f"{self.folder / name}: holds {key}, as another file does too")
                    self._home[key] = opened
            if missing := sorted(set(wanted) - set(self._home)):
                absent = _some([f"{key} in {wanted[key]}" for key in missing])
                raise CheckpointError(f"{self.folder}: {INDEX} lists tensors that their files do not hold: {absent}")
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._home.clear()
        self._stack.close()

    def __iter__(self) -> Iterator[str]:
        return iter(self._home)

    def __len__(self) -> int:
        return len(self._home)

    def __contains__(self, name: str) -> bool:
        return name in self._home

    def shape(self, name: str) -> tuple[int, ...]:
        """The tensor's shape; its data is not read."""
        return tuple(self._home[name].get_slice(name).get_shape())

    def read(self, name: str, *cut: slice) -> torch.Tensor:
        """The tensor, or so much of its first axes as is cut out; only that is read."""
        try:
            tensor: torch.Tensor = self._home[name].get_slice(name)[cut or ...]
        except Exception as error:  # noqa: BLE001 - whatever the library raises
            raise CheckpointError(f"{self.folder}: {name} cannot be read: {error}") from None
        return tensor

    def _index(self) -> dict[str, str]:
        path = self.folder / INDEX
        if not path.is_file():
            return {}
        try:
            placed = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
            found = {str(key): str(name) for key, name in placed.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path}: cannot be read: {type(error).__name__}: {error}") from None
        if not found:
            raise CheckpointError(f"{path}: lists no tensors")
        if outside := [name for name in found.values() if Path(name).name != name or name in ("", "..")]:
            raise CheckpointError(f"{path}: names a file outside the folder: {outside[0]!r}")
        return found

    def _open(self, path: Path) -> Any:
        from safetensors import safe_open

        try:
            return safe_open(str(path), framework="pt")
        except FileNotFoundError:
            raise CheckpointError(f"{path}: is missing") from None
        except Exception as error:  # noqa: BLE001 - whatever the library raises
            raise CheckpointError(f"{path}: truncated or corrupt: {error}") from None


def _some(names: list[str], most: int = 12) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
