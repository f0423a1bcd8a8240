"""What kernels of ops that open a layer declare alike: the norm as a part, and weights of one format."""

from __future__ import annotations

from typing import Any

from hal.formats import Tensor
from hal.kernel import Part
from hal.ops import AddRMSNorm
from hal.requirement import Reason


def norm_part(op: Any) -> Part:
    """Reduction, residual add and norm of an op with ``hidden`` and ``eps``, in its dtype."""
    return Part(AddRMSNorm(hidden=op.hidden, eps=op.eps, dtype=op.dtype, out=Tensor(op.dtype), world=op.world))


def one_format(op: Any) -> Reason | None:
    """Why one product cannot read the weights of all parts, or nothing where they are all in the op's dtype."""
    formats = sorted({str(p.weight_format) for p in op.parts})
    if formats != [op.dtype]:
        return Reason("op", f"needs weights in {op.dtype}; the parts have {', '.join(formats)}")
    return None
