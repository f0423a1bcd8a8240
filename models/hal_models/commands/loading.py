"""What the verbs share: a checkpoint on a runtime, its storages filled, with a bar on a terminal."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from hal.errors import CheckpointError
from hal.policy import Policy
from hal.runtime import Runtime
from hal_models.qwen3_5.config import configure
from hal_models.qwen3_5.model import Qwen35
from hal_models.qwen3_5.published import PUBLISHED
from hal_models.qwen3_5.weights import Progress, load
from hal_models.shipped import SHIPPED, folder_of, shipped

__all__ = ["SHIPPED", "Bar", "checkpoint", "common", "loaded"]


def checkpoint(name: str) -> Path:
    """A folder, or a shipped checkpoint by name: ``tiny-dense``, ``tiny-moe``. Errors: CheckpointError."""
    folder = folder_of(name)
    if folder.exists():
        return folder
    if name in PUBLISHED:
        raise CheckpointError(f"{name}: a published name has no weights here; give the folder of its checkpoint")
    raise CheckpointError(f"{name}: no such folder; checkpoints known by name: {', '.join(shipped())}")


def common(parser: argparse.ArgumentParser) -> None:
    """Options of every verb that loads a checkpoint."""
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), help="compute in this dtype")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def loaded(folder: Path, dtype: str | None, draft: int = 0) -> Qwen35:
    """The model with its weights, on the device that is here; joins the ranks that torchrun started."""
    from hal.comm import from_environment

    runtime = Runtime(policy=Policy.from_environment(), comm=from_environment())
    model = Qwen35(configure(str(folder)).typed(dtype), runtime, draft)
    with Bar("loading") as bar:
        load(model, folder, bar)
    return model


class Bar:
    """A progress bar on standard error, where that is a terminal."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> Progress | None:
        self._bar = None
        if not sys.stderr.isatty():
            return None
        from rich.console import Console
        from rich.progress import Progress as Shown

        self._bar = Shown(console=Console(stderr=True), transient=True)
        self._bar.start()
        task = self._bar.add_task(self._what)

        def update(count: int, total: int, name: str) -> None:
            if self._bar is not None:
                self._bar.update(task, completed=count, total=total, description=name or self._what)

        return update

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()
