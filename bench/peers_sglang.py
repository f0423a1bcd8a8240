"""SGLang's Triton kernels (0.5.23) as peers, where they can be imported: from the wheel, or laid out on the path."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Calls = list[Callable[[], Any]]
Find = Callable[[str], Any]
OPS = "sglang.kernels.ops"


def cores(found: Find, problem: Any) -> Calls:
    """Its three kernels for the decode core: convolution, update, gated norm; on state copies of their own."""
    names = ("triton_gdn_fused_proj", "fla.fused_recurrent", "fla.layernorm_gated")
    conv, update, norm = (found(f"{OPS}.attention.{name}") for name in names)
    if conv is None or update is None or norm is None:
        return []
    op, slots = problem.op, problem.batch.slots.clone()
    sizes = {
        "qkv_dim": op.conv_dim, "v_dim": op.value_dim, "num_v_heads": op.value_heads, "head_v_dim": op.value_head_dim
    }  # fmt: skip

    def call(projected: tuple[Tensor, ...], pools: tuple[Tensor, ...], params: Any) -> Callable[[], Tensor]:
        qkv, z, b, a = projected
        weight = torch.cat([params[f"conv_{part}"] for part in "qkv"])
        qkvz, ba = torch.cat([qkv, z], 1), torch.cat([b, a], 1)
        # the last inputs, oldest first; which they are says nothing of the time
        kept, delta = pools[0][:, :, : op.conv_width - 1].clone(), pools[1].clone()

        def run() -> Tensor:
            mixed, z, b, a = conv.fused_qkvzba_causal_conv1d_update_contiguous(
                qkvz, ba, kept, weight, None, slots, activation="silu", **sizes
            )
            out = torch.empty((z.shape[0], 1, *z.shape[1:]), dtype=z.dtype, device=z.device)
            update.fused_recurrent_gated_delta_rule_packed_decode(
                mixed, a, b, params["A_log"], params["dt_bias"], op.key_head_dim**-0.5, delta, out, slots,
                use_qk_l2norm_in_kernel=True,
            )  # fmt: skip
            return norm.rms_norm_gated(
                x=out.flatten(0, 2), weight=params["norm"], bias=None, z=z.flatten(0, 1), eps=op.eps, is_rms_norm=True
            )

        return run

    steps = zip(problem.args, problem.states, problem.params, strict=True)
    return [call(args[0], pools, params) for args, pools, params in steps]


def verifications(find: Find, problem: Any, ring: bool) -> Calls:
    """Its kernels for drafted tokens, on copies of the state: convolution, update, gated norm, and the commit.

    The update keeps the state after each token, of which the commit copies one; or with ``ring`` each token's
    k, v and gates, which the commit folds into the state (a launch a layer here, one for all layers there).
    """
    convs, norms = find("sglang.kernels.ops.mamba.causal_conv1d_triton"), find(f"{OPS}.attention.fla.layernorm_gated")
    updates = find(f"{OPS}.attention.linear.fused_sigmoid_gating_recurrent")
    folds = find(f"{OPS}.attention.linear.gdn_replayssm_spec_fold")
    if convs is None or norms is None or updates is None or folds is None:
        return []
    op, slots, place = problem.op, problem.batch.slots.clone(), problem.args[0][0][0].device
    count, tokens, kept = slots.numel(), op.queries, op.conv_width - 1
    if problem.rows != count * tokens:
        raise ValueError(f"has {problem.rows} rows: its kernels want {tokens} of each sequence")
    widths = (op.key_dim, op.key_dim, op.value_dim)
    heads, sizes = (op.key_heads, op.key_heads, op.value_heads), (op.key_head_dim, op.key_head_dim, op.value_head_dim)
    lines = torch.arange(count, device=place, dtype=torch.int32)
    taken = torch.full((count,), tokens, device=place, dtype=torch.int32)
    last = torch.arange(count, device=place) * tokens + tokens - 1  # all stand: each costs the same

    def call(projected: tuple[Tensor, ...], pools: tuple[Tensor, ...], params: Any) -> Callable[[], Tensor]:
        qkv, z, b, a = projected
        weight = torch.cat([params[f"conv_{part}"] for part in "qkv"])
        rolled = pools[0].new_zeros(count, op.conv_dim, kept)
        windows = pools[0].new_zeros(count, tokens, op.conv_dim, kept)
        delta = pools[1][:count].clone()

        def zeros(*shape: int, kind: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(shape, device=place, dtype=kind)

        options: dict[str, Any]
        if ring:
            rings = (
                zeros(count, op.value_heads, tokens, op.value_head_dim, kind=qkv.dtype),
                zeros(count, op.key_heads, tokens, op.key_head_dim, kind=qkv.dtype),
                *(zeros(count, op.value_heads, tokens) for _ in range(2)),
            )
            names = ("replayssm_rawv", "replayssm_rawk", "replayssm_g", "replayssm_beta")
            options = {"cache_ring": True, **dict(zip(names, rings, strict=True))}
        else:
            every = delta.new_zeros(count, tokens, *delta.shape[1:])
            options = {"intermediate_states_buffer": every, "intermediate_state_indices": lines, "cache_steps": tokens}

        def run() -> Tensor:
            mixed = convs.causal_conv1d_update(
                qkv.view(count, tokens, -1).transpose(1, 2), rolled, weight, None, "silu", conv_state_indices=lines,
                intermediate_conv_window=windows, intermediate_state_indices=lines,
            ).transpose(1, 2).reshape(1, count * tokens, -1)  # fmt: skip
            parts = mixed.split(widths, -1)
            q, k, v = (x.unflatten(-1, shape) for x, shape in zip(parts, zip(heads, sizes, strict=True), strict=True))
            out = updates.fused_sigmoid_gating_delta_rule_update(
                params["A_log"], a, params["dt_bias"], 1.0, 20.0, q, k, v, b, delta, lines,
                use_qk_l2norm_in_kernel=True, cu_seqlens=problem.batch.cu_seqlens, disable_state_update=True, **options,
            )  # fmt: skip
            if ring:
                folds.commit_gdn_replayssm_fold_all_layers(
                    delta[None], *(x[None] for x in rings), lines, taken, tokens, op.key_heads
                )
            else:
                torch.index_select(every.flatten(0, 1), 0, last, out=delta)
            torch.index_select(windows.flatten(0, 1), 0, last, out=rolled)
            return norms.rms_norm_gated(
                x=out.reshape(-1, op.value_head_dim), weight=params["norm"], bias=None,
                z=z.reshape(-1, op.value_head_dim), eps=op.eps, is_rms_norm=True,
            )  # fmt: skip

        return run

    steps = zip(problem.args, problem.states, problem.params, strict=True)
    return [call(args[0], pools, params) for args, pools, params in steps]


def launches(folder: Path, op: Any, rows: int, device: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Its settings for both products: tuned for so many rows where a file of it is there, else its defaults.

    Files are by version of triton: that which is installed, else the last.
    """
    import triton

    plain = {"BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 32, "GROUP_SIZE_M": 8}
    few = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 32, "BLOCK_SIZE_K": 64, "GROUP_SIZE_M": 1}
    stem = f"E={op.experts},N={op.intermediate},device_name={device.replace(' ', '_')}"

    def tuned(name: str) -> dict[str, Any] | None:
        here = f"triton_{triton.__version__.replace('.', '_')}"
        files = sorted(folder.glob(f"configs/*/{name}.json"), key=lambda f: (f.parent.name == here, f.parent.name))
        if not files:
            return None
        table = json.loads(files[-1].read_text())
        nearest = min((key for key in table if key.isdigit()), key=lambda key: abs(int(key) - rows))
        return {key: value for key, value in table[nearest].items() if key != "USE_TMA"}

    up = tuned(stem) or (few if rows <= op.experts else plain)
    down = tuned(f"{stem}_down") or up
    return up, {**down, "BLOCK_SIZE_M": up["BLOCK_SIZE_M"]}  # one sorting serves both


def aligned(chosen: Tensor, experts: int, block: int) -> tuple[Tensor, Tensor, Tensor]:
    """Pairs sorted by expert, each expert's share padded to whole blocks; the blocks' experts; how many in all."""
    flat = chosen.flatten()
    counts = torch.bincount(flat, minlength=experts)
    padded = -(-counts // block) * block
    starts, begins = padded.cumsum(0) - padded, counts.cumsum(0) - counts
    order = flat.argsort(stable=True)
    total = int(padded.sum())
    places = starts[flat[order]] + torch.arange(flat.numel(), device=flat.device) - begins[flat[order]]
    pairs = torch.full((total,), flat.numel(), dtype=torch.int32, device=flat.device)
    pairs[places] = order.int()
    owners = torch.arange(experts, device=flat.device).repeat_interleave(padded // block).int()
    return pairs, owners, torch.tensor([total], dtype=torch.int32, device=flat.device)


def experts(found: Find, problem: Any) -> Calls:
    """Its grouped products, activation and sum over the routed experts; the choice is made and sorted before."""
    kernels = found(f"{OPS}.moe.fused_moe_triton_kernels")
    if kernels is None:
        return []
    import triton.language as tl

    op, rows, place = problem.op, problem.rows, problem.args[0][0].device
    kind = getattr(torch, op.dtype)
    folder = Path(kernels.__file__).parents[3] / "srt/layers/moe/moe_runner/triton_utils"
    device = torch.cuda.get_device_name(place) if place.type == "cuda" else ""
    up, down = launches(folder, op, rows, device)
    off = dict.fromkeys(
        ("use_fp8_w8a8", "use_int8_w8a8", "use_int8_w8a16", "use_int4_w4a16", "per_channel_quant"), False
    )

    def call(args: tuple[Tensor, ...], params: Any) -> Callable[[], Tensor]:
        x = args[1].clone()
        weights, chosen = (x @ params["router"].T).float().softmax(-1).topk(op.top_k)
        weights, chosen = weights / weights.sum(-1, keepdim=True), chosen.int()
        sorting = aligned(chosen, op.experts, up["BLOCK_SIZE_M"])

        def run() -> Tensor:
            def empty(*shape: int) -> Tensor:
                return torch.empty(shape, dtype=kind, device=place)

            def product(x: Tensor, weight: Tensor, out: Tensor, scaled: bool, top_k: int, config: Any) -> None:
                kernels.invoke_fused_moe_kernel(
                    x, weight, None, out, None, None, None, weights, chosen, *sorting, scaled, top_k, config,
                    compute_type=tl.bfloat16 if kind == torch.bfloat16 else tl.float16, filter_expert=False, **off,
                )  # fmt: skip

            both, act = empty(rows * op.top_k, 2 * op.intermediate), empty(rows * op.top_k, op.intermediate)
            each, out = empty(rows, op.top_k, op.hidden), empty(rows, op.hidden)
            product(x, params["experts_gate_up"], both, False, op.top_k, up)
            kernels.act_and_mul_triton(both, act, up)
            product(act, params["experts_down"], each, True, 1, down)
            kernels.moe_sum_reduce_triton(each, out, 1.0)
            return out

        return run

    return [call(args, params) for args, params in zip(problem.args, problem.params, strict=True)]
