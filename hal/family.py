"""Model families arrive through the entry point group ``hal.models``, ours as a stranger's do."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from hal.backend import Broken, load_target, said
from hal.errors import HalError, UnknownName

GROUP = "hal.models"


@dataclass(frozen=True)
class Family:
    """What an entry point of ``hal.models`` gives; nothing of it imports a tensor library.

    ``published``: names known without a file. ``config``, ``module:function``: a configuration
    from such a name or from a checkpoint's folder. ``build``, ``module:function``: the model
    from (configuration, runtime), binding all its ops; a family that drafts takes the tokens a step
    as a third. ``commands``: name of a command line's verb, of one word or two, to
    (``module:function`` that adds its arguments to a parser, ``module:function`` that runs it with the
    parsed arguments and gives the exit status, one line of help). ``scheme``, ``module:function``: from
    (configuration, name) the configuration with its weights quantized so.
    """

    name: str
    published: tuple[str, ...]
    config: str
    build: str
    commands: tuple[tuple[str, str, str, str], ...] = ()
    scheme: str = ""

    def configure(self, name: str) -> Any:
        """The configuration of a published name or of a checkpoint's folder."""
        return load_target(self.config)(name)

    def quantize(self, config: Any, scheme: str) -> Any:
        """The configuration with its weights quantized by a scheme's name. Errors: HalError where it has none."""
        if not self.scheme:
            raise HalError(f"{self.name}: knows no schemes, got {scheme!r}")
        return load_target(self.scheme)(config, scheme)

    def model(self, config: Any, runtime: Any, draft: int = 0) -> Any:
        """The model, bound on a runtime; ``draft``: tokens that it drafts a step, for families that draft."""
        build = load_target(self.build)
        return build(config, runtime, draft) if draft else build(config, runtime)


def families(entries: Iterable[metadata.EntryPoint] | None = None) -> tuple[list[Family], list[Broken]]:
    """Every family that is installed, and every one that failed to import, with its error."""
    found: list[Family] = []
    broken: list[Broken] = []
    for entry in metadata.entry_points(group=GROUP) if entries is None else entries:
        try:
            family = entry.load()
            if not isinstance(family, Family):
                raise TypeError(f"{entry.value} is a {type(family).__name__}, not a hal.family.Family")
            found.append(family)
        except Exception as error:  # noqa: BLE001 - whatever a package raises becomes a row
            broken.append(Broken(entry.name, said(error)))
    return sorted(found, key=lambda f: f.name), sorted(broken, key=lambda b: b.name)


def family_of(name: str) -> Family:
    """The family that publishes a name; an unknown one is an error that says the nearest."""
    found, _ = families()
    for family in found:
        if name in family.published:
            return family
    raise UnknownName("model", name, [n for family in found for n in family.published])
