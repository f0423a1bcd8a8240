"""Attention and MoE on a GPU: right, and how fast, over variants of their launches.

    PYTHONPATH=.:backends/torch:backends/triton:backends/cuda:models python bench/try_attention.py

Times are of graph replays over rotating buffers. Writes $OUT/attention.json as it goes.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

import hal
from hal.batch import Batch, make_batch
from hal.kernel import Site
from hal.ops import AttentionDecode, AttentionPrefill, MoE

CEILING = 4.28e12  # bytes per second, torch.mul of 2 GiB on an H200
ROTATE = 200e6
LIMIT = float(os.environ.get("LIMIT", "170"))
BEGAN = time.time()
RESULTS: list[dict[str, Any]] = []
Call = Callable[..., Any]


def note(what: str, us: float, floor: float, **more: Any) -> None:
    RESULTS.append({"what": what, "us": round(us, 2), "floor_us": round(floor, 2), **more})
    print(
        f"{time.time() - BEGAN:5.0f}s {what:64s} {us:9.2f} us  floor {floor:8.2f}  {us / floor:5.2f}x  {more}",
        flush=True,
    )
    with open(os.path.join(os.environ.get("OUT", "."), "attention.json"), "w") as file:
        json.dump(RESULTS, file, indent=1)


def timed(calls: Sequence[Callable[[], object]], milliseconds: float = 30.0) -> float:
    """Microseconds a call, the best of five replays of a graph that runs them all, over and over."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def once(times: int) -> float:
        start.record()
        for _ in range(times):
            graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / times

    once(2)
    times = max(2, int(milliseconds / max(once(2), 1e-3)))
    return min(once(times) for _ in range(5)) * 1e3 / len(calls)


def guarded(what: str, work: Callable[[], None]) -> None:
    """One failure, or time that is up, does not take the rest along."""
    if time.time() - BEGAN > LIMIT:
        return
    try:
        work()
    except Exception as error:  # noqa: BLE001
        said = f"{type(error).__name__}: {str(error)[:200]}"
        print(f"{what}: {said}", flush=True)
        RESULTS.append({"what": what, "error": said})


def site(runtime: hal.Runtime, bound: Any, settings: Mapping[str, Any]) -> Site:
    """A site of the op that was bound, with other settings."""
    op, piece = bound.choice.op, bound.choice.pieces[0]
    storages = runtime.group_of(bound).storages
    return Site(op, "try", settings, bound.choice.layouts, storages, {}, {}, runtime, piece.kernel.name)


def force(op: str, kernel: str) -> hal.Runtime:
    return hal.Runtime(hal.load_device("h200"), hal.Policy.of(force=[f"{op}={kernel}"]), place="cuda:0")


def filled(op: Any, batch: int, context: int, length: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """q, gate, kv and the batch, pages dealt out at random."""
    generator = torch.Generator("cuda").manual_seed(seed)
    total, rows = context + length, batch * length
    each = -(-total // op.page_size)
    order = torch.randperm(batch * each).tolist()
    made = make_batch(
        op.mode, [length] * batch, [context] * batch, range(batch), page_size=op.page_size, device="cuda",
        pages=[order[i * each : (i + 1) * each] for i in range(batch)],
    )  # fmt: skip
    shape = (batch * each, 2, op.page_size, op.kv_heads, op.head_dim)
    kv = torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)
    q, gate = (
        torch.randn(rows, op.heads, op.head_dim, generator=generator, device="cuda", dtype=torch.bfloat16)
        for _ in range(2)
    )
    return q, gate, kv, made  # type: ignore[return-value]


def truth(op: Any, q: torch.Tensor, gate: torch.Tensor, kv: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Float32 attention of the last row of each sequence."""
    rows = []
    for index, end in enumerate(batch.cu_seqlens.tolist()[1:]):
        total = batch.host.kv_lengths[index]
        k, v = kv[batch.page_table[index].long()].transpose(0, 1).flatten(1, 2)[:, :total].float()
        heads = q[end - 1].float().unflatten(0, (op.kv_heads, -1))
        weights = (torch.einsum("hgd,nhd->hgn", heads, k) * op.head_dim**-0.5).softmax(-1)
        rows.append(torch.einsum("hgn,nhd->hgd", weights, v).flatten() * gate[end - 1].float().sigmoid().flatten())
    return torch.stack(rows)


def off(got: torch.Tensor, want: torch.Tensor) -> float:
    """Largest error as a share of the largest value."""
    return round(float((got.float() - want).abs().max() / want.abs().max()), 5)


def decode_variants(settings: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    yield dict(settings)
    for block, warps, stages in ((16, 2, 4), (32, 4, 2), (32, 4, 5), (32, 2, 3), (64, 4, 3), (64, 8, 3)):
        yield {**settings, "BLOCK_N": block, "num_warps": warps, "num_stages": stages}
    for waves in (1, 2, 8):
        yield {**settings, "programs": 132 * waves}


def decode(runtime: hal.Runtime) -> None:
    op = AttentionDecode(heads=16, kv_heads=4, head_dim=256)
    bound = runtime.bind(op, "decode")
    for context in (8192, 256):
        for rows in (1, 16, 64, 128):
            decode_one(runtime, bound, context, rows)


def decode_one(runtime: hal.Runtime, bound: Any, context: int, rows: int) -> None:
    from hal_triton.code.attention import decode as load

    q, gate, kv, batch = filled(bound.choice.op, rows, context - 1, 1)
    moved = kv.numel() * 2 + 3 * q.numel() * 2
    pools = [kv, *(kv.clone() for _ in range(min(255, int(ROTATE // moved))))]
    want = truth(bound.choice.op, q, gate, kv, batch)
    for settings in decode_variants(bound.choice.pieces[0].settings):
        what = f"decode b{rows} ctx{context} " + "N{BLOCK_N} w{num_warps} s{num_stages} p{programs}".format(**settings)

        def work(settings: Any = settings, what: str = what) -> None:
            call = load(site(runtime, bound, settings))
            error = off(call(q, gate, (kv,), batch), want)
            calls = [lambda p=p: call(q, gate, (p,), batch) for p in pools]
            note(what, timed(calls, 10.0), moved / CEILING * 1e6, error=error)

        guarded(what, work)


def prefill(runtime: hal.Runtime) -> None:
    from hal_triton.code.attention import prefill as load

    length = 8192
    op = AttentionPrefill(heads=16, kv_heads=4, head_dim=256)
    bound = runtime.bind(op, "prefill")
    q, gate, kv, batch = filled(op, 1, 0, length)
    want = truth(op, q, gate, kv, batch)
    floor = 2 * length * length * 256 * 16 / 989e12 * 1e6  # half of the square, two products
    base = bound.choice.pieces[0].settings
    for tokens, block, warps, stages in (
        (32, 64, 8, 2),
        (32, 64, 8, 1),
        (32, 32, 8, 3),
        (32, 128, 8, 1),
        (16, 64, 4, 2),
    ):
        what = f"prefill {length} T{tokens} N{block} w{warps} s{stages}"
        chosen = {**base, "BLOCK_T": tokens, "BLOCK_N": block, "num_warps": warps, "num_stages": stages}

        def work(chosen: Any = chosen, what: str = what) -> None:
            fresh = force("AttentionPrefill", "triton.attention_prefill")
            call = load(replace(site(fresh, fresh.bind(op, "prefill"), chosen), kernel=what))
            fresh.begin(batch)
            error = off(call(q, gate, (kv,), batch)[-1:], want)
            note(what, timed([lambda: call(q, gate, (kv,), batch)]), floor, error=error)

        guarded(what, work)

    def peer() -> None:
        pages = batch.page_table[0].long()
        k, v = (kv[pages, side].flatten(0, 1).transpose(0, 1)[None].contiguous() for side in (0, 1))
        heads = q.transpose(0, 1)[None]
        run = torch.nn.functional.scaled_dot_product_attention
        note(
            f"prefill {length} torch SDPA, dense, no gate",
            timed([lambda: run(heads, k, v, is_causal=True, enable_gqa=True)]),
            floor,
        )

    guarded("SDPA", peer)


def moe() -> None:
    op = MoE(hidden=2048, intermediate=512, experts=256, top_k=8, shared_intermediate=512)
    one = 3 * op.hidden * op.intermediate * 2
    kernels = {"triton.moe_few": (1, 4, 8), "triton.moe_some": (1, 4, 16, 64), "triton.moe": (16, 512, 8192)}
    for kernel, pieces in kernels.items():
        runtime = force("MoE", kernel)
        bound = runtime.bind(op, "moe")
        group = runtime.group_of(bound)
        for param in op.params():
            mean, deviation = param.init
            made = torch.randn(param.shape, device="cuda", dtype=torch.bfloat16) * deviation + mean
            group.storages[param.memory].put(param.name, made)
        runtime.seal()
        p = {n: s.read() for n, s in group.storages.items()}
        for rows in pieces:
            call = bound.at(rows)
            # inputs rotate, so that experts do: 256 of them are 1.6 GB
            inputs = [
                [torch.randn(rows, op.hidden, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
                for _ in range(1 if rows > 64 else 8)
            ]

            def work(
                call: Call = call, inputs: Any = inputs, rows: int = rows, p: Any = p, kernel: str = kernel
            ) -> None:
                touched, error = 0, 0.0
                for partial, residual in inputs:
                    got, after = call(partial, residual)
                    x = after.float()
                    x = x * (x.square().mean(-1, keepdim=True) + op.eps).rsqrt() * (1 + p["norm"].float())
                    logits = x.to(torch.bfloat16).float() @ p["router"].float().T
                    weights, ids = logits.softmax(-1).topk(op.top_k)
                    touched += ids.unique().numel()
                    weights = weights / weights.sum(-1, keepdim=True)

                    def mlp(x: torch.Tensor, wide: torch.Tensor, narrow: torch.Tensor) -> torch.Tensor:
                        a, b = (wide.float() @ x).chunk(2)
                        return narrow.float() @ (torch.nn.functional.silu(a) * b)

                    row = rows - 1
                    want = mlp(x[row], p["shared_gate_up"], p["shared_down"])
                    want = want * (p["shared_sigmoid"].float() @ x[row]).sigmoid()
                    for weight, e in zip(weights[row], ids[row].tolist(), strict=True):
                        want += weight * mlp(x[row], p["experts_gate_up"][e], p["experts_down"][e])
                    error = max(error, off(got[row], want))
                touched = touched / len(inputs)  # type: ignore[assignment]
                flops = 2 * rows * (op.top_k + 1) * one / 2
                floor = max(((touched + 1) * one + op.experts * op.hidden * 2) / CEILING, flops / 989e12) * 1e6
                calls = [lambda a=a: call(*a) for a in inputs]
                note(f"{kernel} rows {rows}", timed(calls, 20.0), floor, experts=touched, error=error)

            guarded(f"{kernel} rows {rows}", work)
        del p, group, bound, runtime
        torch.cuda.empty_cache()


if __name__ == "__main__":
    torch.manual_seed(0)
    print(sys.version.split()[0], torch.__version__, torch.cuda.get_device_name(), flush=True)
    # the short ones first: what time is left goes to the variants of decode
    guarded("moe", moe)
    guarded("prefill", lambda: prefill(force("AttentionPrefill", "triton.attention_prefill")))
    guarded("decode", lambda: decode(force("AttentionDecode", "triton.attention_decode")))
