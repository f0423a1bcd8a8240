"""What may know what: models -> hal <- backends; declarations need no tensor library; hal names no vendor."""

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BACKENDS = [path for path in sorted((ROOT / "backends").glob("*/hal_*")) if path.is_dir()]
CHILD = """
import json, sys
for name in ("torch", "triton", "aiter", "flashinfer", "cuda"):
    sys.modules[name] = None
import hal
light = sorted(sys.modules)
import hal.ops
from hal.device import profiles
registry, unresolved = hal.Registry.installed(), []
for profile in profiles():
    resolver = hal.Resolver(registry, hal.load_device(profile))
    for op in hal.ops.OPS.values():
        try:
            resolver.resolve((op.cases()[0].op,))
        except hal.HalError:
            unresolved.append(op.title())
print(json.dumps({
    "light": light,
    "broken": [(b.name, b.error) for b in registry.broken],
    "backends": [b.name for b in registry.backends],
    "declared": [m for b in registry.backends for m in b.declarations if m not in sys.modules],
    "unresolved": sorted(set(unresolved)),
    "loaded": sorted(n for n in sys.modules if n.startswith("hal_") and ".code" in n),
}))
"""


@pytest.fixture(scope="module")
def bare() -> dict[str, list]:
    """What an interpreter without tensor and vendor libraries can do."""
    done = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_importing_hal_imports_nothing_heavy(bare) -> None:
    heavy = re.compile(r"(torch|triton|rich|numpy|packaging|hal\.(ops|cli|runtime)|hal_\w+)(\.|$)")
    assert [name for name in bare["light"] if heavy.match(name) and name not in ("torch", "triton")] == []


def test_every_declaration_is_imported_without_tensor_and_vendor_libraries(bare) -> None:
    assert bare["broken"] == []
    assert bare["declared"] == []
    assert {"composed", *(path.name.removeprefix("hal_") for path in BACKENDS)} <= set(bare["backends"])


def test_every_op_that_has_a_kernel_resolves_without_a_tensor_library(bare) -> None:
    assert bare["unresolved"] == []


def test_resolving_imports_no_code_of_kernels(bare) -> None:
    assert bare["loaded"] == []


VENDOR = re.compile(r"cuda|rocm|\bhip\b|nvidia|\bamd\b|aiter|flashinfer|sm_\d|gfx\d", re.IGNORECASE)
# outside docstrings and comments, which show examples
ALLOWED = {
    # the closed list of facts, each with what it is
    "device.py": {"cuda", "rocm", "hip", "nvidia", "amd", "flashinfer", "aiter", "sm_9", "gfx9"},
    "probing.py": {"rocm"},  # names under which a library is distributed
}


def sources(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.py"))


def code(path: Path) -> str:
    """The code without docstrings and comments."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        first = body[0] if isinstance(body, list) and body else None
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
            first.value.value = ...
    return ast.unparse(tree)


@pytest.mark.parametrize("path", sources(ROOT / "models"), ids=lambda p: str(p.relative_to(ROOT / "models")))
def test_a_model_names_no_vendor_and_no_arch(path: Path) -> None:
    assert VENDOR.findall(path.read_text()) == []


@pytest.mark.parametrize("path", sources(ROOT / "hal"), ids=lambda p: str(p.relative_to(ROOT / "hal")))
def test_hal_names_vendors_only_where_facts_are_listed(path: Path) -> None:
    allowed = ALLOWED.get(str(path.relative_to(ROOT / "hal")), set())
    assert {name.lower() for name in VENDOR.findall(code(path))} <= allowed


@pytest.mark.parametrize("name", ALLOWED)
def test_what_is_allowed_is_needed(name: str) -> None:
    assert {word.lower() for word in VENDOR.findall(code(ROOT / "hal" / name))} == ALLOWED[name]


def imported(path: Path) -> Iterator[str]:
    """Top names of packages that a file imports or names as ``module:attribute`` to load."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from re.findall(r"^(hal_\w+)[.:]", node.value)


NAMES = {path.name for path in BACKENDS} | {"hal_models", "models", "backends"}


def test_hal_imports_no_backend_and_no_model() -> None:
    assert {name for path in sources(ROOT / "hal") for name in imported(path)} & NAMES == set()


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda p: p.name)
def test_a_backend_imports_no_model_and_no_other_backend(backend: Path) -> None:
    own = {backend.name} | ({"hal_triton"} if backend.name in ("hal_cuda", "hal_rocm") else set())
    assert {name for path in sources(backend) for name in imported(path)} & NAMES <= own


def test_a_model_imports_no_backend() -> None:
    found = {name for path in sources(ROOT / "models") for name in imported(path)}
    assert found & NAMES <= {"hal_models"}


DECLARING = [p for top in (ROOT / "hal", *BACKENDS) for p in sources(top) if "code" not in (p.parent.name, p.stem)]


@pytest.mark.parametrize("path", DECLARING, ids=lambda p: "/".join(p.parts[-2:]))
def test_what_is_no_kernel_code_imports_tensor_libraries_only_when_called(path: Path) -> None:
    body = ast.parse(path.read_text()).body
    top = {node.names[0].name.partition(".")[0] for node in body if isinstance(node, ast.Import)}
    top |= {str(node.module).partition(".")[0] for node in body if isinstance(node, ast.ImportFrom)}
    assert top & {"torch", "triton", "aiter", "flashinfer", "cuda", "numpy"} == set()
