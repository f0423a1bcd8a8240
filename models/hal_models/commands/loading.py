"""What the verbs share: a checkpoint on a runtime, its storages filled, with a bar on a terminal."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from hal.policy import Policy
from hal.runtime import Runtime
from hal_models.qwen3_5.config import configure
from hal_models.qwen3_5.model import Qwen35
from hal_models.qwen3_5.weights import Progress, load

SHIPPED = Path(__file__).parent.parent / "tiny"


def checkpoint(name: str) -> Path:
    """A folder, or a shipped checkpoint by name: ``tiny-dense``, ``tiny-moe``."""
    return {f"tiny-{path.name}": path for path in SHIPPED.iterdir() if path.is_dir()}.get(name, Path(name))


def common(parser: argparse.ArgumentParser) -> None:
    """Options of every verb that loads a checkpoint."""
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), help="compute in this dtype")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def loaded(folder: Path, dtype: str | None) -> Qwen35:
    """The model with its weights, on the device that is here; joins the ranks that torchrun started."""
    from hal.comm import from_environment

    runtime = Runtime(policy=Policy.from_environment(), comm=from_environment())
    model = Qwen35(configure(str(folder)).typed(dtype), runtime)
    with _Bar() as bar:
        load(model, folder, bar)
    return model


class _Bar:
    """A progress bar on standard error, where that is a terminal."""

    def __enter__(self) -> Progress | None:
        self._bar = None
        if not sys.stderr.isatty():
            return None
        from rich.console import Console
        from rich.progress import Progress as Bar

        self._bar = Bar(console=Console(stderr=True), transient=True)
        self._bar.start()
        task = self._bar.add_task("loading")

        def update(count: int, total: int, name: str) -> None:
            if self._bar is not None:
                self._bar.update(task, completed=count, total=total, description=name or "loaded")

        return update

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()
