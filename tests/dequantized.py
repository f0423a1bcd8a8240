"""A quantized checkpoint's model in float64: weights as their real values, inputs rounded as the scheme says.

Reads the files itself and shares no code with loader or kernels but the references of the ops between.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from hal_models.qwen3_5.config import Config, configure
from safetensors.torch import load_file

from hal import ops
from hal.batch import make_batch
from hal.ops.base import Problem
from hal.ops.formulas import rms_norm, silu

Tensor = torch.Tensor


class Emulated:
    """``logits(ids)`` of one sequence from its start, ``[tokens, vocab]`` in float64.

    ``plain_inputs``: those that the file has in 4 bits stay as they are.
    """

    def __init__(self, folder: Path, plain_inputs: bool = False) -> None:
        self.plain_inputs = plain_inputs
        self.cfg: Config = configure(str(folder))
        self.known: dict[str, Tensor] = {}
        self.files = {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}

    def logits(self, ids: Sequence[int]) -> Tensor:
        x = self.real("embed_tokens")[torch.tensor(ids)]
        batch = make_batch("prefill", [len(ids)], [0], [0], pages=[list(range(-(-len(ids) // 16)))], page_size=16)
        for index, kind in enumerate(self.cfg.layers):
            name = f"layers.{index}"
            inner = self.normed(x, f"{name}.input_layernorm")
            mixer = self.linear_attention if kind == "linear_attention" else self.attention
            x = x + mixer(name, inner, batch)
            x = x + self.feed_forward(f"{name}.mlp", self.normed(x, f"{name}.post_attention_layernorm"))
        x = self.normed(x, "norm")
        return self.product("lm_head", x) if "lm_head.weight" in self.files else x @ self.real("embed_tokens").T

    def plain(self, name: str) -> Tensor:
        return self.files[name if name in self.files else f"model.{name}"].double()

    def file(self, module: str) -> str:
        return module if any(f"{module}.weight{end}" in self.files for end in ("", "_packed")) else f"model.{module}"

    def whole(self, file: str, times: str, over: str) -> float:
        """A global scale: ModelOpt's multiplies, the other divides."""
        if f"{file}.{times}" in self.files:
            return float(self.files[f"{file}.{times}"])
        return 1 / float(self.files[f"{file}.{over}"])

    def real(self, module: str) -> Tensor:
        """The weight's real values, by what the file holds beside it."""
        if module not in self.known:
            file = self.file(module)
            weight = self.files[f"{file}.weight{'' if f'{file}.weight' in self.files else '_packed'}"]
            scale, block = (self.files.get(f"{file}.weight_scale{end}") for end in ("", "_inv"))
            if weight.dtype == torch.uint8:  # two e2m1 in a byte
                assert scale is not None
                wide = torch.stack([e2m1(weight & 15), e2m1(weight >> 4)], -1).flatten(1)
                if scale.dtype == torch.uint8:  # a power of two for 32 of them
                    self.known[module] = wide * powers(scale).repeat_interleave(32, 1)
                else:  # an e4m3 for 16 of them, and one number for all
                    whole = self.whole(file, "weight_scale_2", "weight_global_scale")
                    self.known[module] = wide * scale.double().repeat_interleave(16, 1) * whole
            elif block is not None:
                wide = block.double().repeat_interleave(128, 0).repeat_interleave(128, 1)
                self.known[module] = weight.double() * wide[: weight.shape[0], : weight.shape[1]]
            else:  # a scale of each row, whether the file writes [n], [n, 1] or one for all
                self.known[module] = weight.double() * (1 if scale is None else scale.double().reshape(-1, 1))
        return self.known[module]

    def product(self, module: str, x: Tensor) -> Tensor:
        return self.rounded(module, x) @ self.real(module).T

    def rounded(self, module: str, x: Tensor) -> Tensor:
        """What the input is after the checkpoint's rounding."""
        scheme = self.cfg.scheme(module)
        if scheme is None or scheme.activations is None:
            return x
        if self.plain_inputs and scheme.activations.value == "float4_e2m1":
            return x
        file = self.file(module)
        if scheme.activations.scale.static:
            return fp8(x, self.files[f"{file}.input_scale"].double())
        block = scheme.activations.scale.block
        if scheme.activations.scale.within:
            whole = self.whole(file, "input_scale", "input_global_scale")
            return nvfp4(x.reshape(-1, 16), whole).reshape(x.shape)
        pieces = [piece for row in x for piece in row.split(block[1] if block else len(row))]
        if scheme.activations.value == "float4_e2m1":
            return torch.cat([mxfp4(piece) for piece in pieces]).reshape(x.shape)
        return torch.cat([fp8(piece, (piece.abs().max() / 448).float().double()) for piece in pieces]).reshape(x.shape)

    def normed(self, x: Tensor, name: str) -> Tensor:
        return rms_norm(x, self.plain(f"{name}.weight"), self.cfg.eps, 1.0)

    def linear_attention(self, name: str, x: Tensor, batch: Any) -> Tensor:
        cfg, name = self.cfg, f"{name}.linear_attn"
        sizes = ("key_heads", "value_heads", "key_head_dim", "value_head_dim", "conv_width", "eps")
        core = ops.GatedDeltaPrefill(**{size: getattr(cfg, size) for size in sizes})
        args = {part: self.product(f"{name}.in_proj_{part}", x) for part in ("qkv", "z", "b", "a")}
        convs = self.plain(f"{name}.conv1d.weight").squeeze(1).split(core.widths)
        params = dict(zip(("conv_q", "conv_k", "conv_v"), convs, strict=True))
        params |= {part: self.plain(f"{name}.{part}") for part in ("A_log", "dt_bias")}
        params["norm"] = self.plain(f"{name}.norm.weight")
        states = {s.name: torch.zeros(1, *s.shape, dtype=torch.float64) for s in core.states()}
        (value,), _ = core.reference(Problem(args, params, states, batch))
        return self.product(f"{name}.out_proj", value)

    def attention(self, name: str, x: Tensor, batch: Any) -> Tensor:
        cfg, name = self.cfg, f"{name}.self_attn"
        pages: dict[str, Any] = {"heads": cfg.heads, "kv_heads": cfg.kv_heads, "head_dim": cfg.head_dim}
        rope = ops.QKNormRope(**pages, rotary_dim=cfg.rotary_dim, theta=cfg.theta, sections=cfg.sections, eps=cfg.eps)
        params = {part: self.plain(f"{name}.{part}.weight") for part in ("q_norm", "k_norm")}
        qkv = torch.cat([self.product(f"{name}.{part}_proj", x) for part in "qkv"], -1)
        state = {"kv": torch.zeros(-(-len(x) // 16), *rope.states()[0].shape, dtype=torch.float64)}
        (q, gate), state = rope.reference(Problem({"qkv": qkv}, params, state, batch))
        (value,), _ = ops.AttentionPrefill(**pages).reference(Problem({"q": q, "gate": gate}, {}, state, batch))
        return self.product(f"{name}.o_proj", value)

    def feed_forward(self, name: str, x: Tensor) -> Tensor:
        if not self.cfg.experts:
            return self.gated(name, x)
        out = self.gated(f"{name}.shared_expert", x) * (x @ self.real(f"{name}.shared_expert_gate").T).sigmoid()
        chances = (x @ self.real(f"{name}.gate").T).softmax(-1)
        for row in range(len(x)):
            weights, chosen = chances[row].topk(self.cfg.top_k)
            for weight, expert in zip(weights / weights.sum(), chosen.tolist(), strict=True):
                out[row] += weight * self.expert(f"{name}.experts", expert, x[row : row + 1])[0]
        return out

    def expert(self, name: str, expert: int, x: Tensor) -> Tensor:
        if f"model.{name}.gate_up_proj" not in self.files:
            return self.gated(f"{name}.{expert}", x)
        wide, narrow = (self.plain(f"{name}.{part}")[expert] for part in ("gate_up_proj", "down_proj"))
        gate, up = (x @ wide.T).chunk(2, -1)
        return (silu(gate) * up) @ narrow.T

    def gated(self, name: str, x: Tensor) -> Tensor:
        inner = silu(self.product(f"{name}.gate_proj", x)) * self.product(f"{name}.up_proj", x)
        return self.product(f"{name}.down_proj", inner)


def nearest(x: Tensor, known: Tensor) -> Tensor:
    """The nearest of ascending known numbers, by their codes 0, 1, ...; ties to the even code."""
    above = torch.searchsorted(known, x).clamp(max=len(known) - 1)
    below = (above - 1).clamp(min=0)
    left, right = x - known[below], known[above] - x
    low = (left < right) | ((left == right) & (below % 2 == 0))
    return torch.where(low, known[below], known[above])


def fp8(x: Tensor, scale: Tensor) -> Tensor:
    """The nearest e4m3 to each ``x / scale``, times the scale; found among all codes."""
    known = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    return nearest((x / scale).abs().clamp(max=448.0), known) * x.sign() * scale


def e2m1(codes: Tensor) -> Tensor:
    """Sign, two bits of exponent (bias 1), one of mantissa."""
    sign, exponent, mantissa = codes >> 3, codes >> 1 & 3, (codes & 1).double()
    size = torch.where(exponent == 0, mantissa / 2, (1 + mantissa / 2) * 2.0 ** (exponent.double() - 1))
    return torch.where(sign == 1, -size, size)


def powers(scale: Tensor) -> Tensor:
    return torch.tensor([2.0 ** (byte - 127) for byte in scale.flatten().tolist()]).double().reshape(scale.shape)


def mxfp4(x: Tensor) -> Tensor:
    """A block with aiter's power of two: the amax rounded to one bit of mantissa, ties up, then its floor, less 2."""
    most = float(x.abs().max())
    exponent = math.frexp(most)[1] - 1  # most = 1.m x 2^exponent
    exponent += most / 2.0**exponent >= 1.75
    scale = 2.0 ** (exponent - 2)
    return nearest((x / scale).abs().clamp(max=6.0), e2m1(torch.arange(8))) * x.sign() * scale


def nvfp4(x: Tensor, whole: float) -> Tensor:
    """Blocks ``[n, 16]``, each with its scale in e4m3 under one number for all, as both formats have them."""
    known = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    scale = nearest((x.abs().amax(1, keepdim=True) / 6 / whole).clamp(max=448.0), known) * whole
    codes = nearest((x / scale.clamp(min=1e-300)).abs().clamp(max=6.0), e2m1(torch.arange(8)))
    return codes * x.sign() * scale
