"""The device that is here: what the backends' probes answer, merged. Never raises, never hides.

Nothing is imported to learn whether it is installed: a vendor library may fail at import in any
way, or start a driver. Versions come from the metadata of distributions, torch's build from the
text of its ``version.py``, and what only torch can tell from a child process.
"""

from __future__ import annotations

import ast
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from hal.backend import Backend, Broken, discover, load_target, said
from hal.device import FACTS, HARDWARE, LIBRARIES, SOURCES, Device, Fact, fits

T = TypeVar("T")
UNASKED = Fact(None, "probed", "no probe answers it")
_MARK = "hal facts: "


def attempt(work: Callable[[], T]) -> tuple[T | None, str]:
    """The result of ``work`` and no text, or nothing and the exception as text, whatever its type."""
    try:
        return work(), ""
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 - vendor code may even leave by SystemExit
        return None, said(error)


def fact(work: Callable[[], Any], why: str = "") -> Fact:
    """A probed fact from one question; failed, with the exception's text, where asking raises."""
    value, error = attempt(work)
    return Fact(None, "failed", error) if error else Fact(value, "probed", why)


def where(module: str) -> Path | None:
    """The file of a top-level module, found without importing it; ``None`` where there is none.

    A folder without ``__init__.py`` is no module: any folder of that name would look like one.
    """
    loaded = sys.modules.get(module)
    spec = getattr(loaded, "__spec__", None) if loaded else find_spec(module)
    origin = spec.origin if spec else getattr(loaded, "__file__", None)
    return Path(origin) if origin else None


def library(*distributions: str, module: str = "") -> Fact:
    """The version of a library by its distribution's metadata, never by importing it.

    The first distribution that is installed answers. ``module`` is what one would import: found
    though no distribution is, the library is broken, not absent.
    """
    for name in distributions:
        version, error = attempt(lambda name=name: _version(name))  # type: ignore[misc]
        if error:
            return Fact(None, "failed", f"metadata of {name}: {error}")
        if version is not None:
            return Fact(version, "probed", f"distribution {name}")
    wanted = " or ".join(distributions)
    found, error = attempt(lambda: where(module) if module else None)
    if error:
        return Fact(None, "failed", f"no distribution {wanted}; looking for module {module}: {error}")
    if found or sys.modules.get(module):
        at = found or "loaded"
        return Fact(None, "failed", f"module {module} is there ({at}), but no distribution {wanted}")
    return Fact(None, "probed", f"no distribution {wanted}")


def _version(distribution: str) -> str | None:
    try:
        version = metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
    if not isinstance(version, str):
        raise ValueError("it states no version")
    return version


def built_with(name: str) -> Fact:
    """The version of ``cuda`` or ``hip`` that torch is built with, read from its ``version.py``."""
    found, error = attempt(lambda: where("torch"))
    if error:
        return Fact(None, "failed", f"torch: {error}")
    if found is None:
        return Fact(None, "probed", "torch is not installed")
    values, error = attempt(lambda: _constants(found.parent / "version.py"))
    if values is None:
        return Fact(None, "failed", f"torch/version.py: {error}")
    if values.get(name) is None:
        return Fact(None, "probed", f"torch {values.get('__version__', '')} is built without {name}")
    return Fact(str(values[name]), "probed", "torch/version.py")


def _constants(path: Path) -> dict[str, Any]:
    """The names that a source file assigns plain constants to."""
    found: dict[str, Any] = {}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(node.value, ast.Constant):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {t.id: node.value.value for t in targets if isinstance(t, ast.Name)}
    return found


def ask_child(module: str, timeout: float = 120.0) -> dict[str, Fact]:
    """The facts that ``python -m module`` prints (see `tell`), asked in a child process.

    So torch is not imported here, and no driver and no context starts here. The child sees this
    process's environment and module path. Errors: RuntimeError with the child's last words,
    subprocess.TimeoutExpired after ``timeout`` seconds.
    """
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    done = subprocess.run(
        [sys.executable, "-P", "-m", module],
        env={**os.environ, "PYTHONPATH": path},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=timeout,
        check=False,
    )
    if done.returncode != 0:
        words = done.stderr.strip().splitlines() or ["nothing said"]
        raise RuntimeError(f"python -m {module} ended with {done.returncode}: {words[-1]}")
    # libraries may have printed before it, and may print while they end
    told = [line for line in done.stdout.splitlines() if line.startswith(_MARK)]
    if not told:
        raise RuntimeError(f"python -m {module} printed no facts")
    return {name: Fact(*entry) for name, entry in json.loads(told[-1].removeprefix(_MARK)).items()}


def tell(facts: Mapping[str, Fact]) -> None:
    """Print facts for `ask_child`, on a line of their own."""
    print(f"\n{_MARK}" + json.dumps({name: [f.value, f.source, f.why] for name, f in facts.items()}))


@dataclass(frozen=True)
class _Answer:
    name: str
    facts: Mapping[str, Fact]
    problems: tuple[str, ...] = ()

    @property
    def vendor(self) -> Fact:
        return self.facts.get("vendor", Fact(None, "probed", "its probe names no vendor"))


def probe(backends: Sequence[Backend] | None = None, broken: Sequence[Broken] = ()) -> Device:
    """The device that is here, as the backends' probes see it, over the libraries installed.

    The first accelerator in the order of ``backends`` (by default all that are installed) comes
    before the CPU. Why the others are absent or broken stands in the ``vendor`` fact, which is
    ``failed`` where a broken probe or backend may have hidden an accelerator.
    """
    if backends is None:
        found, error = attempt(discover)
        backends, lost = found or ([], [Broken("hal.backends", error)])
        broken = [*broken, *lost]
    answers = [_ask(backend) for backend in backends if backend.probe]
    here = [a for a in answers if a.vendor.value is not None]
    winner = min(here, key=lambda a: a.vendor.value == "cpu", default=None)
    others = [a for a in answers if a is not winner]
    ordered = [winner, *others] if winner else others
    facts = {name: (winner.facts if winner else {}).get(name, UNASKED) for name in HARDWARE}
    facts["vendor"] = _vendor(winner, others, broken)
    general = _general()
    for name in LIBRARIES:
        facts[name] = _best([a.facts[name] for a in [*ordered, general] if name in a.facts])
    return Device("here", "installed", facts)


def _ask(backend: Backend) -> _Answer:
    answer, error = attempt(lambda: _sound(backend.name, load_target(str(backend.probe))()))
    if answer is None:
        return _Answer(backend.name, {"vendor": Fact(None, "failed", f"its probe failed: {error}")})
    return answer


def _sound(name: str, given: Any) -> _Answer:
    """An answer of which every fact fits the closed list; what does not fit becomes text."""
    if not isinstance(given, Mapping):
        raise TypeError(f"a probe answers facts by name, got {given!r}")
    facts: dict[str, Fact] = {}
    for key in FACTS:
        if key in given:
            wrong = _misfit(key, given[key])
            facts[key] = Fact(None, "failed", f"{name} answers {wrong}") if wrong else given[key]
    problems = [f"answers an unknown fact {key!r}" for key in given if key not in FACTS]
    return _Answer(name, facts, tuple(problems))


def _misfit(key: str, answered: Any) -> str:
    """What is wrong with an answered fact; empty where nothing is."""
    if not isinstance(answered, Fact):
        return f"{answered!r}, which is no Fact"
    if not fits(key, answered.value):
        return f"{answered.value!r}, not {FACTS[key][0].__name__}"
    sound = answered.source in SOURCES and isinstance(answered.why, str)
    return "" if sound else f"{answered!r}, whose source or text is none"


def _vendor(winner: _Answer | None, others: Sequence[_Answer], broken: Sequence[Broken]) -> Fact:
    """The winner's vendor, with the reason why each other vendor is not the one."""
    reasons = [winner.vendor.why] if winner else []
    for answer in others:
        if answer.vendor.value is None:
            reasons.append(f"{answer.name}: {answer.vendor.why}")
        elif answer.vendor.value != "cpu":
            reasons.append(f"{answer.name}: a device is here, but {winner and winner.name} comes first")
    reasons += [f"{a.name}: {text}" for a in [*([winner] if winner else []), *others] for text in a.problems]
    reasons += [f"{b.name}: {b.error}" for b in broken]
    value = winner.vendor.value if winner else None
    unheard = any(b.whole for b in broken) or any(a.vendor.source == "failed" for a in others)
    hidden = value in (None, "cpu") and unheard
    return Fact(value, "failed" if hidden else "probed", "; ".join(r for r in reasons if r))


def _general() -> _Answer:
    """The libraries that no vendor owns."""
    facts = {
        "python": fact(platform.python_version, "platform"),
        "torch": library("torch", module="torch"),
        "triton": library("triton", "triton-rocm", "pytorch-triton-rocm", "pytorch-triton", module="triton"),
        "fla_core": library("fla-core", module="fla"),
    }
    return _Answer("hal", facts)


def _best(facts: Sequence[Fact]) -> Fact:
    """The first that has a value, else the first that failed, else the first."""
    return min(facts, key=lambda f: (f.value is None, f.source != "failed"), default=UNASKED)
