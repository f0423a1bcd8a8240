"""Inputs of known faults, run on named kernels: ``python tests/faulty.py DEVICE`` under Triton's interpreter, or here.

far: slots that lie 2^31 elements or more into the pool give what near ones give. small: ``1 + w`` of a weight
that bfloat16 would lose. Prints, or returns, by kernel what went wrong; nothing where all is right.
"""

from __future__ import annotations

import json
import mmap
import sys
from typing import Any

import torch

import hal
from hal.ops import AddRMSNorm, CausalConv, GatedDeltaDecode, RMSNorm
from hal.ops.base import Op

FAR = 2**29 + 64  # elements from one slot to the next: both numbers fit 32 bits, their product does not


def bound(
    runtime: hal.Runtime, op: Op[..., Any], kernel: str, params: dict[str, torch.Tensor]
) -> tuple[Any, hal.Runtime]:
    """An op on a kernel that is forced, its weights filled."""
    policy = hal.Policy.of(force=[f"{op.title()}={kernel}"])
    forced = hal.Runtime(runtime.device, policy, runtime.registry, place="cpu")
    call = forced.bind(op, "site")
    assert call.choice.at(1).kernel.name == kernel
    forced.group_of(call).fill({p.name: params[p.name].to(getattr(torch, p.dtype)) for p in op.params()})
    return call, forced


def far_pool(pool: torch.Tensor) -> torch.Tensor:
    """The same slots, each FAR elements behind the one before; pages that nothing touches take no memory."""
    size = FAR * (pool.shape[0] - 1) + pool[0].numel()
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    memory = mmap.mmap(-1, size * pool.element_size(), flags=flags)
    wide = torch.frombuffer(memory, dtype=pool.dtype)
    far = wide.as_strided(pool.shape, (FAR, *pool.stride()[1:]))
    return far.copy_(pool)


def far(runtime: hal.Runtime, op: Any, kernel: str) -> str:
    """What differs between pools whose slots lie close together and far apart."""
    torch.manual_seed(0)
    params = {p.name: torch.randn(p.shape) * 0.3 for p in op.params()}
    call, forced = bound(runtime, op, kernel, params)
    widths = [a.shape[1] for a in op.signature().tensors("args")]
    given: Any = tuple(torch.randn(2, int(n)).to(torch.bfloat16) for n in widths)
    given = (given,) if len(widths) > 1 else given
    results = []
    pools = tuple(p.normal_(0, 0.5) for p in forced.group_of(call).new_state(6))
    for state in (tuple(p.clone() for p in pools), tuple(far_pool(p) for p in pools)):
        batch = forced.begin(hal.make_batch("decode", [1, 1], [5, 9], [5, 1]))
        out = call(*given, state, batch)
        results.append([*(out if isinstance(out, tuple) else (out,)), *(p.contiguous() for p in state)])
    same = all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    moved = [not torch.equal(a[5], b[5]) for a, b in zip(results[0][-len(pools) :], pools, strict=True)]
    return "" if same and all(moved) else f"far slots differ: {same}, the state moved: {moved}"


def small(runtime: hal.Runtime, op: Any, kernel: str) -> str:
    """How many of many values are not those of float64, rounded once."""
    torch.manual_seed(0)
    weight = torch.full((op.hidden,), 0.003).to(torch.bfloat16)
    weight[0], weight[1] = -1.0, -0.996
    call, _ = bound(runtime, op, kernel, {"norm": weight})
    x = torch.randn(4, op.hidden).to(torch.bfloat16)
    added = op.title() == "AddRMSNorm"
    got = call(torch.zeros_like(x), x)[0] if added else call(x)
    wide = x.double()
    unit = wide * (wide.square().mean(-1, keepdim=True) + op.eps).rsqrt()
    want = (unit * (1 + weight.double())).to(torch.bfloat16)
    wrong = int((got != want).sum())
    # a sum in another order may move a few over a tie
    return "" if wrong <= x.numel() // 50 and not got[:, 0].any() else f"{wrong} of {x.numel()} values are off"


DECODE = GatedDeltaDecode(key_heads=1, value_heads=2, key_head_dim=16, value_head_dim=16)
CONV = CausalConv(key_heads=1, value_heads=2, key_head_dim=16, value_head_dim=16, decode=True)
NORMS = (RMSNorm(hidden=256, offset=1.0), AddRMSNorm(hidden=256))


def faults(device: str, backend: str) -> dict[str, str]:
    """By kernel what went wrong."""
    facts = hal.load_device(device)
    if backend == "triton":
        facts = facts.replaced(pdl=False, cuda_bindings=None)
    runtime = hal.Runtime(facts, hal.Policy(), place="cpu")
    decoding = ("whole", "split") if backend == "triton" else ("", "ring")
    names = [f"{backend}.decode_{n}".rstrip("_") for n in decoding]
    found = {name: far(runtime, DECODE, name) for name in names}
    found[f"{backend}.causal_conv"] = far(runtime, CONV, f"{backend}.causal_conv")
    for op, name in zip(NORMS, ("rms_norm", "add_rms_norm"), strict=True):
        found[f"{backend}.{name}"] = small(runtime, op, f"{backend}.{name}")
    return found


if __name__ == "__main__":
    import interpreted

    interpreted.install()
    print(json.dumps(faults(sys.argv[1], "triton")))
