"""What the backends' probes make of the answers of torch and cuda.core, which are fakes here."""

import sys
from types import ModuleType, SimpleNamespace

import hal_cuda.probe as cuda
import hal_rocm.probe as rocm
import pytest
from facts import device

from hal.device import Fact, fits
from hal.errors import HalError

H200 = {"major": 9, "minor": 0, "name": "NVIDIA H200", "gcnArchName": "NVIDIA H200", "uuid": "GPU-1a2b"}
H200 |= {"multi_processor_count": 132, "L2_cache_size": 62914560, "shared_memory_per_block_optin": 232448}
H200 |= {
    "warp_size": 32,
    "total_memory": 150754820096,
    "memory_clock_rate": 3201000,
    "memory_bus_width": 6144,
}
MI300X = {"major": 9, "minor": 4, "name": "AMD Instinct MI300X", "gcnArchName": "gfx942:sramecc+:xnack-"}
MI300X |= {"multi_processor_count": 304, "shared_memory_per_block": 65536, "warp_size": 64, "uuid": "9f"}
MI300X |= {"total_memory": 206158430208}


def torch_with(hip: str | None = None, count: int = 1, **properties) -> SimpleNamespace:
    found = SimpleNamespace(
        device_count=lambda: count,
        current_device=lambda: 0,
        get_device_properties=lambda index: SimpleNamespace(**properties),
    )
    return SimpleNamespace(version=SimpleNamespace(hip=hip), cuda=found)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("gfx90a", ("gfx90a", 9, 0, "a")),
        ("gfx942:sramecc+:xnack-", ("gfx942", 9, 4, "2")),
        ("gfx950", ("gfx950", 9, 5, "0")),
        ("gfx1100", ("gfx1100", 11, 0, "0")),
        ("gfx1201", ("gfx1201", 12, 0, "1")),
    ],
)
def test_an_amd_architecture_is_read_in_parts(text: str, parts: tuple) -> None:
    assert rocm.parse_arch(text) == parts


@pytest.mark.parametrize("text", ["gfx9", "gfx90", "foo", "", "gfx942x", "sm_90", "9.4", "gfx9-4-generic", "gfx90g"])
def test_what_is_no_amd_architecture_is_an_error_that_shows_one(text: str) -> None:
    with pytest.raises(HalError, match=f"^'{text}' is no AMD architecture; expected gfx.* as in gfx942"):
        rocm.parse_arch(text)


@pytest.mark.parametrize(("major", "minor", "arch"), [(9, 4, "gfx942"), (9, 5, "gfx950"), (9, 0, "gfx90a")])
def test_a_torch_for_rocm_is_never_taken_for_cuda(major: int, minor: int, arch: str) -> None:
    torch = torch_with("7.1", **MI300X | {"major": major, "minor": minor, "gcnArchName": arch})
    assert cuda.from_torch(torch) == {"vendor": Fact(None, "probed", "torch is built for ROCm (HIP 7.1)")}
    here = rocm.from_torch(torch)
    assert (here["vendor"].value, here["arch"].value, here["tma"].value) == ("rocm", arch, False)


def test_a_torch_for_cuda_is_never_taken_for_rocm() -> None:
    assert rocm.from_torch(torch_with(**H200)) == {"vendor": Fact(None, "probed", "torch is built without hip")}


@pytest.mark.parametrize(("answer", "hip"), [(cuda.from_torch, None), (rocm.from_torch, "7.1")])
def test_a_torch_that_counts_no_device_says_so(answer, hip) -> None:
    assert answer(torch_with(hip, count=0)) == {"vendor": Fact(None, "probed", "no device (torch counts none)")}


@pytest.mark.parametrize("name", ["NVIDIA H200", "gfx942"])
def test_on_cuda_gcn_arch_name_is_a_name_and_not_used(name: str) -> None:
    assert cuda.from_torch(torch_with(**H200 | {"gcnArchName": name}))["arch"].value == "sm_90"


@pytest.mark.parametrize(
    ("answer", "profile", "unlike"),
    [
        (lambda: cuda.from_torch(torch_with(**H200)), "h200", {"uuid", "bandwidth"}),
        (lambda: rocm.from_torch(torch_with("7.1", **MI300X)), "mi300x", {"uuid", "bandwidth", "l2_bytes"}),
    ],
)
def test_torch_answers_what_the_profile_states(answer, profile: str, unlike: set[str]) -> None:
    facts = answer()
    assert {name for name, fact in facts.items() if fact.value != device(profile).value(name)} == unlike
    assert {fact.source for fact in facts.values()} == {"probed"}
    assert [name for name, fact in facts.items() if not fits(name, fact.value)] == []


def test_bandwidth_follows_from_clock_and_bus_where_the_driver_tells_them() -> None:
    assert cuda.from_torch(torch_with(**H200))["bandwidth"].value == pytest.approx(4.917e12, rel=1e-3)
    unknown = cuda.from_torch(torch_with(**H200 | {"memory_clock_rate": 0}))["bandwidth"]
    assert (unknown.value, unknown.source) == (None, "probed")


@pytest.mark.parametrize(("probe", "hip", "facts"), [(cuda, None, H200), (rocm, "7.1", MI300X)])
def test_a_property_that_torch_lacks_is_a_failed_fact_among_others(probe, hip, facts) -> None:
    lacking = {name: value for name, value in facts.items() if name != "warp_size"}
    here = probe.from_torch(torch_with(hip, **lacking))
    assert (here["wave_size"].source, here["wave_size"].why.partition(":")[0]) == ("failed", "AttributeError")
    assert here["compute_units"].value == facts["multi_processor_count"]


@pytest.mark.parametrize(
    ("answer", "arch"),
    [
        (lambda: cuda.from_torch(torch_with(**H200 | {"major": 13})), "sm_130"),
        (lambda: rocm.from_torch(torch_with("7.1", **MI300X | {"gcnArchName": "gfx1299"})), "gfx1299"),
    ],
)
def test_of_a_chip_that_is_not_listed_no_feature_is_known(answer, arch: str) -> None:
    facts = answer()
    features = ("fp8_e4m3fn", "fp4_e2m1", "mma", "tma", "pdl")
    assert facts["arch"].value == arch
    assert {facts[name] for name in features} == {Fact(None, "probed", f"{arch} is not in the table of architectures")}


def cuda_core(monkeypatch, made) -> None:
    core = ModuleType("cuda.core")
    core.__dict__["Device"] = made
    monkeypatch.setitem(sys.modules, "cuda", ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.core", core)


def test_cuda_core_answers_as_torch_does(monkeypatch) -> None:
    ask = {
        "multiprocessor_count": 132,
        "l2_cache_size": 62914560,
        "max_shared_memory_per_block_optin": 232448,
    }
    ask |= {"warp_size": 32, "memory_clock_rate": 3201000, "global_memory_bus_width": 6144}
    memory = SimpleNamespace(memory_info=SimpleNamespace(total=150754820096))
    made = {
        "compute_capability": (9, 0),
        "name": "NVIDIA H200",
        "uuid": "1a2b",
        "to_system_device": lambda: memory,
    }
    cuda_core(monkeypatch, lambda index: SimpleNamespace(properties=SimpleNamespace(**ask), **made))
    by_torch = {name: fact.value for name, fact in cuda.from_torch(torch_with(**H200)).items()}
    assert {name: fact.value for name, fact in cuda.ask_here().items()} == by_torch


@pytest.mark.parametrize(
    ("error", "source", "says"),
    [
        (
            RuntimeError("CUDA_ERROR_NO_DEVICE"),
            "probed",
            "no device (cuda.core: RuntimeError: CUDA_ERROR_NO_DEVICE)",
        ),
        (OSError("libcuda.so.1"), "failed", "nothing to ask: cuda.core: OSError: libcuda.so.1; torch: "),
    ],
)
def test_no_device_is_not_the_same_as_nothing_to_ask(error, source: str, says: str, monkeypatch) -> None:
    def made(index: int) -> None:
        raise error

    cuda_core(monkeypatch, made)
    monkeypatch.setitem(sys.modules, "torch", None)
    vendor = cuda.ask_here()["vendor"]
    assert (vendor.value, vendor.source) == (None, source)
    assert vendor.why.startswith(says)
