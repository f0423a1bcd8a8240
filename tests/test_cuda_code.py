"""CUDA C++ without a GPU: it compiles for every architecture that its kernels name, and is passed what it reads."""

from __future__ import annotations

import re
from dataclasses import replace
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hal_cuda.code import few_rows, nvrtc
from hal_cuda.code.gated_delta import DecodeArgs, VerifyArgs, decode, verify
from hal_cuda.few_rows import WIDTHS, tiles
from hal_cuda.gated_delta import ARCHS, DecodeCluster, DecodeWhole, Verify
from recording import record

import hal
from hal.conformance import Verdict
from hal.device import profiles
from hal.formats import STATIC_FP8
from hal.layout import VK, Ring, Tail
from hal.ops import GatedDeltaDecode, GatedDeltaVerify

OP = GatedDeltaDecode(key_heads=2, value_heads=4, key_head_dim=128, value_head_dim=128)
OPS = {
    "float32": OP,
    "bfloat16": replace(OP, state_dtype="bfloat16"),
    "heads of 64": replace(OP, key_head_dim=64, value_head_dim=64),
    "heads of 64 in bfloat16": replace(OP, key_head_dim=64, value_head_dim=64, state_dtype="bfloat16"),
    "to fp8": replace(OP, out=STATIC_FP8),
}
VERIFY = GatedDeltaVerify(key_heads=2, value_heads=4, key_head_dim=128, value_head_dim=128)
VERIFIED = {
    "four rows": VERIFY,
    "two rows": replace(VERIFY, queries=2),
    "three rows, bfloat16 state": replace(VERIFY, queries=3, state_dtype="bfloat16"),
    "eight rows": replace(VERIFY, queries=8),
    "heads of 64": replace(VERIFY, key_head_dim=64, value_head_dim=64, queries=2),
    "to fp8": replace(VERIFY, out=STATIC_FP8),
}
needs_nvrtc = pytest.mark.skipif(
    find_spec("cuda") is None or find_spec("cuda.bindings") is None, reason="cuda-bindings is not installed"
)


def defined(
    op: GatedDeltaDecode | GatedDeltaVerify, kernel: Any, device: str, ring: int, monkeypatch: pytest.MonkeyPatch
) -> list[tuple[str, dict[str, int]]]:
    """What the kernel's code asks to be compiled for a site of this op, its state aligned and not: file, names."""
    found: list[tuple[str, dict[str, int]]] = []

    class Asked:
        def __init__(self, file: str, name: str, arch: str, defines: dict[str, int], **_: Any) -> None:
            assert arch == hal.load_device(device).value("arch")
            found.append((file, defines))

        def __call__(self, blocks: int, arguments: Any) -> None:
            pass

    monkeypatch.setattr("hal_cuda.code.gated_delta.Function", Asked)
    facts = hal.load_device(device)
    weights = {
        "conv_weight": torch.zeros(op.conv_dim, 4, dtype=torch.bfloat16),
        "A_log": torch.zeros(op.value_heads),
        "dt_bias": torch.zeros(op.value_heads, dtype=torch.bfloat16),
        "norm": torch.zeros(op.value_head_dim, dtype=torch.bfloat16),
    }
    queries = getattr(op, "queries", 0)
    site = SimpleNamespace(
        op=op, settings=kernel.settings(op, facts),
        layouts={"conv": Ring(ring), "delta": VK(), "pending": Tail(2 * queries)},
        scales={"out": torch.ones(1)}, weight=lambda name, layout=None: weights[name],
        runtime=SimpleNamespace(device=facts),
    )  # fmt: skip
    run = verify(site) if queries else decode(site)
    kind = getattr(torch, op.state_dtype)
    wide = torch.zeros(2 * (op.value_dim * op.key_head_dim + 1), dtype=kind)
    odd = wide.as_strided((2, op.value_heads, op.value_head_dim, op.key_head_dim), (
        op.value_dim * op.key_head_dim + 1, op.value_head_dim * op.key_head_dim, op.key_head_dim, 1,
    ))  # fmt: skip
    projected = tuple(
        torch.zeros(1, w, dtype=torch.bfloat16) for w in (op.conv_dim, op.value_dim, op.value_heads, op.value_heads)
    )
    pools = [torch.zeros(2, op.conv_dim, ring, dtype=torch.bfloat16), odd]
    if isinstance(op, GatedDeltaVerify):
        pools.append(torch.zeros(2, 2 * queries, op.left))
    run(projected, tuple(pools), hal.batch.make_batch(op.mode, [1], [3], [0]))
    assert [d["ALIGNED"] for _, d in found] == [1] * (len(found) - 1) + [0]
    return found


@needs_nvrtc
@pytest.mark.parametrize("kernel", [DecodeWhole, DecodeCluster])
@pytest.mark.parametrize("name", OPS)
def test_the_decode_core_compiles(name: str, kernel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for ring in (4, 7):
        for file, defines in defined(OPS[name], kernel(), "h200", ring, monkeypatch):
            assert nvrtc.compiled(file, "sm_90", tuple(sorted(defines.items())))
    record("compiled", "h200", Verdict("GatedDeltaDecode", kernel.name, name, "passed"))


@needs_nvrtc
@pytest.mark.parametrize("name", VERIFIED)
def test_the_verify_core_compiles(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    op = VERIFIED[name]
    for file, defines in defined(op, Verify(), "h200", op.conv_width - 1 + op.queries, monkeypatch):
        assert nvrtc.compiled(file, "sm_90", tuple(sorted(defines.items())))
    record("compiled", "h200", Verdict("GatedDeltaVerify", Verify.name, name, "passed"))


@needs_nvrtc
@pytest.mark.parametrize("arch", ARCHS)
def test_the_decode_core_compiles_for_every_architecture_that_is_claimed(
    arch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, defines = defined(OP, DecodeCluster(), "h200", 4, monkeypatch)[0]
    assert nvrtc.compiled(file, arch, tuple(sorted(defines.items())))
    for profile in profiles():
        if hal.load_device(profile).value("arch") == arch:
            record("compiled", profile, Verdict("GatedDeltaDecode", DecodeCluster.name, "in float32", "passed"))


@needs_nvrtc
def test_what_does_not_compile_says_so() -> None:
    with pytest.raises(hal.HalError, match=r"(?s)decode_core.cu for sm_90: NVRTC_ERROR_COMPILATION: .*KEY_HEADS"):
        nvrtc.compiled("decode_core.cu", "sm_90", (("HEADS", 4),))


WEIGHTS = {  # outputs, columns, gated: every shape of launch that the settings make
    "layers of the 4B model": (12352, 2560, False),
    "few rows of the weight": (2560, 9216, False),
    "a head": (248320, 2560, False),
    "gate and up": (9216, 2560, True),
    "an odd width, a part of a box": (193, 72, False),
    "one box": (8, 8, True),
}


@needs_nvrtc
@pytest.mark.parametrize("name", WEIGHTS)
def test_products_with_few_rows_compile(name: str) -> None:
    outputs, columns, gated = WEIGHTS[name]
    weight = torch.empty(outputs * (2 if gated else 1), columns, dtype=torch.bfloat16, device="meta")
    product = few_rows.Product(weight, tiles(outputs, columns, hal.load_device("h200"), gated), "sm_90", gated)
    for rows in WIDTHS:
        product.compile(rows)
    served = {"NormGateUp": "norm_gate_up"} if gated else {"Gemm": "gemm", "Linear": "gemm", "InProj": "in_proj"}
    for op, kernel in served.items():
        record("compiled", "h200", Verdict(op, f"cuda.{kernel}_few", name, "passed"))


def test_a_launch_fits_a_multiprocessor_of_any_device() -> None:
    for small in (99 * 1024, 227 * 1024):
        device = hal.load_device("h200").replaced(shared_bytes=small)
        for outputs, columns, gated in WEIGHTS.values():
            settings = tiles(outputs, columns, device, gated)
            for rows in WIDTHS:
                launch = settings[str(rows)]
                stage = (64 * launch["GROUPS"] + rows) * 128 * launch["BOXES"]
                assert launch["STAGES"] >= 2
                assert launch["STAGES"] * stage + 2 * 1024 <= small


@pytest.mark.parametrize(
    ("file", "given_to"),
    [("decode_core.cu", DecodeArgs), ("verify_core.cu", VerifyArgs), ("few_rows.cu", few_rows.Args)],
)
def test_the_arguments_are_those_that_the_code_reads_in_its_order(file: str, given_to: Any) -> None:
    source = (nvrtc.HERE / file).read_text()
    body = re.search(r"struct Args \{(.*?)\};", source, re.DOTALL)
    assert body
    read: list[tuple[str, int]] = []
    for line in body[1].split(";"):
        kind, *names = re.findall(r"\*?\s*\w+", line.replace("const", "").strip()) or [""]
        for name in names:
            pointer = "*" in name or "*" in line
            size = {"i64": 8, "Map": 128}.get(kind.strip(), 4)
            read.append((name.strip("* "), 8 if pointer else size))
    given = [(name, getattr(given_to, name).size) for name, _ in given_to._fields_]
    assert given == read
