"""The model's sizes, from any of the forms that checkpoints write them in; contradictions are errors."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hal.errors import CheckpointError, UnknownName
from hal.formats import Scheme
from hal_models.dialects import read
from hal_models.fixed_scales import apart
from hal_models.quantization import Quantization, recipe
from hal_models.qwen3_5.published import PUBLISHED
from hal_models.shipped import folder_of, shipped

if TYPE_CHECKING:
    from hal.runtime import Runtime

Kind = Literal["linear_attention", "full_attention"]
KINDS = ("linear_attention", "full_attention")
TYPES = {"qwen3_5": False, "qwen3_5_text": False, "qwen3_5_moe": True, "qwen3_5_moe_text": True}
MISSING = object()


@dataclass(frozen=True)
class Config:
    """Sizes of the whole model, before any split over ranks."""

    name: str
    layers: tuple[Kind, ...]
    hidden: int
    vocab: int
    eps: float
    dtype: str
    key_heads: int
    value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_width: int
    state_dtype: str
    heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int
    theta: float
    sections: tuple[int, int, int] | None
    intermediate: int
    experts: int
    top_k: int
    shared_intermediate: int
    tied: bool
    stops: tuple[int, ...]
    max_positions: int
    quantization: Quantization | None = None

    def scheme(self, module: str) -> Scheme | None:
        """How a checkpoint quantizes a module, such as ``layers.0.linear_attn.in_proj_z``."""
        return self.quantization.scheme(module) if self.quantization else None

    def served(self, rt: Runtime) -> Config:
        """The same with schemes as a runtime has them on its device under its policy."""
        if self.quantization is None:
            return self
        found = self.quantization.changed(rt.served)
        if rt.policy.input_scales == "maximum":
            found = replace(found, apart=())
        return replace(self, quantization=found)

    def inputs(self, module: str) -> int:
        """Which of several fixed scales of its input a module has."""
        return self.quantization.inputs(module) if self.quantization else 0

    def typed(self, dtype: str | None) -> Config:
        """The same computed in another dtype."""
        return replace(self, dtype=dtype) if dtype else self


def configure(name: str) -> Config:
    """The configuration of a published name, or of a folder with a config.json."""
    if name in PUBLISHED:
        return parse(name, PUBLISHED[name])
    folder = folder_of(name)
    if not folder.exists():
        raise UnknownName("model (no such folder either)", name, (*PUBLISHED, *shipped()))
    path = folder / "config.json"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(data, dict):
        raise CheckpointError(f"{path}: expected an object, got {type(data).__name__}")
    cfg = parse(name, data, _stops(folder), _quantization(folder))
    if cfg.quantization is None:
        return cfg
    return replace(cfg, quantization=replace(cfg.quantization, apart=apart(folder, cfg.quantization)))


def quantized(cfg: Config, scheme: str) -> Config:
    """The configuration as if its weights were quantized by a scheme of this name; ``bf16``: not at all."""
    return replace(cfg, quantization=None if scheme == "bf16" else Quantization("", recipe(scheme)))


def parse(
    name: str, data: dict[str, Any], stops: tuple[int, ...] = (), quantization: dict[str, Any] | None = None
) -> Config:
    """The configuration in a config.json's contents, nested in ``text_config`` or flat.

    ``quantization``: what a file beside it says, where config.json says nothing.
    """
    fields = _Fields(name, data)
    kind = fields.get("model_type")
    if not isinstance(kind, str) or kind not in TYPES:
        raise CheckpointError(f"{name}: model_type: expected one of {', '.join(TYPES)}, got {kind!r}")
    moe = TYPES[kind]
    fields.expect("hidden_act", "silu")
    fields.expect("attention_bias", False)
    fields.expect("attn_output_gate", True)
    fields.expect("norm_topk_prob", True)
    fields.expect("output_gate_type", "silu", "swish", None)
    quantized = fields.agreed("quantization_config", quantization)
    if quantized is not None and not isinstance(quantized, dict):
        raise CheckpointError(f"{name}: quantization_config: expected an object, got {_short(quantized)}")
    experts = fields.size("num_experts") if moe else 0
    head_dim = fields.size("head_dim")
    _divides(fields, "num_attention_heads", "num_key_value_heads")
    _divides(fields, "linear_num_value_heads", "linear_num_key_heads")
    if moe and (taken := fields.size("num_experts_per_tok")) > experts:
        raise CheckpointError(f"{name}: num_experts_per_tok: expected at most {experts}, got {taken}")
    theta, rotary_dim, sections = _rope(fields, head_dim)
    return Config(
        name=name,
        layers=_layers(fields),
        hidden=fields.size("hidden_size"),
        vocab=fields.size("vocab_size"),
        eps=fields.number("rms_norm_eps", fields.get("rms_norm_eps")),
        dtype=_dtype(fields),
        key_heads=fields.size("linear_num_key_heads"),
        value_heads=fields.size("linear_num_value_heads"),
        key_head_dim=fields.size("linear_key_head_dim"),
        value_head_dim=fields.size("linear_value_head_dim"),
        conv_width=fields.size("linear_conv_kernel_dim"),
        state_dtype=_state_dtype(fields),
        heads=fields.size("num_attention_heads"),
        kv_heads=fields.size("num_key_value_heads"),
        head_dim=head_dim,
        rotary_dim=rotary_dim,
        theta=theta,
        sections=sections,
        intermediate=fields.size("moe_intermediate_size" if moe else "intermediate_size"),
        experts=experts,
        top_k=fields.size("num_experts_per_tok") if moe else 0,
        shared_intermediate=fields.size("shared_expert_intermediate_size") if moe else 0,
        tied=bool(fields.agreed("tie_word_embeddings", False)),
        stops=tuple(dict.fromkeys((*_ids(name, fields.get("eos_token_id", None)), *stops))),
        max_positions=fields.size("max_position_embeddings"),
        quantization=read(name, quantized) if quantized else None,
    )


def _divides(fields: _Fields, many: str, few: str) -> None:
    if fields.size(many) % fields.size(few):
        raise CheckpointError(
            f"{fields.name}: {many}: expected a multiple of {few}, {fields.size(few)}; got {fields.size(many)}"
        )


class _Fields:
    """Fields of the text model: those of ``text_config`` where there is one, else of the file."""

    def __init__(self, name: str, data: dict[str, Any]) -> None:
        self.name, self.outer = name, data
        self.inner: dict[str, Any] = data.get("text_config") or data
        if not isinstance(self.inner, dict):
            raise CheckpointError(f"{name}: text_config: expected an object, got {self.inner!r}")

    def get(self, key: str, default: Any = MISSING) -> Any:
        found = self.inner.get(key, default)
        if found is MISSING:
            raise CheckpointError(f"{self.name}: config.json does not state {key}")
        return found

    def size(self, key: str) -> int:
        found = self.get(key)
        if not isinstance(found, int) or isinstance(found, bool) or found < 1:
            raise CheckpointError(f"{self.name}: {key}: expected a positive integer, got {found!r}")
        return found

    def number(self, key: str, found: Any) -> float:
        if not isinstance(found, (int, float)) or isinstance(found, bool) or not found > 0:
            raise CheckpointError(f"{self.name}: {key}: expected a positive number, got {_short(found)}")
        return float(found)

    def expect(self, key: str, *allowed: Any) -> None:
        """A field that is absent, or says what this model does anyway."""
        for where in (self.inner, self.outer):
            found = where.get(key, allowed[0])
            if found not in allowed:
                shown = " or ".join(map(repr, allowed))
                raise CheckpointError(f"{self.name}: {key}: only {shown} is served, got {_short(found)}")

    def agreed(self, key: str, default: Any) -> Any:
        """A field that may stand inside and outside, if it says the same there."""
        return self.one(key, [d[key] for d in (self.inner, self.outer) if d.get(key) is not None], default)

    def one(self, key: str, found: list[Any], default: Any = MISSING) -> Any:
        if any(value != found[0] for value in found):
            raise CheckpointError(f"{self.name}: {key} contradicts itself: {' against '.join(map(repr, found))}")
        if not found and default is MISSING:
            raise CheckpointError(f"{self.name}: config.json does not state {key}")
        return found[0] if found else default


def _rope(fields: _Fields, head_dim: int) -> tuple[float, int, tuple[int, int, int] | None]:
    """Base, rotated dimensions and sections, from wherever they stand; without a base: an error."""
    places = [fields.inner]
    for key in ("rope_parameters", "rope_scaling"):
        nested = fields.inner.get(key) or {}
        if not isinstance(nested, dict):
            raise CheckpointError(f"{fields.name}: {key}: expected an object, got {_short(nested)}")
        by_kind = nested.get("full_attention")
        places.append(by_kind if isinstance(by_kind, dict) else nested)

    def stated(key: str, default: Any = MISSING) -> Any:
        return fields.one(key, [p[key] for p in places if p.get(key) is not None], default)

    for place in places[1:]:
        for key in ("rope_type", "type"):
            if (kind := place.get(key) or "default") not in ("default", "mrope"):
                raise CheckpointError(f"{fields.name}: {key}: only 'default' is served, got {kind!r}")
        if (interleaved := place.get("mrope_interleaved", True)) is not True:
            raise CheckpointError(f"{fields.name}: mrope_interleaved: only True is served, got {interleaved!r}")
    theta = fields.number("rope_theta", stated("rope_theta"))
    rotary = int(head_dim * fields.number("partial_rotary_factor", stated("partial_rotary_factor", 0.25)))
    sections = stated("mrope_section", None)
    if sections is not None:
        whole = isinstance(sections, list) and all(isinstance(size, int) for size in sections)
        if not whole or len(sections) != 3 or sum(sections) * 2 != rotary:
            half = rotary // 2
            raise CheckpointError(f"{fields.name}: mrope_section: expected 3 sizes of sum {half}, got {sections}")
    return theta, rotary, tuple(sections) if sections else None


def _layers(fields: _Fields) -> tuple[Kind, ...]:
    count = fields.size("num_hidden_layers")
    interval = fields.get("full_attention_interval", None)
    lists: list[list[Any]] = []
    for key in ("layer_types", "layers_block_type"):
        if (stated := fields.get(key, None)) is None:
            continue
        if not isinstance(stated, list):
            raise CheckpointError(f"{fields.name}: {key}: expected a list, got {_short(stated)}")
        kinds = ["full_attention" if kind == "attention" else kind for kind in stated]
        if unknown := sorted({str(kind) for kind in kinds if kind not in KINDS}):
            raise CheckpointError(f"{fields.name}: {key}: expected {' or '.join(KINDS)}, got {', '.join(unknown)}")
        if len(kinds) != count:
            raise CheckpointError(f"{fields.name}: {key} lists {len(kinds)} layers, num_hidden_layers is {count}")
        lists.append(kinds)
    names: list[Any] = lists[0] if lists else []
    if lists and lists[-1] != names:
        raise CheckpointError(f"{fields.name}: layer_types contradicts layers_block_type")
    regular: list[Any] = []
    if interval is not None:
        regular = [KINDS[(i + 1) % fields.size("full_attention_interval") == 0] for i in range(count)]
    if names and regular and names != regular:
        raise CheckpointError(f"{fields.name}: layer_types contradicts full_attention_interval {interval}")
    if not names and not regular:
        raise CheckpointError(f"{fields.name}: config.json states neither layer_types nor full_attention_interval")
    return tuple(names or regular)


def _dtype(fields: _Fields) -> str:
    found = [d[key] for d in (fields.inner, fields.outer) for key in ("dtype", "torch_dtype") if d.get(key)]
    name: str = fields.one("dtype", [str(value).removeprefix("torch.") for value in found], "bfloat16")
    if name not in ("bfloat16", "float16", "float32"):
        raise CheckpointError(f"{fields.name}: dtype: expected bfloat16, float16 or float32, got {name!r}")
    return name


def _state_dtype(fields: _Fields) -> str:
    name: str = fields.get("mamba_ssm_dtype", None) or "float32"
    if name not in ("float32", "bfloat16"):
        raise CheckpointError(f"{fields.name}: mamba_ssm_dtype: expected float32 or bfloat16, got {name!r}")
    return name


def _ids(name: str, value: Any) -> tuple[int, ...]:
    found = value if isinstance(value, list) else [] if value is None else [value]
    if any(not isinstance(token, int) or isinstance(token, bool) for token in found):
        raise CheckpointError(f"{name}: eos_token_id: expected tokens, got {_short(value)}")
    return tuple(found)


def _stops(folder: Path) -> tuple[int, ...]:
    """More stop tokens, from generation_config.json where there is one."""
    path = folder / "generation_config.json"
    if not path.is_file():
        return ()
    try:
        return _ids(str(path), json.loads(path.read_text(encoding="utf-8")).get("eos_token_id"))
    except (OSError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from None


def _quantization(folder: Path) -> dict[str, Any] | None:
    """What ModelOpt writes beside config.json."""
    path = folder / "hf_quant_config.json"
    if not path.is_file():
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{path}: expected an object, got {_short(found)}")
    return found


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 80 else text[:77] + "..."
