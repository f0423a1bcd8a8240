"""Quantized checkpoints from file to logits: what is written loads strictly, and computes what the scheme says."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import Pretend, Tensors, config, parts, save, tensors
from dequantized import Emulated
from facts import runtime, value
from hal_models.commands.loading import SHIPPED
from hal_models.engine import Engine, Request, score
from hal_models.quantization import Rule
from hal_models.qwen3_5.config import configure
from hal_models.qwen3_5.model import Qwen35
from hal_models.qwen3_5.weights import load
from hal_models.tasks import lines
from hal_models.writing import quantize
from safetensors.torch import load_file, save_file

from hal.cli import main
from hal.errors import CheckpointError
from hal.formats import SCHEMES, Encoded, Quantized
from hal.ops import Linear
from hal.ops.formulas import encode, real

WAYS = {
    "fp8_channel": ("quark", "compressed-tensors", "modelopt"),
    "fp8_block": ("fp8", "compressed-tensors"),
    "mxfp4": ("quark",),
    "nvfp4": ("modelopt", "compressed-tensors"),
    "fp8_tensor": ("modelopt", "compressed-tensors"),
}
FIXED = ("nvfp4", "fp8_tensor")  # scales of inputs come from a calibration
LINES = [prompt.encode()[:3] for _, prompt, _ in lines(7, 6)]  # an input near a boundary is rare in three tokens


def quantized(source: str | Path, out: Path, scheme: str, dialect: str, *more: str) -> Path:
    if scheme in FIXED or scheme == "nvfp4+fp8":
        file = out.with_suffix(".txt")
        file.write_text("\n".join(prompt + answer for _, prompt, answer in lines(3, 24)) + "\n")
        more = (*more, "--calibrate", str(file))
    assert main(["quantize", str(source), "--scheme", scheme, "--dialect", dialect, "--out", str(out), *more]) == 0
    return out


class Written(dict[tuple[str, str], Path]):
    """Each shipped checkpoint in each scheme, in its first dialect, written when it is first asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __missing__(self, key: tuple[str, str]) -> Path:
        name, scheme = key
        self[key] = quantized(f"tiny-{name}", self.folder / f"{name}-{scheme}", scheme, WAYS[scheme][0])
        return self[key]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    return Written(tmp_path_factory.mktemp("quantized"))


def built(folder: Path, dtype: str | None = None, rank: int = 0, world: int = 1, **policy: Any) -> Qwen35:
    comm = Pretend(rank, world) if world > 1 else None
    model = Qwen35(configure(str(folder)).typed(dtype), runtime("cpu", comm=comm, **policy))
    load(model, folder)
    return model


def changed(folder: Path, out: Path, **edits: Any) -> Path:
    """A copy of a checkpoint with tensors replaced, added, or with None left out."""
    shutil.copytree(folder, out)
    held = load_file(out / "model.safetensors") | edits
    save_file({n: t.contiguous() for n, t in held.items() if t is not None}, out / "model.safetensors")
    return out


def agrees(folder: Path) -> None:
    """Each line's logits are the emulated ones, but where an input fell on the other side of a rounding boundary."""
    emulated = Emulated(folder)
    got = score(built(folder, "float32", activations="checkpoint"), [list(line) for line in LINES])
    off = [
        float((logits.double() - emulated.logits(list(line))).abs().max())
        for logits, line in zip(got, LINES, strict=True)
    ]
    assert max(off) < 1.0
    assert sum(error > 1e-4 for error in off) <= len(LINES) // 2, off


def refused(folder: Path, *words: str) -> None:
    with pytest.raises(CheckpointError) as error:
        built(folder)
    for word in words:
        assert word in str(error.value), str(error.value)


@pytest.mark.parametrize("scheme", WAYS)
@pytest.mark.parametrize("name", ["dense", "moe"])
def test_logits_are_those_of_the_real_weights_with_inputs_rounded(name: str, scheme: str, written: Any) -> None:
    agrees(written[name, scheme])
    (plain,), (real,) = ([Emulated(f).logits(list(LINES[0]))] for f in (SHIPPED / name, written[name, scheme]))
    assert float((plain - real).abs().max()) > 0.01


@pytest.mark.parametrize("scheme", ["mxfp4", "nvfp4"])
@pytest.mark.parametrize("name", ["dense", "moe"])
def test_inputs_of_4_bits_stay_as_they_are_where_the_device_multiplies_none(
    name: str, scheme: str, written: Any
) -> None:
    model = built(written[name, scheme], "float32")
    emulated, rounded = (Emulated(written[name, scheme], plain) for plain in (True, False))
    for logits, line in zip(score(model, [list(line) for line in LINES[:2]]), LINES, strict=False):
        want = emulated.logits(list(line))
        assert float((logits.double() - want).abs().max()) < 1e-4
        assert float((rounded.logits(list(line)) - want).abs().max()) > 0.01
    report = model.runtime.report()
    assert f"activations: {scheme} takes them as they are: rounding them to float4_e2m1 needs fp4_e2m1" in report
    assert f"{scheme} (activations as they are)" in report
    there = built(written[name, scheme], activations="checkpoint").runtime.report()
    assert "as they are" not in there
    assert "x float4_e2m1" in there


@pytest.mark.parametrize("scheme", WAYS)
@pytest.mark.parametrize(("name", "least"), [("dense", 0.99), ("moe", 0.95)])
def test_answers_stay_right(name: str, least: float, scheme: str, written: Any) -> None:
    argv = ["accuracy", str(written[name, scheme]), "--lines", "40", "--least", str(least)]
    assert main(argv) == 0


@pytest.mark.parametrize(("scheme", "dialect"), [(s, d) for s, dialects in WAYS.items() for d in dialects[1:]])
@pytest.mark.parametrize("name", ["dense", "moe"])
def test_every_dialect_gives_the_same_model(name: str, scheme: str, dialect: str, written: Any, tmp_path: Path) -> None:
    other = quantized(f"tiny-{name}", tmp_path / "other", scheme, dialect)
    got, want = (parts(built(f, activations="checkpoint")) for f in (other, written[name, scheme]))
    assert got.keys() == want.keys()
    turned = [part for part in want if scheme == "nvfp4" and ("_global" in part or ".input_scale" in part)]
    assert bool(turned) == (scheme == "nvfp4")
    for part in turned:  # one dialect has what the other divides by
        torch.testing.assert_close(got.pop(part), want.pop(part), rtol=2**-22, atol=0)
    assert all(torch.equal(got[part].view(torch.uint8), want[part].view(torch.uint8)) for part in want)


def test_the_report_names_the_groups(written: Any) -> None:
    report = built(written["dense", "fp8_channel"]).runtime.report()
    assert "q,k,v,z fp8_channel; b,a as dtype" in report
    assert "nothing fell back" in report


def test_all_six_in_one_group(tmp_path: Path) -> None:
    also = ("--also", "in_proj_b", "--also", "in_proj_a")
    folder = quantized("tiny-dense", tmp_path / "all", "fp8_channel", "quark", *also)
    assert "q,k,v,z,b,a fp8_channel" in built(folder).runtime.report()
    agrees(folder)


def test_each_tensor_is_needed_and_no_other_is_taken(written: Any, tmp_path: Path) -> None:
    folder = written["dense", "fp8_channel"]
    names = ["layers.0.linear_attn.in_proj_qkv", "layers.3.self_attn.k_proj", "layers.1.mlp.down_proj"]
    for index, name in enumerate(names):
        scale = f"model.{name}.weight_scale"
        refused(changed(folder, tmp_path / f"{index}", **{scale: None}), f"tensors missing: {scale}")
    stray = "model.layers.0.linear_attn.in_proj_a.weight_scale"
    refused(changed(folder, tmp_path / "stray", **{stray: torch.ones(4, 1)}), f"nothing takes: {stray}")
    both = "model.layers.0.mlp.up_proj.weight_scale_inv"
    refused(changed(folder, tmp_path / "both", **{both: torch.ones(4, 2)}), f"nothing takes: {both}")


def test_a_dtype_that_the_scheme_does_not_expect(written: Any, tmp_path: Path) -> None:
    folder = written["dense", "fp8_channel"]
    wide, narrow = "model.layers.0.mlp.up_proj.weight", "model.layers.0.linear_attn.in_proj_a.weight"
    held = load_file(folder / "model.safetensors")
    refused(
        changed(folder, tmp_path / "wide", **{wide: held[wide].bfloat16()}),
        wide, "expected torch.float8_e4m3fn, got torch.bfloat16",
    )  # fmt: skip
    refused(
        changed(folder, tmp_path / "narrow", **{narrow: held[narrow].to(torch.float8_e4m3fn)}),
        narrow, "expected torch.bfloat16, got torch.float8_e4m3fn",
    )  # fmt: skip


@pytest.mark.parametrize(("value", "shown"), [(float("nan"), "nan"), (float("inf"), "inf"), (-1.0, "-1")])
def test_a_scale_that_is_none(value: float, shown: str, written: Any, tmp_path: Path) -> None:
    folder = written["dense", "fp8_channel"]
    name = "model.layers.0.mlp.up_proj.weight_scale"
    scale = load_file(folder / "model.safetensors")[name]
    scale[3] = value
    refused(
        changed(folder, tmp_path / "odd", **{name: scale}),
        name,
        f"expected scales that are numbers of 0 or more, got {shown}",
    )


def test_scales_of_keys_and_values_are_reported(written: Any, tmp_path: Path) -> None:
    names = [f"model.layers.3.self_attn.{part}_scale" for part in "kv"]
    scales = {name: torch.tensor([n / 4]) for n, name in enumerate(names, 1)}
    folder = changed(written["dense", "fp8_channel"], tmp_path / "kv", **scales)
    model = Qwen35(configure(str(folder)), runtime())
    skipped = load(model, folder).skipped
    assert [sorted(found) for why, found in skipped.items() if "keys and values" in why] == [names]
    assert "scales: 2 of keys and values, 0.25 to 0.5, are not used: pages hold bfloat16" in model.runtime.report()
    odd = changed(written["dense", "fp8_channel"], tmp_path / "odd", **{names[0]: torch.tensor([float("nan")])})
    refused(odd, names[0], "numbers of 0 or more")


@pytest.mark.parametrize("said", [{"kv_cache_quant_algo": "FP8"}, {"kv_cache_scheme": {"num_bits": 8}}])
def test_pages_in_fp8_are_refused_with_their_reason(said: dict[str, Any], written: Any, tmp_path: Path) -> None:
    folder = changed(written["dense", "fp8_tensor"], tmp_path / "kv")
    cfg = json.loads((folder / "config.json").read_text())
    cfg["quantization_config"] |= said
    (folder / "config.json").write_text(json.dumps(cfg))
    report = built(folder).runtime.report()
    assert "keys and values: kept in bfloat16, for no kernel has pages in FP8; the file has " in report
    assert "keys and values" not in built(written["dense", "fp8_tensor"]).runtime.report()


@pytest.mark.parametrize(("scheme", "parts_"), [("nvfp4", 3), ("mxfp4", 1), ("fp8_tensor", 2), ("fp8_block", 1)])
def test_no_sidecar_has_a_default(scheme: str, parts_: int, written: Any, tmp_path: Path) -> None:
    folder, module = written["dense", scheme], "model.layers.1.mlp.down_proj."
    held = load_file(folder / "model.safetensors")
    beside = [name for name in held if name.startswith(module) and name != f"{module}weight"]
    assert len(beside) == parts_
    for index, name in enumerate(beside):
        other = changed(folder, tmp_path / str(index), **{name: None})
        with pytest.raises(CheckpointError, match=f"tensors missing: {name}"):
            built(other, activations="checkpoint")


def test_a_block_of_zeros_whose_scale_is_no_number(written: Any, tmp_path: Path) -> None:
    """Exporters were seen to write 0x7F for it: refused, not repaired."""
    folder, name = written["dense", "nvfp4"], "model.layers.1.mlp.down_proj.weight"
    held = load_file(folder / "model.safetensors")
    codes, scale = held[name].clone(), held[f"{name}_scale"].view(torch.uint8).clone()
    codes[2, 8:16], scale[2, 1] = 0, 0x7F
    odd = {name: codes, f"{name}_scale": scale.view(torch.float8_e4m3fn)}
    refused(changed(folder, tmp_path / "nan", **odd), f"{name}_scale", "numbers of 0 or more, got nan")
    scale[2, 1] = 0x7E
    model = built(changed(folder, tmp_path / "zero", **odd | {f"{name}_scale": scale.view(torch.float8_e4m3fn)}))
    assert not values(model, "layers.1.mlp", "down")[2, 16:32].any()


def fused(folder: Path, out: Path) -> Path:
    """A copy of a checkpoint with the tensors of all experts of a layer in one, as some files have them."""
    shutil.copytree(folder, out)
    held = load_file(out / "model.safetensors")
    found: Tensors = {}
    each: dict[str, dict[int, dict[str, torch.Tensor]]] = {}
    for name, tensor in held.items():
        stem, dot, rest = name.partition(".experts.")
        if not dot:
            found[name] = tensor
            continue
        expert, matrix, leaf = rest.split(".")
        suffix = {"weight": ""}.get(leaf, "_" + leaf.removeprefix("weight_"))
        part = "gate_up_proj" if matrix != "down_proj" else "down_proj"
        each.setdefault(f"{stem}.experts.{part}{suffix}", {}).setdefault(int(expert), {})[matrix] = tensor
    for name, experts in each.items():
        rows = []
        for expert in range(len(experts)):
            pieces = [experts[expert][m] for m in ("gate_proj", "up_proj", "down_proj") if m in experts[expert]]
            if "input_scale" in name:
                rows.append(pieces[0])
            else:
                rows.append(torch.cat(pieces) if pieces[0].dim() else torch.stack(pieces))
        found[name] = torch.stack(rows)
    save_file({n: t.contiguous() for n, t in found.items()}, out / "model.safetensors")
    return out


@pytest.mark.parametrize("scheme", WAYS)
def test_experts_in_one_tensor_are_the_same_model(scheme: str, written: Any, tmp_path: Path) -> None:
    folder = written["moe", scheme]
    got, want = (parts(built(f, activations="checkpoint")) for f in (fused(folder, tmp_path / "one"), folder))
    assert all(torch.equal(got[part].view(torch.uint8), want[part].view(torch.uint8)) for part in want)


def square(tmp_path: Path, scale: torch.Tensor) -> Tensors:
    """Parts of a checkpoint whose out_proj is [12, 48] with this scale, loaded by one rank of two."""
    cfg = config(dtype="bfloat16", quantization_config=PTPC)
    named = {name: tensor.bfloat16() for name, tensor in tensors(cfg).items()}
    weight = "model.layers.0.linear_attn.in_proj_z.weight"
    named[weight] = torch.ones(48, 12).to(torch.float8_e4m3fn)
    named[f"{weight}_scale"] = scale
    return parts(built(save(tmp_path / "square", cfg, named), rank=1, world=2))


def _quark(**where: Any) -> dict[str, Any]:
    form = {"dtype": "fp8_e4m3", "qscheme": "per_channel", "ch_axis": 0, "is_dynamic": False}
    entry = {"weight": form, "input_tensors": {**form, "ch_axis": 1, "is_dynamic": True}}
    none = {"weight": None, "input_tensors": None}
    return {"quant_method": "quark", "global_quant_config": none, "layer_quant_config": {"*in_proj_z": entry}, **where}


PTPC = _quark()


@pytest.mark.parametrize("shape", [(48,), (48, 1), (1,), ()], ids=str)
def test_a_row_is_scaled_by_its_own_scale_in_every_shape(shape: tuple[int, ...], tmp_path: Path) -> None:
    scale = torch.arange(1.0, 49.0) if 48 in shape else torch.tensor([7.0])
    got = square(tmp_path, scale.reshape(shape))["layers.0.linear_attn.in_proj.z_scale"]
    assert torch.equal(got, scale.expand(48)[24:])


@pytest.mark.parametrize("shape", [(47,), (1, 48), (12, 4)], ids=str)
def test_scales_of_another_shape_are_refused(shape: tuple[int, ...], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"in_proj_z\.weight_scale: expected \[48\], got"):
        square(tmp_path, torch.ones(shape))


@pytest.mark.parametrize("world", [2, 4])
def test_each_rank_holds_its_rows_and_their_scales(world: int, tmp_path: Path) -> None:
    cfg = config(dtype="bfloat16")
    plain = save(tmp_path / "plain", cfg, {n: (t % 251).bfloat16() for n, t in tensors(cfg).items()})
    folder = quantized(plain, tmp_path / "fp8", "fp8_channel", "quark")
    whole = parts(built(folder))
    ranks = [parts(built(folder, rank=rank, world=world)) for rank in range(world)]
    for part in ("in_proj.q", "in_proj.z", "in_proj.q_scale", "in_proj.v_scale"):
        name = f"layers.0.linear_attn.{part}"
        assert torch.equal(torch.cat([each[name].float() for each in ranks]), whole[name].float())
    # rows of an output that ranks add up are whole on each
    for rank in ranks:
        name = "layers.0.linear_attn.out_proj.weight_scale"
        assert torch.equal(rank[name], whole[name])
    # more ranks than KV heads: each holds the head of its queries, and that head's scales
    for index, rank in enumerate(ranks):
        name = "layers.1.self_attn.qkv_proj.k_scale"
        kept, first = 16 // min(world, 2), index * 2 // world if world > 2 else index
        assert torch.equal(rank[name], whole[name][first * kept : (first + 1) * kept])


def test_projections_of_one_input_whose_fixed_scales_differ(written: Any, tmp_path: Path) -> None:
    """Each has a product of its own; the policy may give all the largest; gate and up are one product always."""
    folder = written["dense", "fp8_tensor"]
    z, k, up = (
        f"model.layers.{n}.input_scale" for n in ("0.linear_attn.in_proj_z", "3.self_attn.k_proj", "1.mlp.up_proj")
    )
    refused(changed(folder, tmp_path / "less", **{z: None}), f"tensors missing: {z}")
    held = load_file(folder / "model.safetensors")
    more = {name: held[name] * factor for name, factor in ((z, 1.5), (k, 0.5))}
    other = changed(folder, tmp_path / "other", **more)
    report = built(other).runtime.report()
    assert "q,k,v fp8_tensor; z fp8_tensor; b,a as dtype" in report
    assert "k fp8_tensor" in report
    assert "input scales" not in report
    agrees(other)
    largest = built(other, input_scales="maximum")
    notes = [note for note in largest.runtime.notes if note.startswith("input scales")]
    assert [note.split(": ")[1] for note in notes] == ["layers.0.linear_attn.in_proj", "layers.3.self_attn.qkv_proj"]
    assert all(note in largest.runtime.report() for note in notes)
    got = parts(largest)
    assert float(got["layers.0.linear_attn.in_proj.input_scale_qkvz"]) == float(more[z])
    assert float(got["layers.3.self_attn.qkv_proj.input_scale"]) == float(more[k]) * 2
    last = changed(folder, tmp_path / "last", **{up: held[up] * 2})
    refused(last, up, "the scale of the same input", "HAL_INPUT_SCALES=maximum")
    built(last, input_scales="maximum")
    stray = "model.layers.0.linear_attn.in_proj_a.input_scale"
    built(changed(folder, tmp_path / "stray", **{stray: torch.tensor(1.0)}))  # left out, with a note


MIXED = {"mxfp4+fp8": ("quark",), "mxfp4+fp8_all": ("quark",), "nvfp4+fp8": ("modelopt", "compressed-tensors")}


@pytest.mark.parametrize("scheme", MIXED)
@pytest.mark.parametrize("name", ["dense", "moe"])
def test_mixes_of_schemes_compute_what_each_says(name: str, scheme: str, tmp_path: Path) -> None:
    folder = quantized(f"tiny-{name}", tmp_path / "mixed", scheme, MIXED[scheme][0])
    agrees(folder)
    report = built(folder, activations="checkpoint").runtime.report()
    mixers = {"mxfp4+fp8": "q,k,v,z fp8_channel; b,a as dtype", "mxfp4+fp8_all": "q,k,v,z,b,a fp8_channel",
              "nvfp4+fp8": "q,k,v,z fp8_tensor; b,a as dtype"}  # fmt: skip
    assert mixers[scheme] in report
    assert f"{'gate_up' if name == 'dense' else 'routed'} {scheme[:5]}" in report
    for dialect in MIXED[scheme][1:]:
        other = quantized(f"tiny-{name}", tmp_path / dialect, scheme, dialect)
        assert built(other, activations="checkpoint").runtime.report() == report


def test_a_mix_in_modelopt_s_words_names_each_module(tmp_path: Path) -> None:
    folder = quantized("tiny-dense", tmp_path / "mixed", "nvfp4+fp8", "modelopt")
    found = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert found["quant_algo"] == "MIXED_PRECISION"
    layers = found["quantized_layers"]
    assert layers["model.layers.0.linear_attn.out_proj"] == {"quant_algo": "FP8"}
    assert layers["model.layers.0.mlp.down_proj"] == {"quant_algo": "NVFP4", "group_size": 16}
    assert not any("*" in name for name in layers)


def test_a_head_in_its_own_scheme(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "linear_value_head_dim": 16, "linear_key_head_dim": 8, "intermediate_size": 64}
    cfg = config(dtype="bfloat16", vocab_size=256, **sizes)
    made = {n: value(n, t.shape, "bfloat16", 0.0, 0.125) for n, t in tensors(cfg).items()}
    folder = quantized(save(tmp_path / "plain", cfg, made), tmp_path / "out", "nvfp4+fp8", "modelopt")
    layers = json.loads((folder / "config.json").read_text())["quantization_config"]["quantized_layers"]
    assert layers["lm_head"] == {"quant_algo": "NVFP4", "group_size": 16}
    agrees(folder)
    head = next(line for line in built(folder).runtime.report().splitlines() if line.startswith("head "))
    assert "nvfp4" in head


def ruled(name: str, out: Path, dialect: str, *rules: Rule) -> Path:
    """A shipped checkpoint quantized by rules of one's own."""
    out.mkdir()
    quantize(SHIPPED / name, out, rules, dialect, lines=[prompt + answer for _, prompt, answer in lines(3, 8)])
    return out


def test_a_layer_is_fused_by_its_own_scheme_and_no_other_s(tmp_path: Path) -> None:
    """One layer as it is, one with q,k,v,z in nvfp4 beside plain b and a, one in fp8 whole, one with nvfp4 experts."""
    nvfp4, fp8 = SCHEMES["nvfp4"], SCHEMES["fp8_channel"]
    modules = ["layers.1.linear_attn.in_proj_qkv", "layers.1.linear_attn.in_proj_z"]
    rules = [Rule("layers.1.linear_attn.out_proj"), *(Rule(m, nvfp4) for m in modules)]
    rules += [Rule("layers.2", fp8), Rule("layers.3.mlp", nvfp4)]
    folder = ruled("dense", tmp_path / "mixed", "modelopt", *rules)
    found = {group.name: group for group in built(folder, activations="checkpoint").runtime.groups}

    def kernels(site: str) -> tuple[str, set[str]]:
        (choice,) = found[site].choices.values()
        made = {str(form) for _, c in choice.walk() for form in outs(c.op) if isinstance(form, Quantized)}
        return choice.op.quantized(), made

    def outs(op: Any) -> tuple[Any, ...]:
        out = getattr(op, "out", None)
        return out if isinstance(out, tuple) else (out,)

    assert kernels("layers.0.linear_attn.in_proj") == ("", set())
    assert kernels("layers.1.linear_attn.in_proj") == ("q,k,v,z nvfp4; b,a as dtype", {str(nvfp4.activations)})
    assert kernels("layers.2.linear_attn.in_proj") == ("q,k,v,z,b,a fp8_channel", {str(fp8.activations)})
    assert kernels("layers.0.mlp") == ("", set())
    assert kernels("layers.2.mlp")[1] == {str(fp8.activations)}
    assert kernels("layers.3.mlp")[1] == {str(nvfp4.activations)}
    agrees(folder)


def test_a_draft_head_has_a_scheme_of_its_own(tmp_path: Path) -> None:
    rules = Rule("mtp.fc"), Rule("mtp", SCHEMES["fp8_block"]), Rule("layers.*.mlp", SCHEMES["nvfp4"])
    folder = ruled("dense", tmp_path / "mixed", "compressed-tensors", *rules)

    def tokens(draft: int) -> tuple[list[list[int]], Qwen35]:
        model = Qwen35(configure(str(folder)).typed("float32"), runtime(), draft)
        load(model, folder)
        engine = Engine(model, slots=2, pages=16)
        stops = frozenset({10})
        return engine.generate([Request(prompt.encode(), 12, stops=stops) for _, prompt, _ in lines(7, 2)]), model

    (plain, _), (drafted, model) = tokens(0), tokens(2)
    assert drafted == plain
    report = model.runtime.report()
    assert "gate_up fp8_block" in next(line for line in report.splitlines() if line.startswith("mtp.layers.0.mlp"))
    gone = "mtp.layers.0.mlp.up_proj.weight_scale"
    other = changed(folder, tmp_path / "gone", **{gone: None})
    with pytest.raises(CheckpointError, match=f"tensors missing: {gone}"):
        load(Qwen35(configure(str(other)), runtime(), 2), other)
    built(other)  # without drafts it is left out, with a note


def test_experts_of_a_rank_keep_their_scales(written: Any) -> None:
    folder, world = written["moe", "nvfp4"], 2
    whole = parts(built(folder))
    for rank in range(world):
        mine = parts(built(folder, rank=rank, world=world))
        for kind in ("", "_scale", "_global"):
            name = f"layers.0.mlp.experts_gate_up{kind}"
            halves = [half.chunk(world, 1)[rank] for half in whole[name].chunk(2, 1)]  # gate above up
            assert torch.equal(mine[name].view(torch.uint8), torch.cat(halves, 1).view(torch.uint8))
        codes, scale, within = (f"layers.0.mlp.experts_down{kind}" for kind in ("", "_scale", "_global"))
        assert torch.equal(mine[codes], whole[codes].chunk(world, 2)[rank])
        assert torch.equal(mine[within], whole[within])
        each = mine[codes].shape[2] * 2 // mine[scale].shape[2]  # columns of a block of the share
        want = whole[scale].view(torch.uint8).repeat_interleave(16 // each, 2).chunk(world, 2)[rank]
        assert torch.equal(mine[scale].view(torch.uint8), want)


def test_codes_and_scales_as_slices_of_one_buffer() -> None:
    op = Linear(columns=64, rows=32, x=SCHEMES["nvfp4"].activations, scheme=SCHEMES["nvfp4"])  # type: ignore[arg-type]
    whole = torch.randint(1, 120, (32, 32 + 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    x = encode(value("x", (5, 64), "float32"), op.x, torch.tensor([0.01]))  # type: ignore[arg-type]
    beside = torch.cat([x.value, x.scale.view(torch.uint8)], 1)
    codes, scale = beside[:, :32], beside[:, 32:].view(torch.float8_e4m3fn)
    found = []
    for dense in (False, True):
        rt = runtime()
        bound = rt.bind(op, "out")
        given = {"weight": whole[:, :32], "weight_scale": whole[:, 32:].view(torch.float8_e4m3fn)}
        given = {name: t.clone() if dense else t for name, t in given.items()}
        rt.group_of(bound).fill(given | {"weight_global": torch.tensor([0.01]), "input_scale": torch.tensor([0.01])})
        found.append(bound(x if dense else Encoded(codes, scale, x.within)))
    assert torch.equal(*found)


@pytest.mark.parametrize("scheme", FIXED)
def test_each_expert_has_its_own_scale_of_inputs(scheme: str, written: Any) -> None:
    held = parts(built(written["moe", scheme], activations="checkpoint"))
    down = held["layers.0.mlp.input_scale_experts_down"]
    assert len(down) > 1 < len(set(down.tolist()))


def values(built_: Qwen35, site: str, part: str) -> torch.Tensor:
    """The real values of a part of a group."""
    group = next(g for g in built_.runtime.groups if g.name == site)
    op = next(op for op in group.members.values() if part in {p.name for p in op.params()})
    named = parts(built_)
    codes, scale, form = named[f"{site}.{part}"], named[f"{site}.{part}_scale"], op.schemes()[0].weight
    block = codes.shape[0] // scale.shape[0], codes.shape[1] * form.packs // scale.shape[1]
    whole = named.get(f"{site}.{part}_global")
    return real(codes, scale, replace(form, scale=replace(form.scale, block=block)), torch.float64, whole)


@pytest.mark.parametrize("world", [2, 8])
@pytest.mark.parametrize("scheme", ["fp8_block", "mxfp4", "nvfp4"])
def test_blocks_that_a_share_cuts_keep_their_scale(scheme: str, world: int, tmp_path: Path) -> None:
    """Rows and columns of a rank need not be whole blocks: 256 rows over 8 ranks are quarters of two."""
    sizes = {"hidden_size": 64, "linear_value_head_dim": 16, "linear_key_head_dim": 8, "intermediate_size": 256}
    cfg = config(dtype="bfloat16", num_key_value_heads=8, vocab_size=256, **sizes)
    odd = {n: ((t % 509) * (1 + t // 3000 % 40)).bfloat16() for n, t in tensors(cfg).items()}
    folder = quantized(save(tmp_path / "plain", cfg, odd), tmp_path / "out", scheme, WAYS[scheme][0])
    whole, ranks = built(folder), [built(folder, rank=rank, world=world) for rank in range(world)]
    for site, part, axis in (
        ("layers.0.linear_attn.in_proj", "z", 0),
        ("layers.0.linear_attn.out_proj", "weight", 1),
        ("layers.0.mlp", "up", 0),
        ("layers.0.mlp", "down", 1),
        ("layers.1.self_attn.qkv_proj", "v", 0),
    ):
        joined = torch.cat([values(each, site, part) for each in ranks], axis)
        assert torch.equal(joined, values(whole, site, part)), (site, part)
    assert len(set(values(whole, "layers.0.mlp", "up").abs().amax(1).tolist())) > 1


def test_what_cannot_be_quantized_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str], written: Any) -> None:
    def says(*argv: str) -> str:
        assert main(["quantize", *argv]) == 1
        return capsys.readouterr().err

    there, new = str(tmp_path), str(tmp_path / "new")
    assert "is there already" in says("tiny-dense", "--scheme", "fp8_channel", "--out", there)
    assert "did you mean 'fp8_channel'" in says("tiny-dense", "--scheme", "fp8_chanel", "--out", new)
    assert "unknown dialect 'quack'" in says(
        "tiny-dense", "--scheme", "fp8_channel", "--dialect", "quack", "--out", new
    )
    assert "--calibrate FILE" in says("tiny-dense", "--scheme", "fp8_tensor", "--out", new)
    assert "--calibrate" in says("tiny-dense", "--scheme", "nvfp4", "--out", new, "--calibrate", f"{there}/no.txt")
    (tmp_path / "empty.txt").write_text("\n")
    empty = f"{there}/empty.txt"
    assert "got none" in says("tiny-dense", "--scheme", "nvfp4", "--out", new, "--calibrate", empty)
    (tmp_path / "empty.txt").unlink()
    again = str(written["dense", "fp8_channel"])
    nothing = ("--scheme", "fp8_channel", "--exclude", "*", "--out", new)
    assert "fp8_channel quantizes none of its" in says("tiny-dense", *nothing)
    assert "is quantized already" in says(again, "--scheme", "fp8_channel", "--out", new)
    assert list(tmp_path.iterdir()) == []


def test_a_large_checkpoint_is_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: Any) -> None:
    monkeypatch.setattr("hal_models.writing.FILE_BYTES", 1_000_000)
    folder = quantized("tiny-dense", tmp_path / "split", "fp8_channel", "quark")
    assert len(list(folder.glob("*.safetensors"))) > 2
    total = json.loads((folder / "model.safetensors.index.json").read_text())["metadata"]["total_size"]
    assert total == sum(t.nbytes for path in folder.glob("*.safetensors") for t in load_file(path).values())
    got, want = parts(built(folder)), parts(built(written["dense", "fp8_channel"]))
    assert all(torch.equal(got[part].float(), want[part].float()) for part in want)
