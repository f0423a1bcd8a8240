"""Loading: one model in every form that files have, and what is missing, left over or does not fit is an error."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import Tensors, config, loaded, model, nested, parts, per_expert, prefixed, save, tensors
from hal_models.files import Files
from hal_models.qwen3_5.weights import PREFIXES, Loaded, load

from hal.errors import CheckpointError

LINEAR = "model.layers.0.linear_attn."
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def refused(folder: Path, cfg: dict[str, Any], named: Tensors, *words: str) -> None:
    with pytest.raises(CheckpointError) as error:
        loaded(folder, cfg, named)
    for word in (folder.name, *words):
        assert word in str(error.value)


def same(got: Tensors, wanted: Tensors) -> bool:
    return got.keys() == wanted.keys() and all(torch.equal(got[name], wanted[name]) for name in wanted)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Tensors:
    cfg = config()
    return loaded(tmp_path_factory.mktemp("plain"), cfg, tensors(cfg))[0]


@pytest.mark.parametrize("visual", ["", "model.visual.", "visual."])
@pytest.mark.parametrize("form", ["flat", "flat, of the whole", "nested"])
@pytest.mark.parametrize("prefix", PREFIXES)
def test_one_model_under_every_name(prefix: str, form: str, visual: str, tmp_path: Path, plain: Tensors) -> None:
    cfg = config()
    named = prefixed(tensors(cfg), prefix)
    extra = {f"{visual}blocks.0.attn.qkv.weight": torch.ones(3, 2), f"{visual}pos_embed": torch.ones(2)}
    whole = {"model_type": "qwen3_5", "architectures": ["Qwen3_5ForConditionalGeneration"]}
    written = {"flat": cfg, "flat, of the whole": {**cfg, **whole}, "nested": nested(cfg)}[form]
    got, report = loaded(tmp_path, written, named | (extra if visual else {}))
    assert same(got, plain)
    assert report == Loaded(len(named), {"the vision tower": sorted(extra)} if visual else {})


def test_a_head_beside_the_language_model(tmp_path: Path, plain: Tensors) -> None:
    named = prefixed(tensors(config()), "language_model.model.")
    named["language_model.lm_head.weight"] = named.pop(HEAD)
    assert same(loaded(tmp_path, config(), named)[0], plain)
    named[HEAD] = torch.zeros(40, 12)
    refused(tmp_path, config(), named, "nothing takes: language_model.lm_head.weight")


def test_two_prefixes_or_none(tmp_path: Path) -> None:
    named = tensors(config())
    both = named | prefixed(named, "model.language_model.")
    refused(tmp_path, config(), both, "model.language_model. and model.")
    refused(tmp_path, config(), prefixed(named, "transformer."), "got none", *PREFIXES)
    mixed = named | {"model.language_model.norm.weight": named["model.norm.weight"]}
    refused(tmp_path, config(), mixed, "nothing takes: model.language_model.norm.weight")


@pytest.mark.parametrize("name", [n for n in tensors(config()) if n != EMBED])
def test_each_tensor_is_needed(name: str, tmp_path: Path) -> None:
    named = tensors(config())
    del named[name]
    refused(tmp_path, config(), named, f"tensors missing: {name}")


def test_tensors_that_nothing_takes_are_listed(tmp_path: Path) -> None:
    named = tensors(config())
    scale = f"{LINEAR}in_proj_a.weight_scale"
    refused(tmp_path, config(), named | {"model.layers.2.x": torch.ones(1), scale: torch.ones(1)}, "layers.2.x", scale)
    gone = {name: named[name] for name in (EMBED, HEAD)}
    refused(tmp_path, config(), gone, "tensors missing: ", " and 6 more")


def test_what_is_left_out_knowingly_says_why(tmp_path: Path, plain: Tensors) -> None:
    extra = {
        "the draft head": ["mtp.fc.weight", "model.mtp.norm.weight", "mtp.layers.0.self_attn.q_proj.weight_scale"],
        "scales of an input that is not quantized here": [f"{LINEAR}in_proj_a.input_scale"],
        "rotary frequencies, which are computed": ["model.layers.1.self_attn.rotary_emb.inv_freq"],
    }
    named = tensors(config()) | {name: torch.ones(1) for names in extra.values() for name in names}
    got, report = loaded(tmp_path, config(), named)
    assert same(got, plain)
    assert {why: sorted(names) for why, names in report.skipped.items()} == {w: sorted(n) for w, n in extra.items()}


def test_a_convolution_with_or_without_its_single_axis(tmp_path: Path, plain: Tensors) -> None:
    named = tensors(config())
    conv = f"{LINEAR}conv1d.weight"
    assert same(loaded(tmp_path, config(), named | {conv: named[conv].squeeze(1)})[0], plain)
    for wrong in (named[conv].transpose(1, 2), named[conv].transpose(0, 1), named[conv][:-1]):
        refused(tmp_path, config(), named | {conv: wrong}, conv, "expected [80, 4]", f"got {list(wrong.shape)}")


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("head", ["absent", "equal", "different"])
def test_tied_heads(head: str, tied: bool, tmp_path: Path) -> None:
    cfg = config(tie_word_embeddings=tied)
    named = tensors(config())
    named |= {"absent": {}, "equal": {HEAD: named[EMBED].clone()}, "different": {}}[head]
    if head == "absent":
        del named[HEAD]
    if (tied, head) == (True, "different"):
        refused(tmp_path, cfg, named, HEAD, f"differs from {EMBED}")
        return
    if (tied, head) == (False, "absent"):
        refused(tmp_path, cfg, named, f"tensors missing: {HEAD}")
        return
    built = model(save(tmp_path, cfg, named))
    report = load(built, tmp_path)
    got = {name: parts(built)[f"{name}.weight"] for name in ("embed", "head")}
    assert (got["embed"].data_ptr() == got["head"].data_ptr()) is tied
    assert torch.equal(got["head"], named[EMBED if tied else HEAD])
    told = {"the head, which is tied and says the same": [HEAD]}
    assert report.skipped == (told if tied and head == "equal" else {})


def test_experts_fused_or_one_by_one(tmp_path: Path) -> None:
    cfg = config(num_experts=4)
    named = tensors(cfg)
    fused, single = loaded(tmp_path, cfg, named)[0], per_expert(named)
    assert same(loaded(tmp_path, cfg, single)[0], fused)
    last = "model.layers.1.mlp.experts.3.up_proj.weight"
    refused(tmp_path, cfg, {n: t for n, t in single.items() if n != last}, f"tensors missing: {last}")
    refused(tmp_path, cfg, named | {last: single[last]}, f"nothing takes: {last}")
    more = {"model.layers.1.mlp.experts.4.up_proj.weight": single[last]}
    refused(tmp_path, cfg, single | more, "nothing takes: model.layers.1.mlp.experts.4.up_proj.weight")


@pytest.mark.parametrize("name", tensors(config(num_experts=4)))
def test_a_wrong_shape_names_tensor_expected_and_got(name: str, tmp_path: Path) -> None:
    cfg = config(num_experts=4)
    named = tensors(cfg)
    good, wrong = list(named[name].shape), torch.cat([named[name], named[name]])
    if "conv1d" in name:
        good = [good[0], good[2]]
    refused(tmp_path, cfg, named | {name: wrong}, name, f"expected {good}", f"got {list(wrong.shape)}")


@pytest.mark.parametrize("kind", ["float8_e4m3fn", "int8", "uint8", "bool"])
def test_numbers_of_another_kind_are_refused(kind: str, tmp_path: Path) -> None:
    name, named = f"{LINEAR}in_proj_z.weight", tensors(config())
    coded = {name: torch.ones(48, 12).to(getattr(torch, kind))}
    refused(tmp_path, config(dtype="bfloat16"), named | coded, name, "expected torch.bfloat16", f"got torch.{kind}")


@pytest.mark.parametrize("held", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("filed", ["float32", "bfloat16", "float16", "float64"])
def test_floating_numbers_become_the_dtype_of_the_model(filed: str, held: str, tmp_path: Path) -> None:
    cfg = config(dtype=held)
    named = {name: (tensor / 4096).to(getattr(torch, filed)) for name, tensor in tensors(cfg).items()}
    got = loaded(tmp_path, cfg, named)[0]
    assert torch.equal(got["embed.weight"], named[EMBED].to(getattr(torch, held)))
    assert torch.equal(got["layers.0.linear_attn.core.A_log"], named[f"{LINEAR}A_log"].float())


def test_loading_again_fills_the_same_addresses(tmp_path: Path, plain: Tensors) -> None:
    built = model(save(tmp_path, config(), {name: -tensor for name, tensor in tensors(config()).items()}))
    load(built, tmp_path)
    before = {name: tensor.data_ptr() for name, tensor in parts(built).items()}
    assert torch.equal(parts(built)["embed.weight"], -plain["embed.weight"])
    save(tmp_path, config(), tensors(config()))
    load(built, tmp_path)
    assert {name: tensor.data_ptr() for name, tensor in parts(built).items()} == before
    assert same(parts(built), plain)


def test_progress_is_told_tensor_by_tensor(tmp_path: Path) -> None:
    named, told = tensors(config()), list[tuple[int, int, str]]()
    load(model(save(tmp_path, config(), named)), tmp_path, lambda *step: told.append(step))
    assert [count for count, _, _ in told] == list(range(len(named) + 1))
    assert {total for _, total, _ in told} == {len(named)}
    assert sorted(name for _, _, name in told[:-1]) == sorted(named)


def test_at_most_one_tensor_is_read_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = config(num_experts=4)
    named = tensors(cfg)
    live, peaks, read = [0], list[int](), Files.read

    def counted(files: Files, name: str, *cut: slice) -> torch.Tensor:
        tensor = read(files, name, *cut)
        live[0] += tensor.nbytes
        peaks.append(live[0])
        weakref.finalize(tensor, lambda size=tensor.nbytes: live.__setitem__(0, live[0] - size))
        return tensor

    monkeypatch.setattr(Files, "read", counted)
    load(model(save(tmp_path, cfg, named)), tmp_path)
    assert max(peaks) <= max(tensor.nbytes for tensor in named.values())
