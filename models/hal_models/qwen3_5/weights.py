"""Where each tensor of a checkpoint goes: names of files to parts of storages, sliced for this rank."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hal.errors import CheckpointError, StorageError
from hal.formats import Scheme
from hal.layout import Param
from hal.ops.linear import input_scale
from hal_models.files import Files
from hal_models.qwen3_5.config import Config
from hal_models.qwen3_5.model import Attention, GatedDeltaNet, Layer, Qwen35

if TYPE_CHECKING:
    import torch

    from hal.binding import Group

PREFIXES = ("model.language_model.", "language_model.model.", "model.")
DRAFTS = ("", "model.", "language_model.", "model.language_model.")
HEADS = ("lm_head.weight", "language_model.lm_head.weight")
KV_SCALES = "scales of keys and values in FP8, which are kept in the dtype"
SKIPPED = {
    "the draft head": r"(model\.|language_model\.|model\.language_model\.)?mtp\.",
    "the vision tower": r"(model\.)?visual\.",
    "rotary frequencies, which are computed": r".*rotary_emb\.inv_freq$",
    "scales of an input that is not quantized here": r".*\.input_(global_)?scale$",
    KV_SCALES: r".*\.([kv]_scale|[kv]_proj\.output_scale)$",
}
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Target:
    """Parts of a group's storages that one tensor of a file fills, one after the other on its first axis."""

    group: Group
    parts: tuple[str, ...]
    at: int | None = None  # an entry of the part's first axis (an expert)
    section: int | None = None  # a section of the part's shard axis
    scale: bool = False  # may be written in other shapes, and is a number above or at zero
    spread: tuple[int, int] | None = None  # of blocks: scales that one of the file's becomes, along rows and columns
    divides: bool = False  # the file's scale divides: it is turned round

    def params(self) -> list[Param]:
        found = {p.name: p for op in self.group.members.values() for p in op.params()}
        return [found[name] for name in self.parts]


@dataclass(frozen=True)
class Loaded:
    """What became of the tensors: how many were used, and which were skipped, by reason."""

    used: int
    skipped: dict[str, list[str]]


def load(model: Qwen35, folder: Path, progress: Progress | None = None) -> Loaded:
    """Fill and seal the model's storages, a tensor at a time.

    Errors: CheckpointError for files and tensors that do not fit, and for tensors that nothing
    takes; HalError listing parameters that nothing fills.
    """
    with Files(folder) as files:
        prefix = _prefix(files, folder)
        wanted = targets(model, files, prefix) | drafting(model, files)
        used: list[str] = []
        left: list[str] = []
        skipped: dict[str, list[str]] = {}
        for name in files:
            why = next((why for why, pattern in SKIPPED.items() if re.match(pattern, name)), None)
            if name in wanted:
                used.append(name)
            elif why:
                skipped.setdefault(why, []).append(name)
            elif model.cfg.tied and name in HEADS:
                _same(files, name, f"{prefix}embed_tokens.weight", folder)
                skipped.setdefault("the head, which is tied and says the same", []).append(name)
            else:
                left.append(name)
        missing = sorted(set(wanted) - set(files))
        if missing or left:
            raise CheckpointError(
                f"{folder}: " + "; ".join(
                    f"{what}: {', '.join(names[:20])}{f' and {len(names) - 20} more' if len(names) > 20 else ''}"
                    for what, names in (("tensors missing", missing), ("tensors that nothing takes", left))
                    if names
                )
            )  # fmt: skip
        if names := skipped.get(KV_SCALES):
            values = [float(_numbers(files, name).max()) for name in names]
            shown = f"{len(names)} of keys and values, {min(values):g} to {max(values):g}, are not used"
            model.runtime.notes[f"scales: {shown}: pages hold {model.cfg.dtype}"] = None
        fixed: dict[tuple[Any, ...], tuple[str, list[float]]] = {}
        for count, name in enumerate(used):
            if progress:
                progress(count, len(used), name)
            _put(model, files, name, wanted[name])
            _agree(model, fixed, name, wanted[name], folder)
        if progress:
            progress(len(used), len(used), "")
    model.runtime.seal()
    return Loaded(len(used), skipped)


def _prefix(files: Files, folder: Path) -> str:
    found = [prefix for prefix in PREFIXES if f"{prefix}embed_tokens.weight" in files]
    if len(found) != 1:
        shown = " and ".join(found) or "none"
        raise CheckpointError(f"{folder}: expected embed_tokens.weight under one of {', '.join(PREFIXES)}; got {shown}")
    return found[0]


def targets(model: Qwen35, files: Files, prefix: str) -> dict[str, Target]:
    """Target of each tensor, by its name."""
    group = model.runtime.group_of
    found = {
        f"{prefix}embed_tokens.weight": Target(group(model.embed), ("weight",)),
        f"{prefix}norm.weight": Target(group(model.head), ("norm",)),
    }
    for index, layer in enumerate(model.layers):
        found |= _layer(model, layer, files, f"{prefix}layers.{index}.")
    if not model.cfg.tied:
        # a second name of the head is a tensor that nothing takes
        name = next((name for name in HEADS if name in files), HEADS[0])
        found[name] = Target(group(model.head), ("weight",))
    return _every(model.cfg, found)


def _every(cfg: Config, found: Mapping[str, Target]) -> dict[str, Target]:
    """The tensors of all modules, by name."""
    return {name: target for weight, whole in found.items() for name, target in _tensors(cfg, weight, whole)}


def _tensors(cfg: Config, weight: str, target: Target) -> Names:
    """The tensors of a module: its weight, and where that is quantized its scales, as the dialect names them."""
    scales, wholes = ([f"{part}_{kind}" for part in target.parts] for kind in ("scale", "global"))
    known = {p.name: p for op in target.group.members.values() for p in op.params()}
    if cfg.quantization is None or scales[0] not in known:
        yield weight, target
        return
    # experts in one tensor have no module of their own, and are quantized as each of them is
    alone = weight.endswith(".weight")
    module = weight.removesuffix(".weight")
    scheme = cfg.scheme(module if alone else f"{module.rpartition('.')[0]}.0.gate_proj")
    assert scheme is not None
    names = cfg.quantization.named(scheme)

    def name(of: str) -> str:
        return f"{module}.{of}" if alone else f"{module}_{of.removeprefix('weight_')}"

    yield (name(names.weight) if alone else weight), target
    spread = _spread(scheme, known[target.parts[0]], known[scales[0]])
    yield name(names.scale), replace(target, parts=tuple(scales), scale=True, spread=spread)
    if wholes[0] in known:
        yield name(names.within), replace(target, parts=tuple(wholes), scale=True, divides=names.divides)
    if (fixed := input_scale(known[target.parts[0]].memory)) in known:
        yield name(names.input_scale), Target(target.group, (fixed,), target.at, scale=True, divides=names.divides)


def drafting(model: Qwen35, files: Files) -> dict[str, Target]:
    """The same for the draft head, where the model has one. Errors: CheckpointError where the file has none."""
    if model.mtp is None:
        return {}
    prefix = next((p for p in DRAFTS if f"{p}mtp.fc.weight" in files), None)
    if prefix is None:
        raise CheckpointError(
            f"{files.folder}: {model.draft} drafts a step were asked for, and it holds no draft head: no mtp.fc.weight"
        )
    group, name = model.runtime.group_of, f"{prefix}mtp."
    opens, head = group(model.mtp.opens), group(model.mtp.head)
    found = {
        f"{name}fc.weight": Target(opens, ("weight",)),
        f"{name}pre_fc_norm_embedding.weight": Target(opens, ("token_norm",)),
        f"{name}pre_fc_norm_hidden.weight": Target(opens, ("hidden_norm",)),
        f"{name}norm.weight": Target(head, ("norm",)),
        **_layer(model, model.mtp.layer, files, f"{name}layers.0."),
    }
    return _every(model.cfg, found)


def _layer(model: Qwen35, layer: Layer, files: Files, name: str) -> dict[str, Target]:
    group, mixer = model.runtime.group_of, layer.mixer
    names = _linear(mixer, group) if isinstance(mixer, GatedDeltaNet) else _attention(mixer, group)
    found = {name + key: target for key, target in names}
    mlp = group(layer.mlp)
    found[f"{name}post_attention_layernorm.weight"] = Target(mlp, ("norm",))
    fused = f"{name}mlp.experts.gate_up_proj" in files
    names = _experts(mlp, model.cfg.experts, fused) if model.cfg.experts else _dense(mlp)
    return found | {f"{name}mlp.{key}": target for key, target in names}


Names = Iterator[tuple[str, Target]]


def _spread(scheme: Scheme, weight: Param, scale: Param) -> tuple[int, int] | None:
    """Scales that one of the file's becomes: a share has smaller blocks where the file's do not divide it."""
    if scheme.weight.scale.block is None:
        return None
    (rows, columns), block = weight.shape[-2:], scheme.weight.scale.block
    return block[0] * scale.shape[-2] // rows, block[1] * scale.shape[-1] // (columns * scheme.weight.packs)


def _linear(mixer: GatedDeltaNet, group: Callable[[Any], Group]) -> Names:
    opens, core = group(mixer.in_proj), mixer.core
    yield "input_layernorm.weight", Target(opens, ("norm",))
    yield "linear_attn.in_proj_qkv.weight", Target(opens, ("q", "k", "v"))
    for part in ("z", "b", "a"):
        yield f"linear_attn.in_proj_{part}.weight", Target(opens, (part,))
    yield "linear_attn.conv1d.weight", Target(core, ("conv_q", "conv_k", "conv_v"))
    yield "linear_attn.A_log", Target(core, ("A_log",))
    yield "linear_attn.dt_bias", Target(core, ("dt_bias",))
    yield "linear_attn.norm.weight", Target(core, ("norm",))
    yield "linear_attn.out_proj.weight", Target(group(mixer.out_proj), ("weight",))


def _attention(mixer: Attention, group: Callable[[Any], Group]) -> Names:
    opens = group(mixer.qkv_proj)
    yield "input_layernorm.weight", Target(opens, ("norm",))
    for part in ("q", "k", "v"):
        yield f"self_attn.{part}_proj.weight", Target(opens, (part,))
    for part in ("q_norm", "k_norm"):
        yield f"self_attn.{part}.weight", Target(mixer.core, (part,))
    yield "self_attn.o_proj.weight", Target(group(mixer.o_proj), ("weight",))


def _dense(mlp: Group) -> Names:
    for part in ("gate", "up", "down"):
        yield f"{part}_proj.weight", Target(mlp, (part,))


def _experts(mlp: Group, experts: int, fused: bool) -> Names:
    yield "gate.weight", Target(mlp, ("router",))
    yield "shared_expert_gate.weight", Target(mlp, ("shared_sigmoid",))
    for part in ("gate", "up", "down"):
        yield f"shared_expert.{part}_proj.weight", Target(mlp, (f"shared_{part}",))
    if fused:
        yield "experts.gate_up_proj", Target(mlp, ("experts_gate_up",))
        yield "experts.down_proj", Target(mlp, ("experts_down",))
        return
    for e in range(experts):
        yield f"experts.{e}.gate_proj.weight", Target(mlp, ("experts_gate_up",), e, 0)
        yield f"experts.{e}.up_proj.weight", Target(mlp, ("experts_gate_up",), e, 1)
        yield f"experts.{e}.down_proj.weight", Target(mlp, ("experts_down",), e)


def _agree(
    model: Qwen35, fixed: dict[tuple[Any, ...], tuple[str, list[float]]], name: str, target: Target, folder: Path
) -> None:
    """Raise CheckpointError where two tensors fix the scale of one input differently, or take the larger one."""
    import torch

    part = target.parts[0]
    if not part.startswith("input_scale"):
        return
    held: torch.Tensor = target.group.storages[part].read()  # type: ignore[assignment]
    values = held.tolist() if target.at is None else [float(held[target.at])]
    key = (target.group.name, part, target.at)
    other, before = fixed.setdefault(key, (name, values))
    if values == before:
        return
    if model.runtime.policy.input_scales != "maximum":
        first = next(pair for pair in zip(values, before, strict=True) if pair[0] != pair[1])
        text = f"expected {first[1]:g}, the scale of the same input as {other}, got {first[0]:g}"
        raise CheckpointError(f"{folder}: {name}: {text}; HAL_INPUT_SCALES=maximum takes the largest")
    largest = [max(pair) for pair in zip(values, before, strict=True)]
    fixed[key] = (other, largest)
    at = () if target.at is None else (target.at,)
    whole = torch.tensor(largest, device=held.device)
    target.group.storages[part].put(part, whole if target.at is None else whole[0], at)
    text = f"input scales: {target.group.name}: {part} is the largest of several (HAL_INPUT_SCALES=maximum)"
    model.runtime.notes[text] = None


def _same(files: Files, name: str, other: str, folder: Path) -> None:
    import torch

    if files.shape(name) != files.shape(other) or not torch.equal(files.read(name), files.read(other)):
        raise CheckpointError(f"{folder}: {name} differs from {other}, and tie_word_embeddings is true")


def _put(model: Qwen35, files: Files, name: str, target: Target) -> None:
    rank, world = model.runtime.rank, model.runtime.world
    params = target.params()
    shape = files.shape(name)
    # a convolution is written [channels, 1, width] or [channels, width]
    flat = (shape[0], shape[2]) if len(shape) == 3 and shape[1] == 1 and len(params[0].shape) == 2 else shape
    whole = [_whole(p, target, world) for p in params]
    if whole[0] == ():  # one number
        target.group.storages[params[0].memory].put(params[0].name, _scales(files, name, (), target), (target.at or 0,))
        return
    expected = (sum(s[0] for s in whole), *whole[0][1:])
    scales = _scales(files, name, expected, target) if target.scale else None
    if flat != expected and scales is None:
        raise CheckpointError(f"{files.folder}: {name}: expected {list(expected)}, got {list(shape)}")
    row = 0
    for param, size in zip(params, whole, strict=True):
        for cut, at in _slices(param, target, size, rank, world):
            lead = slice(row + (cut[0].start or 0), row + (size[0] if cut[0].stop is None else cut[0].stop))
            cut = (lead, *cut[1:])
            if scales is not None:
                tensor = scales[cut]
            elif flat != shape:
                tensor = files.read(name, lead, slice(None), *cut[1:]).squeeze(1)
            else:
                tensor = files.read(name, *cut)
            try:
                target.group.storages[param.memory].put(param.name, tensor, at)
            except StorageError as error:
                raise CheckpointError(f"{files.folder}: {name}: {error}") from None
        row += size[0]


def _scales(files: Files, name: str, expected: tuple[int, ...], target: Target) -> torch.Tensor:
    """Scales in the shape that the parts have.

    Files write those of rows as ``[n]``, ``[n, 1]``, or one for all as ``[1]`` or ``[]``, of experts one for
    each, or for each of the matrices beside each other; those of blocks are repeated for the smaller blocks of a share.
    """
    shape, found = files.shape(name), _numbers(files, name)
    if target.divides:
        if (found == 0).any():
            raise CheckpointError(f"{files.folder}: {name}: expected scales to divide by, got 0")
        found = 1 / found.float()
    if target.spread:
        whole = (*expected[:-2], *(-(-size // n) for size, n in zip(expected[-2:], target.spread, strict=True)))
        if shape != whole:
            raise CheckpointError(f"{files.folder}: {name}: expected {list(whole)}, got {list(shape)}")
        found = found.repeat_interleave(target.spread[0], -2).repeat_interleave(target.spread[1], -1)
        return found[tuple(slice(size) for size in expected)]
    if found.numel() == 1:
        return found.reshape(()).expand(expected)
    if len(expected) == 2 and shape[:1] == expected[:1] and expected[1] % (each := found.numel() // shape[0]) == 0:
        return found.reshape(expected[0], each).repeat_interleave(expected[1] // each, 1)
    if shape not in (expected, (*expected, 1)):
        raise CheckpointError(f"{files.folder}: {name}: expected {list(expected)}, got {list(shape)}")
    return found.reshape(expected)


def _numbers(files: Files, name: str) -> torch.Tensor:
    """Scales as they are written. Errors: CheckpointError for one that is no number of 0 or more."""
    import torch

    found = files.read(name)
    if found.dtype == torch.float8_e8m0fnu:  # the same bytes under another name
        found = found.view(torch.uint8)
    odd = found == 255 if found.dtype == torch.uint8 else ~(torch.isfinite(found.float()) & (found.float() >= 0))
    if odd.any():
        first = found[odd].flatten()[0].float().item()
        raise CheckpointError(f"{files.folder}: {name}: expected scales that are numbers of 0 or more, got {first:g}")
    return found


def _whole(param: Param, target: Target, world: int) -> tuple[int, ...]:
    """The shape of a parameter before the split over ranks, as a file holds it."""
    shape = list(param.shape)
    if param.shard is not None:
        if target.section is not None:
            shape[param.shard] = param.sections[target.section]
        shape[param.shard] = shape[param.shard] * world // param.copies
    return tuple(shape[1:] if target.at is not None else shape)


def _slices(
    param: Param, target: Target, whole: tuple[int, ...], rank: int, world: int
) -> Iterator[tuple[tuple[slice, ...], tuple[int, ...]]]:
    """This rank's pieces: where each lies in the file's tensor, and in the part."""
    lead = 0 if target.at is None else 1
    first: tuple[int, ...] = () if target.at is None else (target.at,)
    if param.shard is None:
        yield (slice(None),) * len(whole), first
        return
    axis, mine, ranks = param.shard - lead, rank // param.copies, world // param.copies
    sizes = param.sections or (param.shape[param.shard],)
    start = 0
    for index, size in enumerate(sizes):
        if target.section in (None, index):
            cut = [slice(None)] * len(whole)
            cut[axis] = slice(start + mine * size, start + (mine + 1) * size)
            place = [0] * (axis + 1)
            place[axis] = sum(sizes[:index])
            yield tuple(cut), (*first, *place)
            start += size * ranks
