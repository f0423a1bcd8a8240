"""Emulated: aiter's kernels behind our contracts with a double in its place, alone and in whole models on the CPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import fake_aiter
import pytest
import torch
from emulated import logits, ranks, registry
from facts import device
from hal_models.commands.loading import SHIPPED
from hal_models.qwen3_5.config import configure
from hal_models.qwen3_5.model import Qwen35
from hal_models.qwen3_5.weights import load
from hal_models.tasks import lines
from recording import record
from sized import SIZED, cases

import hal
from hal.cli import main
from hal.conformance import Verdict, verify_kernel
from hal.errors import BindError, PolicyError
from hal.formats import SCHEMES
from hal.ops import OPS, AddRMSNorm, MoE, RMSNorm, SiluMul

HERE = Path(__file__).parent


def runtime(label: str = "mi300x", **policy: list[str]) -> hal.Runtime:
    return hal.Runtime(device(label), hal.Policy.of(**policy), registry(), place="cpu")


KERNELS = sorted(
    (title, kernel.name)
    for title, op in OPS.items()
    for kernel in registry().kernels(op)
    if kernel.name.startswith("rocm.") and kernel.name != "rocm.reduce_add_rms_norm"
)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    return fake_aiter.install(lambda name, module: monkeypatch.setitem(sys.modules, name, module))


@pytest.mark.parametrize(("op", "name"), KERNELS)
def test_a_kernel_keeps_its_contract_around_the_double(op: str, name: str, calls: dict[str, int]) -> None:
    found = list(verify_kernel(runtime("mi355x"), OPS[op], name))
    assert not [v for v in found if v.status == "failed"]
    if [v for v in found if v.status == "passed"]:
        return
    # cases are small; these have sizes that aiter takes
    assert (op, name) in SIZED, found


@pytest.mark.parametrize("label", ["mi300x", "mi355x"])
@pytest.mark.parametrize(("op", "name"), SIZED)
def test_a_kernel_that_needs_larger_sizes_than_the_cases(
    op: str, name: str, label: str, calls: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    on = runtime(label)
    asked = cases(op, name, on.device)
    monkeypatch.setattr(OPS[op], "cases", classmethod(lambda cls: asked))
    found = list(verify_kernel(on, OPS[op], name))
    assert not [v for v in found if v.status == "failed"]
    refused = {v.case for v in found if v.status == "refused"}
    if "a8w8" in name:
        assert {case.name for case in asked} - refused == {"fp8_channel both", "fp8_channel both, no rows"}
    elif op != "Quantize":
        assert refused <= {"to fp8", *SCHEMES}
    assert calls


def test_experts_are_taken_some_at_a_time_where_there_are_many_rows(calls: dict[str, int]) -> None:
    bound = runtime().bind(MoE(hidden=64, intermediate=32, experts=6, top_k=2, shared_intermediate=48), "moe")
    assert bound.choice.at(10**6).settings["rows"] == (2**31 - 1) // (2 * 2 * 64)


def test_a_norm_with_an_offset_calls_for_gemma_s_form(calls: dict[str, int]) -> None:
    for offset in (0.0, 1.0):
        for op in (RMSNorm(hidden=64, offset=offset), AddRMSNorm(hidden=64, offset=offset)):
            bound = (on := runtime()).bind(op, "norm")
            weight = torch.full((64,), 0.003).bfloat16()
            on.group_of(bound).fill({"norm": weight})
            x = torch.ones(2, 64).bfloat16()
            got = bound(x) if isinstance(op, RMSNorm) else bound(torch.zeros_like(x), x)[0]
            assert torch.allclose(got.float(), torch.full((2, 64), weight[0].item() + offset), rtol=2**-8)
    assert set(calls) == {"aiter.ops.rmsnorm:rmsnorm", "aiter.ops.rmsnorm:rmsnorm2d_fwd_with_add"}
    bound = runtime().bind(RMSNorm(hidden=64, offset=0.5), "norm")
    assert bound.choice.why_not("rocm.rms_norm", 1) == "needs an offset of 0 or 1 (gemma_norm); it is 0.5"


@pytest.mark.parametrize("error", ["KeyError", "RuntimeError", "OSError", "ImportError", "AttributeError"])
def test_aiter_that_fails_at_its_import_is_an_error_that_names_how_to_go_on(
    error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Fails:
        def find_spec(self, name: str, path: object = None, target: object = None) -> None:
            if name.split(".")[0] == "aiter":
                raise getattr(__import__("builtins"), error)("gfx1100")

    for known in [n for n in sys.modules if n.split(".")[0] == "aiter"]:
        monkeypatch.delitem(sys.modules, known)
    monkeypatch.setattr(sys, "meta_path", [Fails(), *sys.meta_path])
    op = SiluMul(columns=64)
    with pytest.raises(BindError, match=f"rocm.silu_mul was chosen and failed to load: {error}.*gfx1100") as raised:
        runtime().bind(op, "act")
    assert "HAL_DENY=SiluMul=rocm.silu_mul goes on without it" in str(raised.value)
    bound = runtime(deny=["SiluMul=rocm.silu_mul"]).bind(op, "act")
    assert bound.choice.at(1).kernel.name == "torch.silu_mul"


@pytest.mark.parametrize("version", [None, "0.1.7.post2.dev18", "0.1.19"])
def test_without_aiter_or_with_an_old_one_the_reason_is_software_and_strict_raises(version: str | None) -> None:
    on = device("mi300x", aiter=version)
    plain = hal.Runtime(on, hal.Policy(), registry(), load=False)
    op = AddRMSNorm(hidden=4096)
    choice = plain.bind(op, "norm").choice
    (refused,) = [c for c in choice.candidates if c.kernel == "rocm.add_rms_norm"]
    assert refused.kind == "software"
    assert refused.reason.startswith("needs aiter >=0.1.20,<0.2; ")
    assert choice.fell_back.startswith("with all software met would run rows 1..262143: rocm.add_rms_norm")
    with pytest.raises(PolicyError, match="fell back under HAL_STRICT=1"):
        hal.Runtime(on, hal.Policy.of(strict=True), registry(), load=False).bind(op, "norm")


@pytest.mark.parametrize("label", ["rx-9070", "h200"])
def test_a_device_that_aiter_has_no_kernels_for_says_so(label: str) -> None:
    choice = hal.Runtime(device(label), hal.Policy(), registry(), load=False).bind(SiluMul(columns=64), "act").choice
    assert choice.why_not("rocm.silu_mul", 1).startswith(
        "needs vendor rocm" if label == "h200" else "needs arch gfx942"
    )
    assert not choice.fell_back


@pytest.mark.parametrize("name", ["dense", "moe"])
def test_tokens_of_the_tiny_checkpoints_are_the_references_on_every_line(name: str) -> None:
    found = ranks(1, SHIPPED / name, 1000)
    same(name, found[0]["texts"])
    wanted = {"rocm.packed_bf16", "rocm.gemm", "rocm.add_rms_norm", "rocm.attention_decode"}
    assert wanted | {"rocm.moe" if name == "moe" else "rocm.silu_mul"} <= set(found[0]["chosen"])


@pytest.mark.parametrize("name", ["dense", "moe"])
def test_tokens_over_two_ranks_with_the_fused_reduction(name: str) -> None:
    found = ranks(2, SHIPPED / name, 100)
    for rank in found:
        same(name, rank["texts"])
        assert rank["texts"] == found[0]["texts"]
        assert rank["calls"]["aiter.dist.communication_op:tensor_model_parallel_fused_allreduce_rmsnorm"] > 100
    record("emulated", "mi300x", Verdict("AddRMSNorm", "rocm.reduce_add_rms_norm", f"{name} over two ranks", "passed"))


def test_tokens_with_the_portable_kernels_interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    (found,) = ranks(1, SHIPPED / "dense", 5, timeout=1200)
    sizes = [len(p) + len(a) for _, p, a in lines(7, 1000)]
    shortest = sorted(range(1000), key=lambda i: (sizes[i], i))[:5]
    theirs = json.loads((HERE / "answers-dense.json").read_text())["lines"]
    assert found["texts"] == [theirs[i]["text"] for i in shortest]
    assert {"triton.decode_whole", "triton.attention_prefill", "rocm.attention_decode"} <= set(found["chosen"])


FEW = {"key_heads": 4, "value_heads": 8, "heads": 4, "kv_heads": 1, "head_dim": 64, "hidden": 256, "intermediate": 128}


@pytest.mark.oracle
@pytest.mark.parametrize(
    ("moe", "scheme", "bound", "kernels"),
    [
        (False, "", 0.05, {"rocm.packed_bf16", "rocm.attention_decode", "rocm.silu_mul"}),
        (True, "", 0.05, {"rocm.packed_bf16", "rocm.attention_decode", "rocm.moe"}),
        # each rank rounds its own share of an input by a scale of its own
        (False, "fp8_channel", 0.3, {"rocm.packed_a8w8", "rocm.plain_a8w8", "rocm.quantize_token"}),
    ],
    ids=["dense", "moe", "fp8_channel"],
)
def test_four_ranks_of_random_models_give_the_logits_of_one_process(
    moe: bool, scheme: str, bound: float, kernels: set[str], tmp_path: Path, calls: dict[str, int]
) -> None:
    """4 and 8 heads of linear attention, 4 and 1 of full: each rank has two rows of b, two of a, and the KV head."""
    pytest.importorskip("transformers")
    import oracle

    # all experts are chosen: a near tie between two would be another sum
    folder = oracle.random_checkpoint(tmp_path / "plain", **FEW, moe=moe, experts=4, top_k=4, seed=3)
    if scheme:
        also = ["--also", "in_proj_b", "--also", "in_proj_a"]
        assert main(["quantize", str(folder), "--scheme", scheme, "--out", str(tmp_path / scheme), *also]) == 0
        folder = tmp_path / scheme
    model = Qwen35(configure(str(folder)).typed("bfloat16"), runtime())
    load(model, folder)
    want = torch.tensor(logits(model))
    for rank in ranks(4, folder, 0):
        got = torch.tensor(rank["logits"])
        apart = float((got - want).square().mean().sqrt())
        assert apart < bound * float(want.std()), apart
        best = want.topk(2).values
        differ = got.argmax(1) != want.argmax(1)
        assert not differ.any() or float((best[:, 0] - best[:, 1])[differ].max()) < 4 * apart
        assert {*kernels, "rocm.reduce_add_rms_norm"} <= set(rank["chosen"])


ERROR = 0.05  # of a logit in bfloat16, on these checkpoints


def same(name: str, texts: list[str]) -> None:
    """What transformers answers in float32, but for lines whose two best logits lie closer than twice the error."""
    theirs = json.loads((HERE / f"answers-{name}.json").read_text())["lines"]
    differ = [i for i, text in enumerate(texts) if text != theirs[i]["text"]]
    assert all(theirs[i]["margin"] < 2 * ERROR for i in differ), [(texts[i], theirs[i]) for i in differ]
    assert len(differ) <= 2, differ
