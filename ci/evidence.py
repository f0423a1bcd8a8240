"""Committed reports of other formats as evidence: ``python ci/evidence.py REPORT --date DAY --out FOLDER``.

REPORT is what ``bench/results/verify-*.json`` hold (one device) or ``ci/compiled/triton-*.json`` (a file for
each architecture). Nothing is rewritten. ``--date``: the day of the run, which neither of them states.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from compile_kernels import ARCHS, faults

import hal
from hal.errors import HalError
from hal.evidence import Evidence, Row, merged, write

VERIFY, COMPILED = "hal.verify.report/1", "hal.compiled/1"
LIBRARIES = ("driver", "cuda", "torch", "triton", "fla_core", "flashinfer")
NO_REASON = "the report keeps no reasons"


def of_verify(report: Mapping[str, Any], day: str) -> Evidence:
    """Conformance on a real device, but for what the report says is to be left out."""
    kinds = {"passed": "ran", "failed": "failed", "refused": "refused"}
    rows = [
        Row(r["op"], r["kernel"], kind, r[status], "" if kind == "ran" else NO_REASON)
        for r in report["results"]
        for status, kind in kinds.items()
        if r[status] and f"{r['op']} {r['kernel']}" not in report.get("left_out", {})
    ]
    stack = {name: report[name] for name in LIBRARIES if name in report}
    note = report.get("note", "")
    return Evidence(report["device"], report["arch"], day, stack=stack, rows=merged(rows), note=note)


def of_compiled(table: Mapping[str, Any], day: str) -> list[Evidence]:
    """One file for each architecture of a table; a launch with a fault makes its kernels failed."""
    found = []
    for arch, launches in table["rows"].items():
        rows = compiled_rows(launches.values(), hal.load_device(ARCHS[arch]).value("shared_bytes"))
        found.append(Evidence(ARCHS[arch], arch, day, stack={"triton": table["triton"]}, rows=rows))
    return found


def compiled_rows(launches: Any, shared: int) -> tuple[Row, ...]:
    """A row for each kernel of these launches, and one for its first fault."""
    counts: Counter[tuple[str, str]] = Counter()
    wrong: dict[tuple[str, str], list[str]] = {}
    for launch in launches:
        for name in launch["kernels"]:
            op, kernel = name.split(" ")
            if said := faults(launch, shared):
                wrong.setdefault((op, kernel), []).append(f"{launch['function']} {launch['constants']}: {said[0]}")
            else:
                counts[op, kernel] += 1
    rows = [Row(*key, "compiled", count) for key, count in counts.items()]
    return merged([*rows, *(Row(*key, "failed", len(said), said[0]) for key, said in wrong.items())])


def converted(file: Path, day: str) -> dict[str, Evidence]:
    """What a report says, by the name of the file to write."""
    report = json.loads(file.read_text(encoding="utf-8"))
    match report.get("schema"):
        case "hal.verify.report/1":
            return {f"{report['arch']}.json": of_verify(report, day)}
        case "hal.compiled/1":
            return {f"{e.arch}-triton-{e.stack['triton']}.json": e for e in of_compiled(report, day)}
    raise HalError(f"{file}: schema is {VERIFY} or {COMPILED}, got {report.get('schema')!r}")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path)
    parser.add_argument("--date", required=True, metavar="DAY", help="day of the run, as 2026-01-31")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    args = parser.parse_args(arguments)
    args.out.mkdir(exist_ok=True)
    for name, evidence in converted(args.report, args.date).items():
        write(evidence, args.out / name)
        print(f"{args.out / name}: {len(evidence.rows)} rows")
    return 0


if __name__ == "__main__":
    sys.exit(main())
