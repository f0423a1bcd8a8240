"""Writing a quantized checkpoint: one tensor in memory at a time, and files of a few gigabytes."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hal.errors import CheckpointError
from hal_models.calibration import calibrate
from hal_models.dialects import BY_MODULE, read, written
from hal_models.encoding import encoded
from hal_models.files import INDEX, Files
from hal_models.quantization import Quantization, Rule, bare

if TYPE_CHECKING:
    import torch

    from hal_models.qwen3_5.weights import Progress

FILE_BYTES = 4_000_000_000
BESIDE = (".json", ".txt", ".jinja", ".model")  # tokenizers and the like, taken as they are
PROJECTION = re.compile(
    r"(.*\.)?(in_proj_(qkv|z|b|a)|out_proj|[qkvo]_proj|(gate|up|down)_proj|lm_head|gate|fc)\.weight$"
)
FUSED = re.compile(r"(.*\.experts)\.(gate_up|down)_proj$")


def quantize(
    folder: Path,
    out: Path,
    rules: Sequence[Rule],
    dialect: str,
    progress: Progress | None = None,
    lines: Sequence[str] | None = None,
) -> dict[str, int]:
    """Write the checkpoint of ``folder`` into the empty folder ``out``; gives counts of modules.

    ``lines``: text that is run through it where a scheme fixes the scale of inputs. Experts in one tensor
    become modules of their own, as all dialects have them. Errors: CheckpointError for a checkpoint that is
    quantized already, and for fixed scales without lines; UnknownName for a dialect.
    """
    fixed = [str(r.scheme) for r in rules if r.scheme and r.scheme.fixed]
    if fixed and lines is None:
        text = (
            "fixes the scale of inputs, which needs lines of text to be run through the checkpoint (--calibrate FILE)"
        )
        raise CheckpointError(f"{folder}: {fixed[0]} {text}")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if config.get("quantization_config") or (folder / "hf_quant_config.json").exists():
        raise CheckpointError(f"{folder}: is quantized already; expected a checkpoint in bfloat16")
    rule, plain, chosen = Quantization(dialect, tuple(rules)), list[str](), list[Rule]()
    # a dialect that cannot say it fails before anything is written
    known = read(str(folder), written(dialect, rules, []))
    calibration = calibrate(folder, lines) if fixed and lines is not None else None
    with Files(folder) as files, _Output(out) as output:
        for at, name in enumerate(files):
            if progress:
                progress(at, len(files), name)
            for each, tensor in _modules(name, files.read(name)):
                scheme = rule.scheme(each.removesuffix(".weight")) if PROJECTION.match(each) else None
                if scheme is None:
                    output.add(each, tensor)
                    if PROJECTION.match(each) and tensor.dim() == 2:
                        plain.append(each.removesuffix(".weight"))
                    continue
                module, names = each.removesuffix(".weight"), known.named(scheme)
                chosen.append(Rule(module, scheme))
                codes, scale, within = encoded(tensor, scheme.weight)
                output.add(f"{module}.{names.weight}", codes)
                output.add(f"{module}.{names.scale}", scale)
                if within is not None:
                    output.add(f"{module}.{names.within}", (1 / within).reshape(1) if names.divides else within)
                if calibration and (form := scheme.fixed):
                    found = calibration.scale(bare(module), form)
                    output.add(f"{module}.{names.input_scale}", (1 / found).reshape(1) if names.divides else found)
    mixed = len({r.scheme for r in chosen}) > 1 and dialect in BY_MODULE
    config["quantization_config"] = written(dialect, chosen if mixed else rules, plain)
    (out / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    for path in folder.iterdir():
        if path.is_file() and path.suffix in BESIDE and path.name not in ("config.json", INDEX):
            shutil.copy(path, out / path.name)
    filled = {"filled": len(calibration.filled)} if calibration else {}
    return {"quantized": len(chosen), "plain": len(plain), **filled}


def _modules(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensor, or where it holds all experts, that of each."""
    fused = FUSED.match(name)
    if not fused:
        yield name, tensor
        return
    parts = ("gate", "up") if fused[2] == "gate_up" else ("down",)
    for expert, whole in enumerate(tensor):
        for part, piece in zip(parts, whole.chunk(len(parts)), strict=True):
            yield f"{fused[1]}.{expert}.{part}_proj.weight", piece


class _Output:
    """Tensors of a folder, in files of at most ``FILE_BYTES`` and one tensor more."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.held: dict[str, torch.Tensor] = {}
        self.places: dict[str, str] = {}
        self.files = 0
        self.bytes = 0

    def __enter__(self) -> _Output:
        return self

    def __exit__(self, *error: Any) -> None:
        if error[0] is not None:
            return
        self._flush()
        if self.files == 1:
            (self.folder / "model-00001.safetensors").rename(self.folder / "model.safetensors")
            return
        index = {"metadata": {"total_size": self.bytes}, "weight_map": self.places}
        (self.folder / INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")

    def add(self, name: str, tensor: torch.Tensor) -> None:
        self.held[name] = tensor.contiguous().clone()
        self.bytes += tensor.nbytes
        if sum(t.nbytes for t in self.held.values()) >= FILE_BYTES:
            self._flush()

    def _flush(self) -> None:
        from safetensors.torch import save_file

        if not self.held:
            return
        self.files += 1
        name = f"model-{self.files:05}.safetensors"
        save_file(self.held, self.folder / name, metadata={"format": "pt"})
        self.places |= dict.fromkeys(self.held, name)
        self.held = {}
