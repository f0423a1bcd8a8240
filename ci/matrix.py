"""The jobs as matrices of GitHub Actions: ``python ci/matrix.py [--runners "sm_90 gfx942"] [--jobs FILE]``.

Writes what ``$GITHUB_OUTPUT`` takes, a line for each matrix, ``NAME={"include": [...]}``, or empty where it has no
job: ``host``, ``gpu`` (those for whose architecture a runner is there; the others are told on stderr, for a job
that did not run proves nothing) and ``full``, every job with scheduled commands on every Triton.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from jobs import FILE, Job, load

OUTPUTS = ("host", "gpu", "full")


def entry(job: Job, triton: str = "") -> dict[str, Any]:
    """What the workflow reads of a job."""
    after = [f"python -m pip install --no-deps triton=={triton}"] if triton else []
    wanted = [*(f'"{package}"' for package in job.packages), f'-e ".[{",".join(job.extras)}]"']
    install = [f"python -m pip install {' '.join(wanted)}", *after] if job.extras else []
    return {
        "name": job.name,
        "title": f"{job.name} on Triton {triton}" if triton else job.name,
        "file": f"{job.name}-triton-{triton}" if triton else job.name,
        "runner": list(job.runner),
        "image": job.image,
        "options": job.options,
        "python": job.python,
        "install": "\n".join(install),
        "run": "\n".join(job.full if triton else job.run),
        "reports": " ".join(job.reports),
    }


def matrices(
    jobs: Mapping[str, Job], tritons: Iterable[str], runners: Iterable[str]
) -> tuple[dict[str, list[dict[str, Any]]], list[str]]:
    """Entries by matrix, and the names of jobs that no runner takes."""
    there = set(runners)
    gpu = [job for job in jobs.values() if job.stage == "gpu"]
    found = {
        "host": [entry(job) for job in jobs.values() if job.stage == "host"],
        "gpu": [entry(job) for job in gpu if job.arch in there],
        "full": [entry(job, triton) for job in jobs.values() if job.full for triton in tritons],
    }
    return found, [job.name for job in gpu if job.arch not in there]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runners", default="", help="architectures that runners are there for")
    parser.add_argument("--jobs", type=Path, default=FILE, metavar="FILE", help="other jobs than ci/jobs.toml")
    args = parser.parse_args(arguments)
    runners = args.runners.split()
    jobs, tritons = load(args.jobs)
    known = {job.arch for job in jobs.values() if job.stage == "gpu"}
    if unknown := sorted(set(runners) - known):
        parser.error(f"--runners: {unknown[0]}: no job is for it; known are {', '.join(sorted(known))}")
    found, idle = matrices(jobs, tritons, runners)
    for name in OUTPUTS:
        print(f"{name}={json.dumps({'include': found[name]}) if found[name] else ''}")
    for name in idle:
        print(f"not run, for no runner is there: {name}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
