"""Whether a job exercised what it names: ``python ci/gate.py JOB REPORT... [--since DAY] [--jobs FILE]``.

Reports are evidence files (``hal/evidence.py``). Exit status 1, and a line for each thing that is wrong, where
a named cell has no row of the kind asked, a case or a test failed, anything fell back, a test was skipped
for a reason that the job does not list, or a report is torn, empty, of another job, architecture or
device, or older than ``--since`` (the day before this one). So no job passes by trying the baseline alone.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from datetime import date, timedelta
from fnmatch import fnmatchcase
from pathlib import Path

from jobs import FILE, Cell, Job, JobError, cells, load

from hal.errors import HalError
from hal.evidence import Evidence, Row, read
from hal.registry import Registry


def judged(job: Job, wanted: Sequence[Cell], reports: Iterable[tuple[str, Evidence]], since: date) -> list[str]:
    """What is wrong, a sentence each; nothing where the job passes. ``reports`` are by name."""
    found = list(reports)
    wrong = [problem for name, report in found for problem in _report(job, name, report, since)]
    wrong += [problem for _, report in found for problem in _said(job, report)]
    rows = [row for _, report in found for row in report.rows]
    wrong += [problem for cell in wanted if (problem := _missing(job, cell, rows))]
    if not found:
        wrong.append("there is no report to judge")
    if not wanted:
        wrong.append("the job names no cell")
    if job.tests and not any(report.tests.passed for _, report in found):
        wrong.append("no test passed")
    return wrong


def _report(job: Job, name: str, report: Evidence, since: date) -> Iterator[str]:
    """Whether a report can be the job's."""
    if report.job not in ("", job.name):
        yield f"{name}: is of job {report.job}, not {job.name}"
    if report.arch != job.arch:
        yield f"{name}: is of {report.device} ({report.arch}); the job is for {job.arch}"
    elif job.devices and not any(fnmatchcase(report.device, glob) for glob in job.devices):
        yield f"{name}: is of {report.device}; the job is for {' or '.join(job.devices)}"
    if date.fromisoformat(report.date) < since:
        yield f"{name}: is of {report.date}; only what ran since {since} counts"
    if not report.rows and not report.tests.passed:
        yield f"{name}: is empty"


def _said(job: Job, report: Evidence) -> Iterator[str]:
    """What a report itself says is wrong."""
    for row in report.rows:
        if row.kind == "failed":
            yield f"{row.op} {row.kernel}: failed{f' on {row.on}' if row.on else ''}: {row.why}"
    for fell in report.fell_back:
        yield f"{fell.op} {fell.kernel}: fell back: {fell.why}"
    if report.tests.failed:
        yield f"{report.tests.failed} tests failed"
    for skipped in report.tests.skipped:
        if not any(fnmatchcase(skipped.why, glob) for glob in job.skips):
            yield f"{skipped.test}: skipped, and the job does not list why: {skipped.why}"


def _missing(job: Job, cell: Cell, rows: Iterable[Row]) -> str:
    """Why a cell was not exercised as asked; nothing where it was."""
    mine = [row for row in rows if (row.op, row.kernel) == (cell.op, cell.kernel)]
    # on a GPU what ran on its host's CPU is not what was asked
    here = [row for row in mine if job.arch == "cpu" or not row.on]
    if any(row.kind == cell.kind for row in here):
        return ""
    refused = [f": {row.why}" for row in here if row.kind == "refused"]
    kinds = dict.fromkeys(row.kind + (f" on {row.on}" if row.on else "") for row in mine)
    return f"{cell}: {cell.kind} is asked, there is {', '.join(kinds) or 'nothing'}{next(iter(refused), '')}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", metavar="JOB")
    parser.add_argument("reports", nargs="*", type=Path, metavar="REPORT")
    parser.add_argument("--since", type=date.fromisoformat, default=date.today() - timedelta(days=1), metavar="DAY")
    parser.add_argument("--jobs", type=Path, default=FILE, metavar="FILE", help="other jobs than ci/jobs.toml")
    args = parser.parse_args(arguments)
    jobs, _ = load(args.jobs)
    if args.job not in jobs:
        parser.error(f"unknown job {args.job!r}; known are {', '.join(jobs)}")
    wrong: list[str] = []
    reports: list[tuple[str, Evidence]] = []
    for file in args.reports:
        try:
            reports.append((str(file), read(file)))
        except HalError as error:
            wrong.append(str(error))
    wanted: list[Cell] = []
    try:
        wanted = cells(jobs[args.job], Registry.installed())
    except JobError as error:
        wrong.append(str(error))
    wrong += judged(jobs[args.job], wanted, reports, args.since)
    for problem in dict.fromkeys(wrong):
        print(f"{args.job}: {problem}")
    if wrong:
        print(f"{args.job}: does not pass")
        return 1
    passed = sum(report.tests.passed for _, report in reports)
    print(f"{args.job}: all {len(wanted)} cells were exercised, {passed} tests passed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
