"""The jobs of CI as ``jobs.toml`` names them, and the cells that each must have exercised."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hal.registry import Registry

FILE = Path(__file__).parent / "jobs.toml"
STAGES = ("host", "gpu")


class JobError(Exception):
    """The file of jobs says something that cannot be; the message names the job."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One job: the columns are told at the head of ``jobs.toml``; ``excepted`` is its ``not``."""

    name: str
    stage: str
    arch: str
    runner: tuple[str, ...]
    run: tuple[str, ...]
    reports: tuple[str, ...]
    must: Mapping[str, tuple[str, ...]]
    image: str = ""
    options: str = ""
    python: str = ""
    extras: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    full: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    tests: bool = False
    skips: tuple[str, ...] = ()
    excepted: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Cell:
    """A kernel of an op, and the kind of evidence that it must have."""

    op: str
    kernel: str
    kind: str

    def __str__(self) -> str:
        return f"{self.op} {self.kernel}"


def load(file: Path = FILE) -> tuple[dict[str, Job], tuple[str, ...]]:
    """All jobs by name, and the Tritons of the scheduled ones. JobError names the job and what is wrong."""
    data = tomllib.loads(file.read_text(encoding="utf-8"))
    jobs = {}
    for name, table in data["jobs"].items():
        whole = _whole(name, table, data["kinds"])
        whole["excepted"] = whole.pop("not", {})
        known = {f.name for f in fields(Job)}
        if unknown := sorted(set(whole) - known):
            raise JobError(f"{name}: {unknown[0]}: unknown; known are {', '.join(sorted(known))}")
        try:
            jobs[name] = Job(name=name, **_filled(whole, whole.get("arch", "")))
        except TypeError as error:
            raise JobError(f"{name}: {str(error).partition('() ')[2]}") from None
        if jobs[name].stage not in STAGES:
            raise JobError(f"{name}: stage is {' or '.join(STAGES)}, got {jobs[name].stage!r}")
    return jobs, tuple(data["tritons"])


def _whole(name: str, table: Mapping[str, Any], kinds: Mapping[str, Any]) -> dict[str, Any]:
    """A table with what it is like beneath; ``must`` and ``not`` are joined, all else is replaced."""
    rest = dict(table)
    if not (like := rest.pop("like", "")):
        return rest
    if like not in kinds:
        raise JobError(f"{name}: like {like!r}: there is no such kind")
    whole = _whole(name, kinds[like], kinds)
    for key, value in rest.items():
        whole[key] = {**whole.get(key, {}), **value} if isinstance(value, dict) else value
    return whole


def _filled(value: Any, arch: str) -> Any:
    if isinstance(value, str):
        return value.replace("{arch}", arch)
    if isinstance(value, list):
        return tuple(_filled(item, arch) for item in value)
    return {key: _filled(item, arch) for key, item in value.items()} if isinstance(value, dict) else value


def cells(job: Job, registry: Registry) -> list[Cell]:
    """What a job must have exercised. JobError: a glob that names nothing, or a backend that is broken."""
    from hal.ops import OPS

    if registry.broken:
        raise JobError("; ".join(f"backend {lost.name} is broken: {lost.error}" for lost in registry.broken))
    every = [(title, name) for title, op in OPS.items() for name in registry.names(op)]
    found = {
        cell: None for kind, globs in job.must.items() for glob in globs for cell in _named(job, kind, glob, every)
    }
    left_out = {cell for glob in job.excepted for cell in _left_out(job, glob, found)}
    return [cell for cell in found if cell not in left_out]


def _named(job: Job, kind: str, glob: str, every: list[tuple[str, str]]) -> Iterator[Cell]:
    found = [Cell(op, kernel, kind) for op, kernel in every if fnmatchcase(f"{op} {kernel}", _pair(glob))]
    if not found:
        raise JobError(f"{job.name}: must.{kind}: {glob!r} names no kernel")
    yield from found


def _left_out(job: Job, glob: str, found: Mapping[Cell, None]) -> Iterator[Cell]:
    """Cells by ``Op kernel``, or ``kind Op kernel`` where one is meant in one kind alone."""
    left = [cell for cell in found if any(fnmatchcase(text, glob) for text in (str(cell), f"{cell.kind} {cell}"))]
    if not left:
        raise JobError(f"{job.name}: not: {glob!r} names none of its cells")
    yield from left


def _pair(glob: str) -> str:
    return glob if " " in glob else f"* {glob}"
