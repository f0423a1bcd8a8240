"""Profiles state every fact and say whence; a malformed file is an error that names the field."""

import json
import re
from pathlib import Path

import pytest
from facts import device, here
from hal_cuda.probe import ARCHS as CUDA
from hal_cuda.probe import FEATURES as CUDA_FEATURES
from hal_rocm.probe import ARCHS as ROCM
from hal_rocm.probe import FEATURES as ROCM_FEATURES

from hal import device as devices
from hal.device import (
    FACTS,
    HARDWARE,
    LIBRARIES,
    Device,
    Fact,
    fits,
    load_device,
    load_stack,
    profiles,
    stacks,
)
from hal.errors import HalError, UnknownName

KIB = 2**10
FP8, FNUZ, FP4 = "fp8_e4m3fn", "fp8_e4m3fnuz", "fp4_e2m1"
ARCHS = {  # profiles; features; bytes of shared memory; threads that step together
    "sm_80": ("a100", {"mma"}, 163 * KIB, 32),
    "sm_89": ("rtx-4090", {"mma", FP8}, 99 * KIB, 32),
    "sm_90": ("h100 h200", {"mma", FP8, "tma", "pdl"}, 227 * KIB, 32),
    "sm_100": ("b200", {"mma", FP8, FP4, "tma", "pdl"}, 227 * KIB, 32),
    "sm_103": ("b300", {"mma", FP8, FP4, "tma", "pdl"}, 227 * KIB, 32),
    "sm_120": ("rtx-pro-6000", {"mma", FP8, FP4, "tma", "pdl"}, 99 * KIB, 32),
    "sm_121": ("gb10", {"mma", FP8, FP4, "tma", "pdl"}, 99 * KIB, 32),
    "gfx942": ("mi300x mi308x mi325x", {"mma", FNUZ}, 64 * KIB, 64),
    "gfx950": ("mi355x", {"mma", FP8, FP4}, 160 * KIB, 64),
    "gfx1201": ("rx-9070", {"mma", FP8}, 64 * KIB, 32),
    "x86_64": ("cpu", set(), None, None),
}
OF = {name: arch for arch, (names, *_) in ARCHS.items() for name in names.split()}
VENDORS = {"sm": "cuda", "gf": "rocm", "x8": "cpu"}


def test_the_shipped_profiles_are_those_that_are_checked_here() -> None:
    assert profiles() == sorted(OF)


@pytest.mark.parametrize("name", profiles())
def test_a_profile_states_every_fact_with_its_source(name: str) -> None:
    shipped = load_device(name)
    assert list(shipped) == list(FACTS)
    assert {shipped[fact].source for fact in shipped} == {"declared"}
    assert [fact for fact in shipped if not shipped[fact].why] == []


@pytest.mark.parametrize("name", profiles())
def test_a_profile_is_called_as_its_file_and_names_a_stack_of_its_vendor(name: str) -> None:
    shipped = load_device(name)
    assert shipped.label == name
    assert shipped.stack in stacks()
    assert shipped.stack.startswith(shipped.value("vendor"))


@pytest.mark.parametrize(("name", "arch"), OF.items())
def test_features_and_limits_follow_from_the_architecture(name: str, arch: str) -> None:
    shipped = load_device(name)
    _, features, shared, wave = ARCHS[arch]
    assert (shipped.value("arch"), shipped.value("vendor")) == (arch, VENDORS[arch[:2]])
    assert {fact for fact, (kind, _) in HARDWARE.items() if kind is bool and shipped.value(fact)} == features
    assert (shipped.value("shared_bytes"), shipped.value("wave_size")) == (shared, wave)


@pytest.mark.parametrize(("name", "arch"), [(n, a) for n, a in OF.items() if n != "cpu"])
def test_a_probe_would_answer_the_same_features(name: str, arch: str) -> None:
    names, table = (CUDA_FEATURES, CUDA) if arch in CUDA else (ROCM_FEATURES, ROCM)
    assert tuple(load_device(name).value(feature) for feature in names) == table[arch]


def test_gfx942_alone_has_the_other_encoding_of_fp8() -> None:
    assert {arch for arch, (fn, fnuz, *_) in ROCM.items() if fnuz} == {"gfx942"}
    assert {arch for arch, (fn, *_) in ROCM.items() if fn} == {"gfx950", "gfx1200", "gfx1201"}


@pytest.mark.parametrize("stack", stacks())
def test_a_stack_states_libraries_alone(stack: str) -> None:
    path = Path(devices.__file__).parent / "stacks" / f"{stack}.json"
    assert set(json.loads(path.read_text())["libraries"]) <= set(LIBRARIES)
    assert [n for n, fact in load_stack(stack).items() if not fits(n, fact.value)] == []


def test_another_stack_replaces_the_libraries_alone() -> None:
    own, other = load_device("h200"), load_device("h200", "bare")
    assert [name for name in HARDWARE if own[name] != other[name]] == []
    assert {name: other[name] for name in LIBRARIES} == load_stack("bare")
    assert (own.stack, other.stack, own.value("torch") is None) == ("cuda-2026.11", "bare", False)
    assert own.with_stack("bare") == other


HERE = here("cpu", vendor=Fact("cpu", "failed", "cuda: it says “no”"), bandwidth=Fact(1e11, "probed"))


@pytest.mark.parametrize("written", [HERE, *map(load_device, profiles())], ids=lambda d: d.label)
def test_a_dumped_device_reads_as_it_was(written: Device, tmp_path: Path) -> None:
    path = tmp_path / "dump.json"
    path.write_text(json.dumps(written.to_json()))
    read = load_device(str(path))
    assert read == written
    assert hash(read) == hash(written)
    assert load_device(str(path), "bare") == written.with_stack("bare")


def test_devices_differ_where_a_fact_does() -> None:
    assert device() != device(wave_size=64)
    assert device(wave_size=64)["wave_size"] == Fact(64, "declared", "replaced by hand")


@pytest.mark.parametrize(
    ("ask", "nearest"),
    [
        (lambda: load_device("h20"), "h200"),
        (lambda: load_device("MI300X"), "mi300x"),
        (lambda: load_device("h200", "cuda-2026.1"), "cuda-2026.11"),
        (lambda: device()["wave"], "wave_size"),
        (lambda: device().value("flash_infer"), "flashinfer"),
        (lambda: device(bandwith=1.0), "bandwidth"),
    ],
)
def test_an_unknown_name_is_answered_with_the_nearest(ask, nearest: str) -> None:
    with pytest.raises(UnknownName, match=f"did you mean '{re.escape(nearest)}'"):
        ask()


def test_values_are_of_their_facts_type() -> None:
    good = [("wave_size", 64), ("bandwidth", 1), ("bandwidth", 1.5), ("mma", False), ("torch", None)]
    bad = [
        ("wave_size", True),
        ("wave_size", 64.0),
        ("bandwidth", "1"),
        ("mma", 1),
        ("torch", 2.1),
        ("mma", []),
    ]
    assert [pair for pair in good if not fits(*pair)] == []
    assert [pair for pair in bad if fits(*pair)] == []


@pytest.mark.parametrize(
    ("text", "says"),
    [(b"{", "hal.device/1"), (b"\xff", "hal.device/1"), (b"[]", "schema"), (None, "No such file")],
)
def test_a_file_that_is_no_dump_is_an_error_that_names_it(text, says: str, tmp_path: Path) -> None:
    path = tmp_path / "dump.json"
    if text is not None:
        path.write_bytes(text)
    with pytest.raises(HalError, match=f"^{re.escape(str(path))}: .*{says}"):
        load_device(str(path))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"schema": "hal.device/2"}, "schema is hal.device/1, got 'hal.device/2'"),
        ({"label": None}, "label is a str, got None"),
        ({"stack": 3}, "stack is a str, got 3"),
        ({"facts": []}, "facts is a dict, got"),
        ({"facts": {"mma": [True, "declared", "x"]}}, "unknown stack 'installed'"),
        ({"wave": [1, "probed", ""]}, "unknown fact 'wave'; did you mean 'wave_size'"),
        ({"arch": "sm_90"}, "fact arch is [value, probed|declared|failed, why], got 'sm_90'"),
        ({"arch": ["sm_90", "guessed", ""]}, "fact arch is"),
        ({"arch": ["sm_90", "probed", None]}, "fact arch is"),
        ({"wave_size": [True, "probed", ""]}, "fact wave_size is int, got True"),
        ({"wave_size": [32.0, "probed", ""]}, "fact wave_size is int, got 32.0"),
        ({"mma": [1, "probed", ""]}, "fact mma is bool, got 1"),
        ({"bandwidth": ["fast", "probed", ""]}, "fact bandwidth is float, got 'fast'"),
        ({"vendor": [["cuda"], "probed", ""]}, "fact vendor is str, got ['cuda']"),
        ({"mma": None, "torch": None}, "facts not stated: mma, torch"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_malformed_dump_is_an_error_with_file_and_field(change, says: str, tmp_path: Path) -> None:
    data, path = HERE.to_json(), tmp_path / "dump.json"
    whole = {key: value for key, value in change.items() if key in data}
    facts = {key: value for key, value in change.items() if key not in data}
    data["facts"] = {key: v for key, v in (data["facts"] | facts).items() if v is not None}
    path.write_text(json.dumps(data | whole))
    with pytest.raises(HalError, match=f"^{re.escape(str(path))}: .*{re.escape(says)}"):
        load_device(str(path))
