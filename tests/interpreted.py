"""Verify kernels under Triton's interpreter: ``python tests/interpreted.py DEVICE OP KERNEL [OP KERNEL ...]``.

Prints the verdicts as JSON: a list, or with several pairs ``{"OP KERNEL": list}``.

The interpreter is chosen when kernels are defined, so it needs a process of its own. It truncates
float32 to bfloat16 and miscodes fp8; its conversion is replaced by torch's, and the check of that
over all codes and ties comes first.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
import triton.language as tl
import triton.runtime.interpreter as interpreter

KINDS = {"bf16": torch.bfloat16, "fp8e4nv": torch.float8_e4m3fn, "fp8e4b8": torch.float8_e4m3fnuz}


def _torch_kind(kind: Any) -> torch.dtype | None:
    return KINDS.get(str(kind))


def install() -> None:
    """All that the interpreter lacks."""
    _convert()
    _widen_dots()
    _patch_once()


def _convert() -> None:
    """The interpreter's float conversion is torch's."""
    given = interpreter._convert_float

    def convert(value: Any, source: Any, target: Any, rounding: Any) -> Any:
        narrow, wide = _torch_kind(target), _torch_kind(source)
        if narrow is not None and str(source) == "fp32":
            made = torch.from_numpy(np.ascontiguousarray(value).view(np.float32)).to(narrow)
            raw = made.view(torch.int16 if narrow == torch.bfloat16 else torch.uint8).numpy()
            return raw.view(np.uint16) if narrow == torch.bfloat16 else raw
        if wide is not None and str(target) == "fp32":
            bits = np.ascontiguousarray(value)
            held = torch.from_numpy(bits.view(np.int16 if wide == torch.bfloat16 else np.uint8)).view(wide)
            return held.float().numpy().view(np.uint32)
        return given(value, source, target, rounding)

    interpreter._convert_float = convert


def _widen_dots() -> None:
    """Dots of bfloat16 in float32 (the interpreter multiplies the codes); bounds that are tensors; masks of bool."""
    builder, patch = interpreter.InterpreterBuilder, interpreter._patch_lang_tensor
    dot, load, store = builder.create_dot, builder.create_masked_load, builder.create_masked_store

    def truth(mask: Any) -> Any:
        return interpreter.TensorHandle(np.asarray(mask.data).astype(bool), mask.dtype)

    def wide(x: Any) -> Any:
        if str(x.dtype.scalar) != "bf16":
            return x
        bits = np.ascontiguousarray(x.data).view(np.int16)
        return interpreter.TensorHandle(torch.from_numpy(bits).view(torch.bfloat16).float().numpy(), tl.float32)

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched
    builder.create_dot = lambda self, a, b, *rest: dot(self, wide(a), wide(b), *rest)
    builder.create_masked_load = lambda self, at, mask, *rest: load(self, at, truth(mask), *rest)
    builder.create_masked_store = lambda self, at, value, mask, *rest: store(self, at, value, truth(mask), *rest)


def _patch_once() -> None:
    """The language is patched once a launch, and not at every call of a function in it: a third of all time."""
    given, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    patched: set[tuple[int, ...]] = set()

    def patch(fn: Any) -> Any:
        modules = tuple(sorted({id(value) for value in fn.__globals__.values() if value in (tl, tl.core)}))
        if modules in patched:
            return interpreter._LangPatchScope()
        patched.add(modules)
        return given(fn)

    def launched(self: Any, *args: Any, **kwargs: Any) -> Any:
        patched.clear()
        return launch(self, *args, **kwargs)

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch, launched


def check() -> None:
    """The conversion is the one installed: every code back and forth, every tie to even."""
    import triton

    @triton.jit
    def cast(source, target, N: tl.constexpr):  # type: ignore[no-untyped-def]
        at = tl.arange(0, N)
        tl.store(target + at, tl.load(source + at).to(target.dtype.element_ty))

    for kind, bits in ((torch.bfloat16, torch.int16), (torch.float8_e4m3fn, torch.uint8)):
        codes = (
            torch.arange(65536).to(torch.int32).to(torch.int16) if bits == torch.int16 else torch.arange(256).to(bits)
        )
        values = codes.view(kind).float()
        ties = (values[:-1] + values[1:]) / 2
        for x in (values, torch.cat([ties, ties[-1:]])):
            x = torch.where(torch.isfinite(x), x, 0.0)
            got = torch.empty(x.shape, dtype=kind)
            cast[(1,)](x, got, N=x.numel())
            if not torch.equal(got.view(bits), x.to(kind).view(bits)):
                raise SystemExit(f"the interpreter's conversion to {kind} is not torch's: the hook is gone")


def main(device: str, *pairs: str) -> None:
    import hal
    from hal.conformance import verify_kernel

    torch.set_num_threads(1)
    install()
    check()
    found = {}
    for op, kernel in zip(pairs[::2], pairs[1::2], strict=True):
        # no part of a kernel may be a vendor's
        facts = hal.load_device(device).replaced(pdl=False, cuda_bindings=None, flashinfer=None, aiter=None)
        runtime = hal.Runtime(facts, hal.Policy(), place="cpu")
        # the interpreter gives the same bits each time
        verdicts = verify_kernel(runtime, hal.ops.op_class(op), kernel, repeats=1)
        found[f"{op} {kernel}"] = [[v.case, v.status, v.detail] for v in verdicts]
    print(json.dumps(found if len(found) != 1 else next(iter(found.values()))))


if __name__ == "__main__":
    main(*sys.argv[1:])
