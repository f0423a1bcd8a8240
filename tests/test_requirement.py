"""A requirement answers with a reason or nothing; what nobody knows passes no gate."""

import pytest
from facts import device, here

from hal.device import Device, Fact
from hal.errors import HalError, UnknownName
from hal.requirement import Reason, arch, at_least, family, feature, library, vendor

H200, MI300X = device("h200"), device("mi300x")


@pytest.mark.parametrize(
    ("need", "on", "kind", "text"),
    [
        (vendor("cuda"), MI300X, "device", "needs vendor cuda; mi300x has 'rocm' (declared: AMD)"),
        (
            arch("sm_90", "sm_100"),
            device("a100", arch="sm_80"),
            "device",
            "needs arch sm_90 or sm_100; a100 has 'sm_80'",
        ),
        (family("sm_12"), H200, "device", "needs an arch of family sm_12x; h200 has 'sm_90'"),
        (feature("tma"), MI300X, "device", "needs tma; mi300x has False (declared: ISA guide"),
        (
            at_least("shared_bytes", 160 * 1024),
            MI300X,
            "device",
            "needs shared_bytes of at least 163840; mi300x has 65536",
        ),
        (library("aiter", ">=0.1.21"), MI300X, "software", "needs aiter >=0.1.21; mi300x has 0.1.20"),
        (library("aiter"), H200, "software", "needs aiter; on h200 it is not installed (stack cuda-2026.11)"),
    ],
)
def test_a_reason_says_what_is_needed_against_what_there_is(need, on: Device, kind: str, text: str) -> None:
    reason = need(on)
    assert isinstance(reason, Reason)
    assert str(reason).startswith(text)
    assert (reason.kind, need.kind) == (kind, kind)


@pytest.mark.parametrize(
    ("need", "on"),
    [
        (vendor("rocm", "cuda"), H200),
        (arch("sm_90"), H200),
        (family("gfx94"), MI300X),
        (feature("fp8_e4m3fnuz"), MI300X),
        (at_least("shared_bytes", 65536), MI300X),
        (library("aiter"), MI300X),
        (library("flashinfer", ">=0.7,<0.8"), H200),
    ],
)
def test_a_need_that_is_met_answers_nothing(need, on: Device) -> None:
    assert need(on) is None


GATES = {
    "vendor": vendor("cuda"),
    "arch": arch("sm_90"),
    "mma": feature("mma"),
    "shared_bytes": at_least("shared_bytes", 0),
    "triton": library("triton"),
}


@pytest.mark.parametrize(("fact", "need"), [*GATES.items(), ("arch", family("sm_9"))])
def test_an_unknown_fact_passes_no_gate(fact: str, need) -> None:
    assert need(device()) is None
    assert need(device(**{fact: None})) is not None


@pytest.mark.parametrize(("fact", "need"), [*GATES.items(), ("arch", family("sm_9"))])
def test_a_failed_fact_refuses_as_software_with_what_the_probe_said(fact: str, need) -> None:
    reason = need(here(**{fact: Fact(None, "failed", "OSError: no such driver")}))
    assert reason is not None
    assert reason.kind == "software"
    assert "OSError: no such driver" in reason.text


def test_a_cpu_behind_a_broken_probe_is_a_cpu_and_refuses_others_as_software() -> None:
    cpu = here("cpu", vendor=Fact("cpu", "failed", "cuda: its probe failed"))
    text = "needs vendor cuda; here has 'cpu' (failed: cuda: its probe failed)"
    assert vendor("cpu")(cpu) is None
    assert vendor("cuda")(cpu) == Reason("software", text)


@pytest.mark.parametrize(
    ("ask", "nearest"),
    [
        (lambda: feature("fp8_e4m3"), "fp8_e4m3fn"),
        (lambda: at_least("shared_byte", 1), "shared_bytes"),
        (lambda: library("flash_infer"), "flashinfer"),
    ],
)
def test_a_gate_on_a_name_outside_the_list_raises_with_the_nearest(ask, nearest: str) -> None:
    with pytest.raises(UnknownName) as caught:
        ask()
    assert caught.value.nearest == nearest


@pytest.mark.parametrize(
    "ask",
    [
        lambda: feature("arch"),
        lambda: at_least("mma", 1),
        lambda: at_least("arch", 1),
        lambda: library("tma"),
    ],
)
def test_a_gate_on_a_fact_of_another_type_raises(ask) -> None:
    with pytest.raises(UnknownName):
        ask()


# capabilities (10,0), (10,3), (11,0), (12,0), (12,1), (13,0) and two chips that do not exist
CHIPS = (
    "sm_90",
    "sm_100",
    "sm_103",
    "sm_110",
    "sm_120",
    "sm_121",
    "sm_130",
    "sm_1000",
    "gfx942",
    "gfx1201",
    "gfx1299",
)


@pytest.mark.parametrize(
    ("need", "takes"),
    [
        (arch("sm_100"), {"sm_100"}),
        (family("sm_10"), {"sm_100", "sm_103"}),
        (family("sm_11"), {"sm_110"}),
        (arch("sm_120"), {"sm_120"}),
        (family("sm_12"), {"sm_120", "sm_121"}),
        (family("sm_1"), set()),
        (family("gfx94"), {"gfx942"}),
        (family("gfx120"), {"gfx1201"}),
    ],
)
def test_exact_takes_one_chip_and_family_its_own(need, takes: set[str]) -> None:
    assert {chip for chip in CHIPS if need(device(arch=chip)) is None} == takes


@pytest.mark.parametrize("name", ["mi300x", "mi325x", "mi355x"])
@pytest.mark.parametrize("need", [arch("sm_90"), family("sm_9"), feature("tma"), feature("pdl"), vendor("cuda")])
def test_an_amd_device_never_passes_for_hopper(name: str, need) -> None:
    # torch gives (9, 4) and (9, 5) as their compute capability
    reason = need(device(name))
    assert reason is not None
    assert reason.kind == "device"
    assert need(device("h100")) is None


@pytest.mark.parametrize(
    ("have", "versions", "met"),
    [
        ("2.13.0+cpu", ">=2.9,<2.14", True),
        ("2.11.0+cu130", "==2.11.0", True),
        ("2.14.0", ">=2.9,<2.14", False),
        ("2.14.0.dev20260801", ">=2.9,<2.14", False),
        ("0.1.7.post2.dev18", ">=0.1.6", True),
        ("0.1.7.post2.dev18", ">=0.1.20", False),
        ("0.10.0", ">=0.9", True),
        # HIP's: a hash behind the release, which may or may not look like a version
        ("7.1.25424-4179531dcd", ">=7.0,<8", True),
        ("6.4.43482-0f2d60242", ">=7.0,<8", False),
        ("7.1.52802-9999999", ">=7.0", True),
        ("3.13.0+", ">=3.11", True),
        ("unknown", ">=1", False),
        ("unknown", "", True),
    ],
)
def test_a_library_is_taken_in_a_range_of_versions(have: str, versions: str, met: bool) -> None:
    reason = library("torch", versions)(device(torch=have))
    assert reason == (None if met else Reason("software", f"needs torch {versions}; h200 has {have}"))


def test_a_range_that_is_none_is_an_error_where_it_is_declared() -> None:
    with pytest.raises(HalError, match=r"library torch: versions is a range .* got '2\.9'"):
        library("torch", "2.9")


def test_a_broken_library_is_not_an_absent_one() -> None:
    broken = here(aiter=Fact(None, "failed", "module aiter is there"))
    absent = here(aiter=Fact(None, "probed", "no distribution amd-aiter"))
    says = [str(library("aiter")(on)) for on in (broken, absent)]
    assert says == [
        "needs aiter; on here it is broken (module aiter is there)",
        "needs aiter; on here it is not installed (no distribution amd-aiter)",
    ]
