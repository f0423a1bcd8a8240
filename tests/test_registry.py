"""Every kernel once, by name; a backend that fails is a row in every Choice and stops nobody else."""

from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from facts import fake, package, registry

import hal.backend
from hal.choice import Choice
from hal.device import load_device
from hal.errors import DuplicateName, UnknownName, UnresolvedError
from hal.kernel import Kernel, kernel
from hal.ops import OPS, Linear, SiluMul
from hal.policy import Policy
from hal.registry import Registry, declared
from hal.resolving import Resolver
from hal.runtime import Runtime

SILU = SiluMul(columns=8)


class Unserved(SiluMul):
    """An op that no kernel serves."""


GOOD = """
from hal.backend import Backend
backend = Backend("stranger", declarations=("stranger_kernels.kernels",))
"""
KERNELS = """
from hal.kernel import Kernel, kernel
from hal.ops import Linear, SiluMul

class Base(Kernel[SiluMul]):
    tier = "fused"

@kernel("stranger.silu")
class Silu(Base, Kernel[SiluMul]):
    def load(self, site):
        return lambda x: "ran"
"""
FAILS = {
    "ImportError: no libvendor.so": 'raise ImportError("no libvendor.so")',
    "OSError: driver too old": 'raise OSError("driver\\n  too old")',
    "AttributeError: module 'os' has no attribute 'gone'": "import os; os.gone",
    "SystemExit: 3": "raise SystemExit(3)",
    "TypeError: broken_backend:backend is a int, not a hal.backend.Backend": "backend = 3",
}


def entries(monkeypatch: pytest.MonkeyPatch, *packages: str) -> None:
    """Entry points as an installed package has them; ours stay in front."""
    ours = [EntryPoint(name, f"{name}:backend", hal.backend.GROUP) for name in ("hal.composed", "hal_torch")]
    found = [*ours, *(EntryPoint(name, f"{name}:backend", hal.backend.GROUP) for name in packages)]
    monkeypatch.setattr("hal.backend.metadata.entry_points", lambda group: found)


def choose(have: Registry, op=SILU, on: str = "cpu") -> Choice:
    return Resolver(have, load_device(on)).resolve((op,))[0]


def test_a_name_twice_for_an_op_is_an_error() -> None:
    with pytest.raises(DuplicateName, match=r"kernel 'torch\.silu_mul' is registered twice for SiluMul"):
        registry(fake(SiluMul, "torch.silu_mul"))


def test_a_name_may_serve_several_ops() -> None:
    assert "torch.silu_mul" in registry(fake(Linear, "torch.silu_mul")).names(Linear)


def test_nothing_is_registered_after_something_was_resolved() -> None:
    have = registry()
    choose(have)
    with pytest.raises(DuplicateName, match=r"late: the registry is closed"):
        have.add(fake(SiluMul, "late"))


def test_a_kernel_for_an_op_outside_the_list_is_an_error_with_the_nearest() -> None:
    class SiluMull(SiluMul):
        pass

    with pytest.raises(UnknownName) as caught:
        registry(fake(SiluMull, "other"))
    assert caught.value.nearest == "SiluMul"


def test_a_kernel_must_name_its_op() -> None:
    with pytest.raises(TypeError, match="Lost: name the op: class Lost"):

        @kernel("lost")
        class Lost(Kernel):
            pass


def test_only_the_kernels_that_a_module_declares_itself_are_taken() -> None:
    names = {cls.name for cls in declared("hal_torch.layers")}
    assert names == {"torch.moe", "torch.moe_gathered", "torch.moe_quantized"}


@pytest.mark.parametrize("error", FAILS)
def test_a_backend_that_fails_to_import_is_a_row_and_the_rest_goes_on(
    error: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    package(monkeypatch, tmp_path / "broken_backend", __init__=FAILS[error])
    entries(monkeypatch, "broken_backend")
    choice = choose(Registry.installed())
    rows = [(c.status, c.kind, c.reason) for c in choice.candidates if c.kernel == "backend broken_backend"]
    assert rows == [("refused", "software", f"needs its import; {error}")]
    assert choice.pieces[0].kernel.name == "torch.silu_mul"


@pytest.mark.parametrize("error", [e for e in FAILS if not e.startswith("TypeError")])
def test_a_module_of_declarations_that_fails_is_a_row_and_the_rest_goes_on(
    error: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    package(monkeypatch, tmp_path / "stranger_kernels", __init__=GOOD, kernels=FAILS[error])
    entries(monkeypatch, "stranger_kernels")
    have = Registry.installed()
    assert [(b.name, b.error) for b in have.broken] == [("stranger (stranger_kernels.kernels)", error)]
    assert choose(have).candidates[-1].kernel == "backend stranger (stranger_kernels.kernels)"


def test_a_broken_backend_is_named_where_nothing_serves_an_op_and_in_the_report(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    package(monkeypatch, tmp_path / "broken_backend", __init__="raise ImportError('gone')")
    entries(monkeypatch, "broken_backend")
    rt = Runtime(load_device("cpu"), Policy(), load=False)
    with pytest.raises(UnresolvedError, match="\n  backend broken_backend: ImportError: gone"):
        rt.bind(Unserved(columns=8), "act")
    assert "backend broken_backend is broken: ImportError: gone" in rt.report()


def test_a_strangers_kernels_are_ranked_like_ours(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package(monkeypatch, tmp_path / "stranger_kernels", __init__=GOOD, kernels=KERNELS)
    entries(monkeypatch, "stranger_kernels")
    rt = Runtime(load_device("cpu"), Policy())
    bound = rt.bind(SILU, "act")
    assert rt.registry.broken == []
    assert [b.name for b in rt.registry.backends] == ["composed", "stranger", "torch"]
    assert {c.kernel: c.status for c in bound.choice.candidates if c.status != "refused"} == {
        "stranger.silu": "chosen",
        "torch.silu_mul": "outranked",
    }
    assert bound(None) == "ran"


def test_a_strangers_name_twice_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text = KERNELS.replace("stranger.silu", "torch.silu_mul")
    package(monkeypatch, tmp_path / "stranger_kernels", __init__=GOOD, kernels=text)
    entries(monkeypatch, "stranger_kernels")
    with pytest.raises(DuplicateName, match=r"torch\.silu_mul"):
        Registry.installed()


def test_names_are_those_of_one_op_or_of_all() -> None:
    have = registry()
    assert have.names(SiluMul) == ["composed.then_quantize", "torch.silu_mul"]
    assert set(have.names()) == {name for op in OPS.values() for name in have.names(op)}


@pytest.mark.parametrize(
    ("environ", "nearest"),
    [
        ({"HAL_FORCES": "x"}, "HAL_FORCE"),
        ({"hal_unrelated": "x", "HAL_STRIKT": "1"}, "HAL_STRICT"),
        ({"HAL_FORCE": "InProjj=torch.packed"}, "InProj"),
        ({"HAL_FORCE": "InProj=torch.packd"}, "torch.packed"),
        ({"HAL_PREFER": "Linear=torch.linear_quantised"}, "torch.linear_quantized"),
        ({"HAL_DENY": "torch.seperate"}, "torch.separate"),
        ({"HAL_DENY": "Linear=torch.packed"}, "torch.linear"),
        ({"HAL_NUMERICS": "losy"}, "lossy"),
    ],
)
def test_an_unknown_name_is_an_error_that_names_the_nearest(environ: dict[str, str], nearest: str) -> None:
    with pytest.raises(UnknownName) as caught:
        Policy.from_environment(environ).validate(registry())
    assert caught.value.nearest == nearest
