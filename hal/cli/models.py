"""Models by name or folder: which family has them, and how they are bound."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hal.errors import CheckpointError, HalError
from hal.family import Family, families, family_of

if TYPE_CHECKING:
    from hal.runtime import Runtime


def build(name: str, runtime: Runtime, scheme: str | None = None, draft: int = 0) -> None:
    """Bind a model, by published name or checkpoint folder, on a runtime that resolves only.

    ``scheme``: as if its weights were quantized so; ``draft``: tokens that it drafts a step.
    Errors: UnknownName for a scheme, HalError for more tokens than it can draft.
    """
    family, path = _find(name)
    config = family.configure(path)
    family.model(family.quantize(config, scheme) if scheme else config, runtime, draft)


def elsewhere(name: str, runtime: Runtime, draft: int = 0, *, failed: HalError | None = None) -> Runtime:
    """A model on the shipped CPU profile under no policy: the problems that it has, whatever serves them.

    ``failed``: what it failed with on its own device, raised where it fails here too.
    """
    from hal.device import load_device
    from hal.policy import Policy
    from hal.runtime import Runtime

    built = Runtime(load_device("cpu"), Policy(), runtime.registry, load=False, world=runtime.world)
    try:
        build(name, built, draft=draft)
    except HalError as error:
        raise failed or error from None
    return built


def _find(name: str) -> tuple[Family, str]:
    path = Path(name)
    if not path.is_dir():
        return _named(name), name
    if not (path / "config.json").is_file():
        raise CheckpointError(f"{path}: a checkpoint's folder has a config.json, this one has none")
    refused = []
    for family in families()[0]:
        try:
            family.configure(name)
        except HalError as error:
            refused.append(f"{family.name}: {error}")
        else:
            return family, name
    raise CheckpointError(f"{path}: no family takes it; {'; '.join(refused) or 'none is installed'}{lost()}")


def _named(name: str) -> Family:
    """The family that publishes a name, else one that knows it all the same, such as that of a shipped checkpoint."""
    try:
        return family_of(name)
    except HalError as error:
        refused = []
        for family in families()[0]:
            try:
                family.configure(name)
            except HalError as own:
                refused.append(str(own))
            else:
                return family
        raise HalError(f"{'; '.join(refused) or error}{lost()}") from None


def ends() -> list[str]:
    """The first and the last published name of each family: they tell all ops that it has."""
    return [name for family in families()[0] for name in dict.fromkeys((*family.published[:1], *family.published[-1:]))]


def lost() -> str:
    """The families that failed to import, to stand behind a message; empty where none did."""
    return "".join(f"; family {b.name} failed to import: {b.error}" for b in families()[1])
