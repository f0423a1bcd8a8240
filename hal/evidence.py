"""What was seen to run, and how far: one file format, which reporters write and the gate and ``hal matrix`` read.

A file tells of one device: for each op and kernel the kind of evidence and how many cases gave it, what
fell back, and what the tests said. Kinds, from strongest to weakest: ``ran`` on the device, ``emulated``
(its adapter, over a double of the library), ``interpreted`` (its source, by Triton's interpreter),
``compiled`` for the architecture, ``resolved`` only. ``refused`` and ``failed`` are no evidence, and say why.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from hal.errors import HalError
from hal.schema import read_object

if TYPE_CHECKING:
    from hal.conformance import Verdict
    from hal.device import Device

SCHEMA = "hal.evidence/1"
STRENGTH = ("ran", "emulated", "interpreted", "compiled", "resolved")
REASONED = ("refused", "failed")
KINDS = (*STRENGTH, *REASONED)


@dataclass(frozen=True)
class Row:
    """How far one kernel of one op was seen: ``cases`` of this kind (launches, where compiled).

    ``on``: the profile by whose facts it was chosen, where that is not the file's device; so it
    is where a double or an interpreter stands in for a GPU.
    """

    op: str
    kernel: str
    kind: str
    cases: int
    why: str = ""
    on: str = ""


@dataclass(frozen=True)
class FellBack:
    """A kernel that ran because software of a better one was missing."""

    op: str
    kernel: str
    why: str


@dataclass(frozen=True)
class Skipped:
    """A test that did not run, and its reason."""

    test: str
    why: str


@dataclass(frozen=True)
class Suite:
    """What a run of the tests said."""

    passed: int = 0
    failed: int = 0
    skipped: tuple[Skipped, ...] = ()


@dataclass(frozen=True)
class Evidence:
    """One file. ``device``: a profile, or what the driver calls a real one; ``arch`` is ``cpu`` on any CPU.

    ``date``: day of the run, ISO; ``note``: the conditions, where a reader must know them.
    """

    device: str
    arch: str
    date: str
    job: str = ""
    stack: Mapping[str, str] = field(default_factory=dict)
    rows: tuple[Row, ...] = ()
    fell_back: tuple[FellBack, ...] = ()
    tests: Suite = Suite()
    note: str = ""


class OfKind(Protocol):
    """What has a kind of evidence."""

    @property
    def kind(self) -> str: ...


K = TypeVar("K", bound=OfKind)


def strongest(rows: Iterable[K]) -> K | None:
    """The row of the strongest kind, the first of several; None where nothing was seen."""
    seen = [row for row in rows if row.kind in STRENGTH]
    return min(seen, key=lambda row: STRENGTH.index(row.kind), default=None)


def rows_of(verdicts: Iterable[Verdict], kind: str = "ran", on: str = "") -> tuple[Row, ...]:
    """What conformance says of each kernel: passed cases as ``kind``, failed ones, and refusals where nothing else is.

    That a kernel refuses some cases of its op is no news; that it refuses all of them is.
    """
    found: dict[tuple[str, str], dict[str, list[str]]] = {}
    for v in verdicts:
        found.setdefault((v.op, v.kernel), {}).setdefault(v.status, []).append(v.detail)
    rows = []
    for (op, kernel), said in found.items():
        if passed := said.get("passed"):
            rows.append(Row(op, kernel, kind, len(passed), on=on))
        if failed := said.get("failed"):
            rows.append(Row(op, kernel, "failed", len(failed), failed[0], on))
        if set(said) == {"refused"}:
            rows.append(Row(op, kernel, "refused", len(said["refused"]), said["refused"][0], on))
    return tuple(rows)


def merged(rows: Iterable[Row]) -> tuple[Row, ...]:
    """One row for each op, kernel, kind and profile, cases added up, in order of names; refused only where alone."""
    found: dict[tuple[str, str, str, str], Row] = {}
    for row in rows:
        key = (row.op, row.kernel, row.on, row.kind)
        found[key] = replace(found[key], cases=found[key].cases + row.cases) if key in found else row
    other = {key[:3] for key in found if key[3] != "refused"}
    kept = {key: row for key, row in found.items() if key[3] != "refused" or key[:3] not in other}
    return tuple(kept[key] for key in sorted(kept))


def arch_of(device: Device) -> str:
    """A device's architecture as files have it: that of any CPU is ``cpu``."""
    return "cpu" if device.value("vendor") == "cpu" else str(device.value("arch"))


def evidence_of(
    device: Device, rows: tuple[Row, ...], fell_back: tuple[FellBack, ...], tests: Suite | None = None, note: str = ""
) -> Evidence:
    """A file of today about a device that is here, with the versions of its libraries."""
    from hal.device import LIBRARIES

    stack = {name: str(value) for name, value in device.known().items() if name in LIBRARIES}
    name, day = str(device.value("name") or device.label), date.today().isoformat()
    return Evidence(name, arch_of(device), day, "", stack, rows, fell_back, tests or Suite(), note)


def write(evidence: Evidence, file: Path) -> None:
    """A row a line, so that a change shows as what it is. HalError where the file cannot be written."""
    given = {"schema": SCHEMA, **asdict(evidence)}
    parts = [f'"{name}": {_lines(value)}' for name, value in given.items()]
    text = "{" + ",\n ".join(parts) + "}\n"
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise HalError(f"{file}: cannot be written: {error}") from None


def _lines(value: Any) -> str:
    if isinstance(value, dict) and "skipped" in value:
        rest = {name: v for name, v in value.items() if name != "skipped"}
        return f'{json.dumps(rest)[:-1]}, "skipped": {_lines(value["skipped"])}}}'
    if isinstance(value, (list, tuple)) and value:
        return "[\n  " + ",\n  ".join(json.dumps({k: v for k, v in row.items() if v != ""}) for row in value) + "\n ]"
    return json.dumps(value)


def read(file: Path) -> Evidence:
    """A file as it was written. HalError names the file, the entry, what is expected there and what it has."""
    data = read_object(file, SCHEMA)
    try:
        return _evidence({name: value for name, value in data.items() if name != "schema"})
    except HalError as error:
        raise HalError(f"{file}: {error}") from None


def _evidence(data: dict[str, Any]) -> Evidence:
    tests = data.get("tests", {})
    if not isinstance(tests, dict):
        raise HalError(f"tests: expected an object, got {tests!r}")
    lists = {
        "rows": tuple(_each(Row, data, "rows")),
        "fell_back": tuple(_each(FellBack, data, "fell_back")),
    }
    skipped = tuple(_each(Skipped, tests, "skipped", "tests."))
    suite = _made(Suite, {**tests, "skipped": skipped}, "tests")
    found: Evidence = _made(Evidence, {**data, **lists, "tests": suite}, "")
    try:
        date.fromisoformat(found.date)
    except ValueError:
        raise HalError(f"date: expected a day as 2026-01-31, got {found.date!r}") from None
    for i, row in enumerate(found.rows):
        if row.kind not in KINDS:
            raise HalError(f"rows[{i}].kind: expected {' | '.join(KINDS)}, got {row.kind!r}")
        if row.cases < 1:
            raise HalError(f"rows[{i}].cases: expected 1 or more, got {row.cases}")
        if row.kind in REASONED and not row.why:
            raise HalError(f"rows[{i}].why: a row that is {row.kind} says why")
    return found


def _each(kind: type[Any], data: Mapping[str, Any], name: str, before: str = "") -> Iterator[Any]:
    entries = data.get(name, [])
    if not isinstance(entries, list):
        raise HalError(f"{before}{name}: expected a list, got {entries!r}")
    for i, entry in enumerate(entries):
        if not isinstance(entry, dict):
            raise HalError(f"{before}{name}[{i}]: expected an object, got {entry!r}")
        yield _made(kind, entry, f"{before}{name}[{i}]")


TYPES = {"str": str, "int": int, "Mapping[str, str]": dict}


def _made(kind: type[Any], data: Mapping[str, Any], at: str) -> Any:
    """The dataclass of an object whose entries are its fields, each of its type."""
    dot = f"{at}." if at else ""
    known = {f.name: f for f in fields(kind)}
    if unknown := sorted(set(data) - set(known)):
        raise HalError(f"{dot}{unknown[0]}: unknown; known are {', '.join(known)}")
    for name, value in data.items():
        wanted = TYPES.get(str(known[name].type))
        if wanted and (not isinstance(value, wanted) or isinstance(value, bool)):
            raise HalError(f"{dot}{name}: expected {wanted.__name__}, got {value!r}")
    try:
        return kind(**data)
    except TypeError as error:
        raise HalError(f"{at or 'the file'}: {str(error).partition('() ')[2]}") from None
