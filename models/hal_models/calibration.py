"""The largest numbers that each projection is multiplied with, over lines of text: what fixed scales come from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hal.device import load_device
from hal.errors import CheckpointError
from hal.formats import Quantized
from hal.layout import Separate
from hal.ops.formulas import rms_norm, silu
from hal.policy import Policy
from hal.runtime import Runtime
from hal_models.encoding import fixed_scale
from hal_models.engine import score
from hal_models.qwen3_5.config import configure
from hal_models.qwen3_5.model import GatedDeltaNet, Qwen35
from hal_models.qwen3_5.weights import load
from hal_models.text import text_of

if TYPE_CHECKING:
    import torch

    Seen = Iterator[tuple[str, torch.Tensor]]

TOGETHER = 16  # lines in a step
MOST_TOKENS = 4096  # of a line


class Calibration:
    """``scale(module, form)``: the fixed scale of a module's input, from the largest number seen there."""

    def __init__(self, most: dict[str, float]) -> None:
        self.most = most
        self.filled: list[str] = []  # modules that no row reached, given what their neighbours saw

    def scale(self, module: str, form: Quantized) -> torch.Tensor:
        """A float32 of no axes. Errors: CheckpointError for a module that no line reaches."""
        import torch

        most = self.most.get(module)
        if most is None:  # an expert: what experts beside it saw
            stem, _, rest = module.partition(".experts.")
            ends = f".{rest.partition('.')[2]}"
            beside = [m for n, m in self.most.items() if n.startswith(f"{stem}.experts.") and n.endswith(ends)]
            if not rest or not beside:
                raise CheckpointError(f"{module}: calibration runs nothing through it; leave it out with --exclude")
            most = max(beside)
            self.filled.append(module)
        return fixed_scale(torch.tensor(most), form)


def calibrate(folder: Path, lines: Sequence[str]) -> Calibration:
    """Run lines of text through a checkpoint that is not quantized, in float32 on the CPU.

    Module names are those without a prefix (``layers.0.mlp.down_proj``). Errors: CheckpointError where
    there is nothing to run.
    """
    model = Qwen35(configure(str(folder)).typed("float32"), Runtime(load_device("cpu"), Policy(), place="cpu"))
    load(model, folder)
    encode = text_of(folder, model.cfg.vocab).encode
    rows = [ids for line in lines if (ids := encode(line)[:MOST_TOKENS])]
    if not rows:
        raise CheckpointError(f"{folder}: calibration needs lines of text, got none")
    if (most_id := max(map(max, rows))) >= model.cfg.vocab:
        raise CheckpointError(f"{folder}: calibration: expected tokens below {model.cfg.vocab}, got {most_id}")
    most: dict[str, float] = {}
    _watch(model, most)
    for start in range(0, len(rows), TOGETHER):
        score(model, rows[start : start + TOGETHER])
    return Calibration(most)


def _watch(model: Qwen35, most: dict[str, float]) -> None:
    """Put something before each product that sees what goes in; the model computes as before."""

    def watched(bound: Any, inputs: Callable[[Any, dict[str, Any], tuple[Any, ...]], Seen], prefix: str) -> Any:
        group = model.runtime.group_of(bound)
        (op,) = group.members.values()
        params = {name: part for s in group.storages.values() for name, part in s.read(Separate()).items()}  # type: ignore[union-attr]

        def run(*args: Any) -> Any:
            for module, x in inputs(op, params, args):
                if x.numel():
                    most[f"{prefix}{module}"] = max(most.get(f"{prefix}{module}", 0.0), float(x.abs().amax()))
            return bound(*args)

        return run

    for index, layer in enumerate(model.layers):
        name, mixer = f"layers.{index}.", layer.mixer
        if isinstance(mixer, GatedDeltaNet):
            mixer.in_proj = watched(mixer.in_proj, _opened("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
                                    f"{name}linear_attn.")  # fmt: skip
            mixer.out_proj = watched(mixer.out_proj, _given("out_proj"), f"{name}linear_attn.")
        else:
            mixer.qkv_proj = watched(mixer.qkv_proj, _opened("q_proj", "k_proj", "v_proj"), f"{name}self_attn.")
            mixer.o_proj = watched(mixer.o_proj, _given("o_proj"), f"{name}self_attn.")
        layer.mlp = watched(layer.mlp, _experts if model.cfg.experts else _gated, f"{name}mlp.")
    model.head = watched(model.head, _opened("lm_head"), "")


def _given(module: str) -> Callable[..., Seen]:
    def inputs(op: Any, params: dict[str, Any], args: tuple[Any, ...]) -> Seen:
        yield module, args[0]

    return inputs


def _opened(*modules: str) -> Callable[..., Seen]:
    def inputs(op: Any, params: dict[str, Any], args: tuple[Any, ...]) -> Seen:
        x = _normed(op, params, args)
        for module in modules:
            yield module, x

    return inputs


def _normed(op: Any, params: dict[str, Any], args: tuple[Any, ...]) -> torch.Tensor:
    return rms_norm(args[1] + args[0], params["norm"], op.eps, 1.0)


def _gated(op: Any, params: dict[str, Any], args: tuple[Any, ...]) -> Seen:
    yield from _matrices("", _normed(op, params, args), params["gate"], params["up"])


def _experts(op: Any, params: dict[str, Any], args: tuple[Any, ...]) -> Seen:
    x = _normed(op, params, args)
    yield from _matrices("shared_expert.", x, params["shared_gate"], params["shared_up"])
    chosen = (x @ params["router"].T).topk(op.top_k).indices
    for expert, weight in enumerate(params["experts_gate_up"]):
        rows = x[(chosen == expert).any(-1)]
        yield from _matrices(f"experts.{expert}.", rows, *weight.chunk(2))


def _matrices(name: str, x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> Seen:
    yield f"{name}gate_proj", x
    yield f"{name}up_proj", x
    yield f"{name}down_proj", silu(x @ gate.T) * (x @ up.T)
