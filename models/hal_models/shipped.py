"""The checkpoints that come with the package, by name: ``tiny-dense``, ``tiny-moe``."""

from __future__ import annotations

from pathlib import Path

SHIPPED = Path(__file__).parent / "tiny"


def shipped() -> dict[str, Path]:
    """Name to folder."""
    return {f"tiny-{path.name}": path for path in sorted(SHIPPED.iterdir()) if path.is_dir()}


def folder_of(name: str) -> Path:
    """The folder of a shipped checkpoint, else the name as a path; a folder of that name stands before."""
    path = Path(name)
    return path if path.is_dir() else shipped().get(name, path)
