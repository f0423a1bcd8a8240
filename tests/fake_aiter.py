"""A double of the aiter functions called here: refuses what aiter refuses, computes in torch. Emulated, no more.

Each takes names alone, those that its recorded contract has. Tables and orders of bytes are written
down here a second time, so that a slip in the backend shows.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

CONTRACTS = json.loads((Path(__file__).parents[1] / "ci" / "contracts" / "aiter.json").read_text())["functions"]
VERSION = "0.1.20"
SIXTEEN = (torch.bfloat16, torch.float16)
joined: dict[str, int] = {}


def install(patch: Callable[[str, ModuleType], None] = sys.modules.__setitem__) -> dict[str, int]:
    """Put the double in aiter's place; gives how often each function was called."""
    calls: dict[str, int] = {}
    joined.clear()
    modules: dict[str, ModuleType] = {}
    for name in CONTRACTS:
        module, function = name.split(":")
        parts = module.split(".")
        for end in range(1, len(parts) + 1):
            modules.setdefault(".".join(parts[:end]), ModuleType(".".join(parts[:end])))
        setattr(modules[module], function, _kept(name, globals()[function], calls))
    for name, module_ in modules.items():
        patch(name, module_)
    return calls


def _kept(name: str, function: Callable[..., Any], calls: dict[str, int]) -> Callable[..., Any]:
    """The function as its contract has it: unknown names and missing ones are TypeErrors, as of any function."""
    known = dict(CONTRACTS[name]["versions"][VERSION])

    def called(*positional: Any, **named: Any) -> Any:
        assert not positional, f"{name}: called by position"
        if unknown := set(named) - set(known):
            raise TypeError(f"{name} got an unexpected keyword argument {sorted(unknown)}")
        if missing := {n for n, default in known.items() if default is None} - set(named):
            raise TypeError(f"{name} missing required argument {sorted(missing)}")
        calls[name] = calls.get(name, 0) + 1
        return function(**named)

    return called


def _normed(x: Tensor, weight: Tensor, epsilon: float, gemma_norm: bool) -> Tensor:
    wide = x.float()
    scale = weight.float() + (1.0 if gemma_norm else 0.0)
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon) * scale).to(x.dtype)


def _dense(*tensors: Tensor) -> None:
    for tensor in tensors:
        assert tensor.is_contiguous(), "contiguous only"
        assert tensor.shape[0] > 0, "an empty grid is an invalid launch"


def rmsnorm(out: Tensor, input: Tensor, weight: Tensor, epsilon: float, gemma_norm: bool = False) -> None:
    _dense(out, input)
    assert input.dtype in SIXTEEN
    assert weight.dtype == out.dtype == input.dtype
    assert input.shape[1] <= 8192
    out.copy_(_normed(input, weight, epsilon, gemma_norm))


def rmsnorm2d_fwd_with_add(
    out: Tensor, input: Tensor, residual_in: Tensor, residual_out: Tensor, weight: Tensor, epsilon: float,
    gemma_norm: bool = False,
) -> None:  # fmt: skip
    _dense(out, residual_in, residual_out)
    assert input.stride(-1) == 1, "last dim must be contiguous"
    assert weight.dtype == input.dtype == residual_in.dtype == residual_out.dtype == out.dtype
    assert weight.shape[-1] == input.shape[-1]
    residual_out.copy_((input.float() + residual_in.float()).to(input.dtype))
    out.copy_(_normed(residual_out, weight, epsilon, gemma_norm))


def init_distributed_environment(world_size: int, rank: int, distributed_init_method: str, local_rank: int) -> None:
    assert torch.distributed.is_initialized(), "the double makes no group of its own"
    assert world_size == torch.distributed.get_world_size()
    assert rank == torch.distributed.get_rank()
    assert 0 <= local_rank < world_size
    joined["world"] = world_size


def ensure_model_parallel_initialized(tensor_model_parallel_size: int, pipeline_model_parallel_size: int) -> None:
    assert joined["world"] == tensor_model_parallel_size
    assert pipeline_model_parallel_size == 1
    joined["tp"] = tensor_model_parallel_size


def tensor_model_parallel_fused_allreduce_rmsnorm(
    input_: Tensor, residual_inp_: Tensor, weight_: Tensor, eps: float, gemma_norm: bool = False
) -> tuple[Tensor, Tensor]:
    assert joined.get("tp"), "tensor model parallel group is not initialized"
    assert joined["tp"] != 6
    assert input_.shape[-1] <= 16384
    assert input_.numel() * input_.element_size() < 64 * 2**20
    _dense(input_, residual_inp_)
    assert weight_.dtype == input_.dtype == residual_inp_.dtype
    parts = [torch.empty_like(input_) for _ in range(joined["tp"])]
    torch.distributed.all_gather(parts, input_)
    total = torch.stack([p.float() for p in parts]).sum(0) + residual_inp_.float()
    after = total.to(input_.dtype)
    return _normed(after, weight_, eps, gemma_norm), after


def silu_and_mul(out: Tensor, input: Tensor) -> None:
    _dense(out, input)
    width = out.shape[-1]
    assert input.shape[-1] == 2 * width
    assert width % 16 == 0, "a vector past the row's end would be written"
    gate, up = input.float().split(width, -1)
    out.copy_((torch.nn.functional.silu(gate) * up).to(out.dtype))


def static_per_tensor_quant(out: Tensor, input: Tensor, scale: Tensor) -> None:
    _dense(out, input)
    assert scale.dtype == torch.float32
    assert input.dtype in SIXTEEN
    limit = float(torch.finfo(out.dtype).max)
    out.copy_((input.float() * (1.0 / scale)).clamp(-limit, limit).to(out.dtype))


def per_token_quant_hip(x: Tensor, quant_dtype: torch.dtype = torch.int8) -> tuple[Tensor, Tensor]:
    _dense(x)
    assert quant_dtype != torch.int8, "the default is int8: quant_dtype was forgotten"
    limit = float(torch.finfo(quant_dtype).max)
    scale = x.float().abs().amax(-1, keepdim=True) / limit
    scale = torch.where(scale == 0, 1.0, scale)
    return (x.float() / scale).clamp(-limit, limit).to(quant_dtype), scale


def unified_attention(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, cu_seqlens_q: Tensor, max_seqlen_q: int, seqused_k: Tensor,
    max_seqlen_k: int, softmax_scale: float, causal: bool, window_size: tuple[int, int], block_table: Tensor,
    softcap: float, q_descale: None, k_descale: None, v_descale: None,
) -> Tensor:  # fmt: skip
    assert causal, "Only causal attention is supported"
    assert q_descale is k_descale is v_descale is None
    assert max_seqlen_q == 1, "prefill is another kernel, which fails at head_dim 256"
    assert window_size == (-1, -1)
    assert not softcap
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    assert cu_seqlens_q.dtype == seqused_k.dtype == block_table.dtype == torch.int32
    size, group = k.shape[1], q.shape[1] // k.shape[2]
    out.fill_(float("nan"))  # of no keys
    for row, length in enumerate(seqused_k.tolist()):
        assert length <= max_seqlen_k
        if not length:
            continue
        pages = block_table[row, : -(-length // size)].long()
        assert (pages >= 0).all(), "a page that is none would be read"
        for head in range(q.shape[1]):
            keys, values = (x[pages, :, head // group].flatten(0, 1)[:length].float() for x in (k, v))
            weights = (keys @ q[row, head].float() * softmax_scale).softmax(0)
            out[row, head] = (weights @ values).to(out.dtype)
    return out


def shuffle_weight(x: Tensor, layout: tuple[int, int] = (16, 16)) -> Tensor:
    assert layout == (16, 16)
    assert x.shape[-2] % 16 == 0, f"{x.shape[-2]} % 16 == {x.shape[-2] % 16}"
    assert x.shape[-1] % 32 == 0, f"{x.shape[-1]} % 32 == {x.shape[-1] % 32}"
    found = x.contiguous().view(torch.uint8).view(-1)[_order(x)].view(x.dtype).view(x.shape)
    found.is_shuffled = True  # type: ignore[attr-defined]
    return found


def _order(x: Tensor) -> Tensor:
    """Byte by byte: where each byte of the shuffled weight comes from."""
    n, k, tile = x.shape[-2], x.shape[-1] * x.element_size(), 32 * x.element_size()
    matrices = x.numel() * x.element_size() // (n * k)
    # matrix, 16 rows, 32 columns, 16 bytes of them, row, byte: in this order they lie
    axes = [
        torch.arange(matrices) * n * k, torch.arange(0, n, 16) * k, torch.arange(0, k, tile),
        torch.arange(0, tile, 16), torch.arange(16) * k, torch.arange(16),
    ]  # fmt: skip
    found = torch.zeros((), dtype=torch.int64)
    for axis in axes:
        found = found[..., None] + axis
    return found.flatten()


def _unshuffled(x: Tensor) -> Tensor:
    """Kept on the tensor itself: models call with the same ones in each step."""
    if getattr(x, "plain", (None,))[0] != x._version:
        x.plain = (x._version, _restored(x))  # type: ignore[attr-defined]
    return x.plain[1]  # type: ignore[attr-defined]


def _restored(x: Tensor) -> Tensor:
    plain = torch.empty(x.numel() * x.element_size(), dtype=torch.uint8)
    plain[_order(x)] = x.contiguous().view(torch.uint8).view(-1)
    return plain.view(x.dtype).view(x.shape)


def fused_moe(hidden_states: Tensor, w1: Tensor, w2: Tensor, topk_weight: Tensor, topk_ids: Tensor) -> Tensor:
    _dense(hidden_states)
    assert w1.is_shuffled, "w1 would be read as shuffled"  # type: ignore[attr-defined]
    assert w2.is_shuffled, "w2 would be read as shuffled"  # type: ignore[attr-defined]
    assert w1.shape[1] in (w2.shape[2], 2 * w2.shape[2])
    assert hidden_states.dtype in SIXTEEN
    assert topk_weight.dtype == torch.float32
    assert topk_ids.dtype == torch.int32
    plain = [_unshuffled(w) for w in (w1, w2)]
    out = torch.zeros(hidden_states.shape)
    for expert in topk_ids.unique().tolist():
        row, place = (topk_ids == expert).nonzero(as_tuple=True)
        gate, up = (hidden_states[row].float() @ plain[0][expert].float().T).to(w1.dtype).float().chunk(2, -1)
        wide = (torch.nn.functional.silu(gate) * up).to(w1.dtype).float()
        out.index_add_(0, row, topk_weight[row, place, None] * (wide @ plain[1][expert].float().T))
    return out.to(hidden_states.dtype)


def gemm_a16w16(A: Tensor, B: Tensor) -> Tensor:
    assert A.dim() == B.dim() == 2
    assert A.dtype == B.dtype
    assert A.dtype in SIXTEEN
    assert A.stride(1) == B.stride(1) == 1
    return torch.nn.functional.linear(A, B)


def gemm_a8w8(
    XQ: Tensor, WQ: Tensor, x_scale: Tensor, w_scale: Tensor, dtype: torch.dtype = torch.bfloat16
) -> Tensor:  # fmt: skip
    assert XQ.shape[1] % 16 == 0
    return _a8w8(XQ, WQ, x_scale, w_scale, dtype)


# least K, K's divisor, most M: N and K of the tile
TILES = (
    (1536, 512, 255, lambda n: (32 if n < 1536 else 64, 512)),
    (1536, 1, None, lambda n: (64 if n < 1536 or n % 128 else 128, 128)),
    (512, 1, 63, lambda n: (32, 128)),
    (512, 1, 256, lambda n: (64, 128)),
    (512, 1, None, lambda n: (128, 64)),
    (192, 64, 256, lambda n: (256, 64)),
    (192, 64, None, lambda n: (128, 64)),
)


def gemm_a8w8_bpreshuffle(
    XQ: Tensor, WQ: Tensor, x_scale: Tensor, w_scale: Tensor, dtype: torch.dtype = torch.bfloat16
) -> Tensor:  # fmt: skip
    (m, k), n = XQ.shape, WQ.shape[0]
    assert WQ.is_shuffled, "the weight would be read as shuffled"  # type: ignore[attr-defined]
    assert x_scale.dtype == w_scale.dtype == torch.float32
    for least, divisor, most, tile in TILES:
        if k >= least and k % divisor == 0 and (most is None or m <= most):
            rows, columns = tile(n)
            if n % rows or k % columns:
                shape = f"M={m}, N={n}, K={k}, dtype={dtype}, config=None"
                raise RuntimeError(f"gemm_a8w8_bpreshuffle failed for shape {shape}: This GEMM is not supported!")
            return _a8w8(XQ, _unshuffled(WQ), x_scale, w_scale, dtype)
    raise RuntimeError(f"Unsupported K for heuristic dispatch: {k}")


def _a8w8(x: Tensor, weight: Tensor, x_scale: Tensor, w_scale: Tensor, dtype: torch.dtype) -> Tensor:
    _dense(x, weight, x_scale, w_scale)
    assert x.dtype == weight.dtype
    assert x.dtype in (torch.float8_e4m3fn, torch.float8_e4m3fnuz)
    assert x_scale.shape == (x.shape[0], 1)
    assert w_scale.shape == (weight.shape[0], 1)
    assert x.shape[1] == weight.shape[1], f"K of x {x.shape[1]}, of the weight {weight.shape[1]}"
    assert dtype in SIXTEEN
    return ((x.float() * x_scale) @ (weight.float() * w_scale).T).to(dtype)
