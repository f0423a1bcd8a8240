"""Why a kernel is not the one, and the requirements that answer with such a reason or nothing."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from hal.device import FACTS, LIBRARIES, Device
from hal.errors import HalError, UnknownName

if TYPE_CHECKING:
    from packaging.version import Version

Kind = Literal["op", "device", "software", "policy", "numerics", "layout", "edge", "rank"]


@dataclass(frozen=True)
class Reason:
    """What is needed (value), against what there is (value)."""

    kind: Kind
    text: str

    def __str__(self) -> str:
        return self.text


class Requirement(Protocol):
    """One need of a kernel. ``kind`` is what its reasons are, known before asking."""

    @property
    def kind(self) -> Kind: ...

    def __call__(self, device: Device) -> Reason | None: ...


def _known(name: str) -> str:
    if name not in FACTS:
        raise UnknownName("fact", name, FACTS)
    return name


def _have(device: Device, name: str) -> str:
    fact = device[name]
    value = "unknown" if fact.value is None else repr(fact.value)
    return f"{device.label} has {value}" + (f" ({fact.source}: {fact.why})" if fact.why else "")


@dataclass(frozen=True)
class OneOf:
    """A fact has one of the values listed; exact, so a chip that does not exist yet is not claimed."""

    name: str
    values: tuple[str, ...]
    kind: Kind = "device"

    def __call__(self, device: Device) -> Reason | None:
        if device.value(self.name) in self.values:
            return None
        return _refuse(self.kind, f"needs {self.name} {' or '.join(self.values)}", device, self.name)


@dataclass(frozen=True)
class Family:
    """An architecture of one family: ``sm_12`` takes sm_120 and sm_121, ``gfx94`` takes gfx942."""

    prefix: str
    kind: Kind = "device"

    def __call__(self, device: Device) -> Reason | None:
        arch = device.value("arch")
        if isinstance(arch, str) and len(arch) == len(self.prefix) + 1 and arch.startswith(self.prefix):
            return None
        return _refuse(self.kind, f"needs an arch of family {self.prefix}x", device, "arch")


@dataclass(frozen=True)
class Feature:
    """A feature that the device has."""

    name: str
    kind: Kind = "device"

    def __call__(self, device: Device) -> Reason | None:
        if device.value(self.name) is True:
            return None
        return _refuse(self.kind, f"needs {self.name}", device, self.name)


@dataclass(frozen=True)
class AtLeast:
    """A numeric limit of the device."""

    name: str
    least: float
    kind: Kind = "device"

    def __call__(self, device: Device) -> Reason | None:
        value = device.value(self.name)
        if value is not None and value >= self.least:
            return None
        return _refuse(self.kind, f"needs {self.name} of at least {self.least}", device, self.name)


@dataclass(frozen=True)
class Library:
    """An installed library whose version lies in a PEP 440 range (``>=0.6,<0.8``; empty: any)."""

    name: str
    versions: str = ""
    kind: Kind = "software"

    def __call__(self, device: Device) -> Reason | None:
        from packaging.specifiers import SpecifierSet

        fact = device[self.name]
        need = f"needs {self.name}{' ' + self.versions if self.versions else ''}"
        if fact.value is None:
            state = "is broken" if fact.source == "failed" else "is not installed"
            return Reason("software", f"{need}; on {device.label} it {state} ({fact.why or fact.source})")
        version = _version(str(fact.value))
        if not self.versions or (version and SpecifierSet(self.versions).contains(version, prereleases=True)):
            return None
        return Reason("software", f"{need}; {device.label} has {fact.value}")


def _version(text: str) -> Version | None:
    """A PEP 440 version, or the release in front of what is none: HIP's is ``7.1.25424-4179531dcd``."""
    from packaging.version import InvalidVersion, Version

    try:
        return Version(text)
    except InvalidVersion:
        release = re.match(r"\d+(\.\d+)*", text)
        return Version(release[0]) if release else None


def _refuse(kind: Kind, need: str, device: Device, name: str) -> Reason:
    # a probe that failed says nothing about the hardware: mending the software may change the answer
    failed = device[name].source == "failed"
    return Reason("software" if failed else kind, f"{need}; {_have(device, name)}")


def vendor(*names: str) -> OneOf:
    """The device is made for one of these programming interfaces: cuda, rocm, cpu."""
    return OneOf("vendor", names)


def arch(*names: str) -> OneOf:
    """The device is exactly one of these architectures."""
    return OneOf("arch", names)


def family(prefix: str) -> Family:
    """The device's architecture is of this family."""
    return Family(prefix)


def feature(name: str) -> Feature:
    """The device has this feature (a fact that is true or false)."""
    if FACTS[_known(name)][0] is not bool:
        raise UnknownName("feature", name, [n for n, (kind, _) in FACTS.items() if kind is bool])
    return Feature(name)


def at_least(name: str, least: float) -> AtLeast:
    """The device has at least this much of something countable."""
    if FACTS[_known(name)][0] not in (int, float):
        raise UnknownName("limit", name, [n for n, (kind, _) in FACTS.items() if kind in (int, float)])
    return AtLeast(name, least)


def library(name: str, versions: str = "") -> Library:
    """A library is installed, in these versions."""
    from packaging.specifiers import InvalidSpecifier, SpecifierSet

    if name not in LIBRARIES:
        raise UnknownName("library", name, LIBRARIES)
    try:
        SpecifierSet(versions)
    except InvalidSpecifier:
        raise HalError(f"library {name}: versions is a range such as >=0.6,<0.8, got {versions!r}") from None
    return Library(name, versions)
