"""Device functions that several kernels use."""

# Triton grows tuples by addition, unpacks none
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment,misc"
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def moved(ahead, coming, DEPTH: tl.constexpr):
    """The DEPTH tiles under way without the first, with one more."""
    found = ()
    for d in tl.static_range(1, DEPTH):
        found = found + (ahead[d],)
    return found + (coming,)


@triton.jit
def begin(PDL: tl.constexpr):
    """Let the next kernel start as soon as there is room for it, and wait for what earlier ones write.

    The next one's own wait is for the end of this one, which is after that of all before. So
    before its wait a kernel may read only what no kernel that begins so writes: weights, the batch.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
