"""The workflow is one that GitHub takes, as far as its file shows: keys, needs, expressions, and what its steps run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import matrix
import pytest
from jobs import load

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[1]
FILE = ROOT / ".github" / "workflows" / "ci.yml"
TOP = {"name", "on", "permissions", "env", "defaults", "jobs"}
EVENTS = {"push", "pull_request", "schedule", "workflow_dispatch"}
JOB = {"name", "needs", "if", "runs-on", "container", "outputs", "timeout-minutes", "strategy", "steps"}
STEP = {"id", "if", "name", "env", "with", "uses", "run"}
JOBS, TRITONS = load()
ENTRIES, _ = matrix.matrices(JOBS, TRITONS, {job.arch for job in JOBS.values()})


def parsed(text: str) -> dict[str, Any]:
    found = yaml.safe_load(text)
    found["on"] = found.pop(True)  # YAML 1.1 reads the word so
    return dict(found)


FOUND = parsed(FILE.read_text())


def texts(value: Any, key: str = "") -> Iterator[str]:
    """Every expression in a value; ``if`` is one without braces."""
    if isinstance(value, dict):
        for name, item in value.items():
            yield from texts(item, name)
    elif isinstance(value, list):
        for item in value:
            yield from texts(item)
    elif isinstance(value, str):
        inner = re.findall(r"\$\{\{(.*?)\}\}", value)
        yield from inner if inner or key != "if" else [value]
        if value.count("${{") != len(inner):
            yield f"torn: {value}"


def names(expression: str) -> list[str]:
    """What an expression refers to: dotted names outside of quotes."""
    bare = re.sub(r"'[^']*'", "", expression)
    return re.findall(r"[A-Za-z_][\w-]*(?:\.[\w-]+)+", bare)


def wrong(flow: dict[str, Any]) -> Iterator[str]:
    """What is wrong with a workflow, a sentence each."""
    yield from (f"{key}: no key of a workflow" for key in set(flow) - TOP)
    yield from (f"on.{key}: no event" for key in set(flow["on"]) - EVENTS)
    if flow.get("env", {}).get("HAL_STRICT") != "1":
        yield "env: HAL_STRICT is not 1"
    for name, job in flow["jobs"].items():
        yield from (f"{name}: {problem}" for problem in wrong_job(flow["jobs"], name, job))


def wrong_job(jobs: dict[str, Any], name: str, job: dict[str, Any]) -> Iterator[str]:
    yield from (f"{key}: no key of a job" for key in set(job) - JOB)
    yield from (f"lacks {key}" for key in {"runs-on", "steps", "timeout-minutes"} - set(job) if name != "plan")
    needs = [job["needs"]] if isinstance(job.get("needs"), str) else job.get("needs", [])
    yield from (f"needs {other}, which is no job" for other in needs if other not in jobs)
    ids = {step["id"] for step in job["steps"] if "id" in step}
    for expression in texts(job):
        if expression.startswith("torn: "):
            yield f"an expression is {expression}"
        for word in names(expression):
            if problem := unknown(word, jobs, needs, ids, ENTRIES.get(name, [])):
                yield f"{word}: {problem}"
    for step in job["steps"]:
        yield from (f"{key}: no key of a step" for key in set(step) - STEP)
        if ("uses" in step) == ("run" in step):
            yield f"a step uses or runs: {step}"
        if not re.fullmatch(r"actions/[\w-]+@v\d+", step.get("uses", "actions/x@v1")):
            yield f"uses {step['uses']}, which is not pinned to a version"
        if "HAL_STRICT" in str(step):
            yield "a step changes HAL_STRICT"
        yield from missing(step.get("run", ""))


def unknown(word: str, jobs: dict[str, Any], needs: list[str], ids: set[str], entries: list[dict[str, Any]]) -> str:
    """Why a name in an expression is nothing, or nothing where it is something."""
    match word.split("."):
        case ["needs", job, "outputs", output]:
            if job not in needs:
                return f"the job does not need {job}"
            return "" if output in jobs[job].get("outputs", {}) else f"{job} has no such output"
        case ["steps", step, "outputs", output]:
            return "" if step in ids and output in matrix.OUTPUTS else "no step gives it"
        case ["matrix", key]:
            return "" if entries and all(key in entry for entry in entries) else "not in every entry of the matrix"
        case ["github", *_] | ["vars", "RUNNERS"]:
            return ""
    return "no such context"


def missing(commands: str) -> Iterator[str]:
    """Scripts and targets that commands name and that are not there."""
    for script in re.findall(r"(?<![\w./])(\.?[\w./-]+\.(?:py|sh)|\.ci/\w+)", commands):
        if not (ROOT / script).is_file():
            yield f"runs {script}, which is not there"
    for target in re.findall(r"\bmake ([\w./-]+)", commands):
        if f"\n{target}:" not in (ROOT / "Makefile").read_text():
            yield f"makes {target}, which the Makefile has not"


def test_the_workflow_is_sound() -> None:
    assert list(wrong(FOUND)) == []


def test_every_command_of_a_job_names_what_is_there() -> None:
    for job in JOBS.values():
        for command in (*job.run, *job.full):
            assert not list(missing(command))
            assert re.match(r"(HAL_EVIDENCE=\S+ )?(python|hal|make|\.ci/run)\b", command)


def test_every_matrix_has_its_job_which_ends_at_the_gate() -> None:
    plan = FOUND["jobs"]["plan"]["outputs"]
    assert set(plan) == set(matrix.OUTPUTS) == set(FOUND["jobs"]) - {"plan"}
    for name in matrix.OUTPUTS:
        job = FOUND["jobs"][name]
        assert job["strategy"]["matrix"] == f"${{{{ fromJSON(needs.plan.outputs.{name}) }}}}"
        assert plan[name] == f"${{{{ steps.matrix.outputs.{name} }}}}"
        runs = [step.get("run", "") for step in job["steps"]]
        (gate,) = [at for at, run in enumerate(runs) if "ci/gate.py ${{ matrix.name }} ${{ matrix.reports }}" in run]
        assert runs.index("${{ matrix.run }}") < gate
        assert not {"if", "continue-on-error"} & set(job["steps"][gate])


def test_strangers_code_does_not_run_on_machines_of_ours() -> None:
    own = {name for name, entries in ENTRIES.items() if any("self-hosted" in e["runner"] for e in entries)}
    assert own == {"gpu"}
    assert "head.repo.full_name == github.repository" in FOUND["jobs"]["gpu"]["if"]


BAD = {
    "jobs.host.need": ("plan", "host: need: no key of a job"),
    "jobs.host.needs": (["plan", "plans"], "host: needs plans, which is no job"),
    "jobs.gpu.name": ("${{ matrix.titel }}", "gpu: matrix.titel: not in every entry of the matrix"),
    "jobs.full.if": ("needs.plan.outputs.ful", "full: needs.plan.outputs.ful: plan has no such output"),
    "jobs.plan.outputs.gpu": ("${{ steps.matrix.outputs.cpu }}", "plan: steps.matrix.outputs.cpu: no step gives it"),
    "jobs.gpu.if": ("needs.host.outputs.x", "gpu: needs.host.outputs.x: the job does not need host"),
    "jobs.host.runs-on": ("${{ matrix.runner }", "host: an expression is torn: ${{ matrix.runner }"),
    "jobs.host.steps.0.uses": ("actions/checkout", "host: uses actions/checkout, which is not pinned to a version"),
    "jobs.host.steps.0.run": ("x", "host: a step uses or runs: {'uses': 'actions/checkout@v4', 'run': 'x'}"),
    "jobs.host.steps.3.run": ("python ci/gates.py", "host: runs ci/gates.py, which is not there"),
    "jobs.plan.steps.2.run": ("make tests", "plan: makes tests, which the Makefile has not"),
    "jobs.gpu.steps.3.env": ({"HAL_STRICT": "0"}, "gpu: a step changes HAL_STRICT"),
    "env.HAL_STRICT": ("0", "env: HAL_STRICT is not 1"),
    "on.pull-request": ({}, "on.pull-request: no event"),
    "job": ({}, "job: no key of a workflow"),
}


@pytest.mark.parametrize("at", BAD)
def test_a_workflow_that_is_wrong_is_found_so(at: str) -> None:
    flow, (value, said) = deepcopy(FOUND), BAD[at]
    *path, last = at.split(".")
    place: Any = flow
    for step in path:
        place = place[int(step) if isinstance(place, list) else step]
    place[last] = value
    assert list(wrong(flow)) == [said]
