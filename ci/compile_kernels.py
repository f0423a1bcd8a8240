"""Compile the portable kernels for chips that are not here, and judge what the compiler made.

``python ci/compile_kernels.py [--all | --new] [--arch gfx942 ...] [--jobs 2] [--table FILE] [--write]
[--evidence FILE]``

Without ``--all``: the first settings of each kernel on each chip, and whatever the committed table does
not hold as it is now (a row is known by a hash of its sources and arguments). Each compilation runs in
a child process; a line with "error:" on its stderr fails even where an artifact came out. Exit status 1
where anything fails. The whole product on each Triton, ``--all --write``, is a job of its own; what it
changes in the committed tables is a change to look at. ``--evidence`` tells of one chip what was compiled now.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from datetime import date
from importlib import import_module
from pathlib import Path
from queue import SimpleQueue
from typing import Any

ARCHS = {
    "gfx942": "mi300x", "gfx950": "mi355x", "gfx1201": "rx-9070",
    "sm_90": "h200", "sm_100": "b200", "sm_120": "rtx-pro-6000",
}  # fmt: skip
HERE = Path(__file__).parent
SCHEMA = "hal.compiled/1"
# what the assembler writes of an AMD kernel, as it stands there; what is zero is left out of a row
AMD = (
    "vgpr_count", "agpr_count", "vgpr_spill_count", "sgpr_count", "sgpr_spill_count", "private_segment_fixed_size",
)  # fmt: skip
MATRIX = re.compile(r"\bv_(mfma|wmma|swmmac|smfmac)")


@dataclass
class Job:
    """One launch for one chip, with the kernels that make it."""

    arch: str
    launch: Any
    key: str
    first: bool = False
    kernels: set[str] = field(default_factory=set)


def jobs(arch: str) -> list[Job]:
    """Every launch that the settings on a chip make, once."""
    from launches import found

    import hal

    made: dict[str, Job] = {}
    for entry in found(hal.load_device(ARCHS[arch])):
        for launch in entry.launches:
            job = made.setdefault(launch.key, Job(arch, launch, digest(launch)))
            job.first |= entry.first
            job.kernels.add(entry.kernel)
    return list(made.values())


def digest(launch: Any) -> str:
    """A hash of the sources that a launch is compiled from, and of its arguments."""
    function = getattr(import_module(launch.module), launch.function)
    text = "\n".join([launch.key, *sorted(_sources(function, {}).values())])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _sources(function: Any, known: dict[str, str]) -> dict[str, str]:
    """Source of a Triton function, of all that it calls, and the constants that it reads."""
    name = f"{function.fn.__module__}.{function.fn.__name__}"
    if name in known:
        return known
    known[name] = function.src
    for used in function.fn.__code__.co_names:
        value = function.fn.__globals__.get(used)
        if hasattr(value, "src") and hasattr(value, "fn") and not value.fn.__module__.startswith("triton."):
            _sources(value, known)
        elif isinstance(getattr(value, "value", value), (int, float, str)):
            known[f"{name} {used}"] = f"{used} = {getattr(value, 'value', value)!r}"
    return known


def figures(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Compile one launch here; what the compiler says of it. Runs in a child process."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = getattr(import_module(asked["module"]), asked["function"])
    arch = asked["arch"]
    amd = arch.startswith("gfx")
    target = GPUTarget("hip", arch, asked["wave"]) if amd else GPUTarget("cuda", int(arch[3:]), 32)
    names = list(asked["signature"])
    attrs = {(names.index(name),): [["tt.divisibility", 16]] for name in asked["aligned"]}
    source = ASTSource(fn=function, signature=asked["signature"], constexprs=asked["constants"], attrs=attrs)
    done = triton.compile(source, target=target, options=asked["options"])
    return {"shared": int(done.metadata.shared)} | (_amd(done.asm["amdgcn"]) if amd else _nvidia(done.asm["cubin"]))


def _amd(text: str) -> dict[str, Any]:
    stated = {name: re.search(rf"\.{name}:\s*(\d+)", text) for name in AMD}
    counts = {name: int(found[1]) for name, found in stated.items() if found}
    found = {name: count for name, count in counts.items() if count or name == "vgpr_count"}
    if occupancy := re.search(r"; Occupancy:\s*(\d+)", text):
        found["waves_per_simd"] = int(occupancy[1])
    return found | ({"matrix": True} if MATRIX.search(text) else {})


def _nvidia(cubin: bytes) -> dict[str, Any]:
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        said = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    usage = dict(re.findall(r"\b(REG|STACK|LOCAL):(\d+)", said.stdout))
    found = {"registers": int(usage["REG"]), "stack": int(usage["STACK"]), "local": int(usage.get("LOCAL", 0))}
    return {name: count for name, count in found.items() if count}


def faults(row: Mapping[str, Any], shared_bytes: int) -> list[str]:
    """What is wrong with what the compiler made of one launch."""
    found = []
    if row.get("error"):
        return [str(row["error"])]
    if row["shared"] > shared_bytes:
        found.append(f"asks for {row['shared']} bytes of shared memory; the chip has {shared_bytes}")
    if row.get("vgpr_spill_count"):
        found.append(f"spills {row['vgpr_spill_count']} vector registers")
    return found


def worker() -> None:
    """Compile what stdin asks for, a line each, and answer on stdout; for a process of its own."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        with tempfile.TemporaryFile("w+") as said:
            kept = os.dup(2)
            os.dup2(said.fileno(), 2)
            try:
                answer = figures(json.loads(line))
            except Exception as error:  # noqa: BLE001 - whatever the compiler raises is its answer
                answer = {"error": f"{type(error).__name__}: {str(error)[-600:]}"}
            finally:
                sys.stderr.flush()
                os.dup2(kept, 2)
                os.close(kept)
            said.seek(0)
            wrong = [text.strip() for text in said if "error:" in text]
        if wrong and "error" not in answer:
            answer = {"error": f"printed {wrong[0][:600]}"}
        print(json.dumps(answer), file=answers, flush=True)


class Child:
    """A process that compiles; begun again where the compiler took it down."""

    def __init__(self, cache: str) -> None:
        self.cache = cache
        self.process: subprocess.Popen[str] | None = None

    def ask(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        if self.process is None or self.process.poll() is not None:
            env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TRITON_CACHE_DIR": self.cache}
            command = [sys.executable, __file__, "--worker"]
            self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
        assert self.process.stdin
        assert self.process.stdout
        try:
            self.process.stdin.write(json.dumps(asked) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if line:
            return dict(json.loads(line))
        return {"error": f"the compiler ended its process with status {self.process.wait()}"}

    def close(self) -> None:
        if self.process and self.process.stdin:
            self.process.stdin.close()
            self.process.wait()


def compile_all(asked: Iterable[Job], count: int) -> dict[tuple[str, str], dict[str, Any]]:
    """Rows of the jobs by arch and key, from so many processes."""
    import hal

    waves = {arch: hal.load_device(device).value("wave_size") for arch, device in ARCHS.items()}
    with tempfile.TemporaryDirectory() as cache, ThreadPoolExecutor(count) as pool:
        children: SimpleQueue[Child] = SimpleQueue()
        every = [Child(f"{cache}/{n}") for n in range(count)]
        for child in every:
            children.put(child)

        def one(job: Job) -> dict[str, Any]:
            child = children.get()
            try:
                answer = child.ask({**asdict(job.launch), "arch": job.arch, "wave": waves[job.arch]})
            finally:
                children.put(child)
            return {**described(job), **answer}

        asked = list(asked)
        found = {(job.arch, job.key): row for job, row in zip(asked, pool.map(one, asked), strict=True)}
        for child in every:
            child.close()
    return found


def described(job: Job) -> dict[str, Any]:
    """A row's left side: which function, for which kernels, with which constants."""
    constants = {**job.launch.constants, **job.launch.options}
    return {
        "function": job.launch.function,
        "kernels": sorted(job.kernels),
        "constants": " ".join(f"{name}={value}" for name, value in constants.items()),
    }


def table_file() -> Path:
    """The committed table of this Triton."""
    import triton

    return HERE / "compiled" / f"triton-{'.'.join(triton.__version__.split('.')[:2])}.json"


def read(file: Path) -> dict[str, dict[str, Any]]:
    """Rows of a table by arch and key; none where there is no file."""
    return dict(json.loads(file.read_text())["rows"]) if file.exists() else {}


def write(file: Path, rows: Mapping[str, Mapping[str, Any]]) -> None:
    """A row a line, so that a change shows as what it is."""
    import triton

    file.parent.mkdir(exist_ok=True)
    lines = [f'{{"schema": "{SCHEMA}", "triton": "{triton.__version__}", "rows": {{']
    for a, arch in enumerate(rows):
        lines.append(f' "{arch}": {{')
        ordered = sorted(rows[arch].items(), key=lambda row: (row[1]["function"], row[1]["constants"], row[0]))
        body = [f'  "{key}": {json.dumps(row)}' for key, row in ordered]
        lines.append(",\n".join(body))
        lines.append(" }," if a < len(rows) - 1 else " }")
    file.write_text("\n".join([*lines, "}}"]) + "\n")


def main(arguments: list[str] | None = None) -> int:
    import hal

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="every setting, known or not")
    parser.add_argument("--new", action="store_true", help="only what the table does not hold")
    parser.add_argument("--arch", action="append", choices=ARCHS, help="only these chips")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes at once")
    parser.add_argument("--table", type=Path, default=table_file())
    parser.add_argument("--write", action="store_true", help="write the table")
    parser.add_argument("--evidence", type=Path, metavar="FILE", help="write what was compiled; with one --arch")
    args = parser.parse_args(arguments)
    if args.evidence and len(args.arch or ()) != 1:
        parser.error("--evidence: an evidence file tells of one chip; give one --arch")
    rows, status = read(args.table), 0
    for arch in args.arch or ARCHS:
        shared = hal.load_device(ARCHS[arch]).value("shared_bytes")
        wanted = jobs(arch)
        known = rows.get(arch, {})
        missing = [job for job in wanted if job.key not in known]
        chosen = [job for job in wanted if args.all or (job.first and not args.new) or job.key not in known]
        made = {key: row for (_, key), row in compile_all(chosen, args.jobs).items()}
        print(f"{arch}: {len(wanted)} launches, {len(made)} compiled, {len(missing)} not in the table")
        for key, row in made.items():
            for fault in faults(row, shared):
                status = 1
                print(f"  {row['function']} ({', '.join(row['kernels'])}): {fault}\n    {row['constants']} [{key}]")
        rows[arch] = {job.key: made[job.key] if job.key in made else known[job.key] for job in wanted}
        if args.write:
            write(args.table, rows)
        if args.evidence:
            _tell(arch, made, args.evidence)
    return status


def _tell(arch: str, made: Mapping[str, Any], file: Path) -> None:
    import triton
    from evidence import of_compiled

    from hal.evidence import write

    (found,) = of_compiled({"triton": triton.__version__, "rows": {arch: made}}, date.today().isoformat())
    file.parent.mkdir(exist_ok=True)
    write(found, file)


if __name__ == "__main__":
    sys.path.insert(0, str(HERE))
    if "--worker" in sys.argv:
        worker()
    else:
        sys.exit(main())
