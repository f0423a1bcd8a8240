"""Declarations: norms, activations, encoders, collectives, embedding, sampling."""

from __future__ import annotations

from collections.abc import Mapping

from hal.device import Device
from hal.formats import Format, Tensor
from hal.kernel import Kernel, Part, kernel
from hal.numerics import EXACT, REASSOCIATED, Numerics
from hal.ops import (
    AddRMSNorm,
    AllGather,
    AllReduce,
    ArgMax,
    Copy,
    Embed,
    GatedRMSNorm,
    Quantize,
    RMSNorm,
    Sample,
    SiluMul,
)
from hal.requirement import Reason, library

CODE = "hal_torch.code.small"
TORCH = (library("torch", ">=2.9"),)


@kernel("torch.rms_norm", code=f"{CODE}:rms_norm")
class TorchRMSNorm(Kernel[RMSNorm]):
    """The norm in float32."""

    needs = TORCH


@kernel("torch.add_rms_norm", code=f"{CODE}:add_rms_norm")
class TorchAddRMSNorm(Kernel[AddRMSNorm]):
    """Add and norm of one rank."""

    needs = TORCH

    def refuses(self, op: AddRMSNorm, device: Device) -> Reason | None:
        return Reason("rank", f"reduces over no ranks; world is {op.world}") if op.world > 1 else None


@kernel("torch.gated_rms_norm", code=f"{CODE}:gated_rms_norm")
class TorchGatedRMSNorm(Kernel[GatedRMSNorm]):
    """Norm, then gate, in float32."""

    needs = TORCH


@kernel("torch.silu_mul", code=f"{CODE}:silu_mul")
class TorchSiluMul(Kernel[SiluMul]):
    """In float32."""

    needs = TORCH


@kernel("torch.quantize", code=f"{CODE}:quantize")
class TorchQuantize(Kernel[Quantize]):
    """Every format; torch's own division and rounding."""

    needs = TORCH

    def makes(self, op: Quantize) -> tuple[Format, ...]:
        return (op.out,)

    def numerics(self, op: Quantize) -> Numerics:
        return EXACT


@kernel("torch.copy", code=f"{CODE}:copy")
class TorchCopy(Kernel[Copy]):
    """``contiguous()``, always a copy."""

    needs = TORCH

    def numerics(self, op: Copy) -> Numerics:
        return EXACT


@kernel("torch.all_reduce", code=f"{CODE}:all_reduce")
class TorchAllReduce(Kernel[AllReduce]):
    """The runtime's communicator; on one rank the tensor itself."""

    needs = TORCH

    def numerics(self, op: AllReduce) -> Numerics:
        return EXACT if op.world == 1 else REASSOCIATED


@kernel("torch.all_gather", code=f"{CODE}:all_gather")
class TorchAllGather(Kernel[AllGather]):
    """The runtime's communicator, then one concatenation."""

    needs = TORCH

    def numerics(self, op: AllGather) -> Numerics:
        return EXACT


@kernel("torch.embed", code=f"{CODE}:embed")
class TorchEmbed(Kernel[Embed]):
    """``F.embedding``; ids of other ranks are masked to zero."""

    needs = TORCH

    def numerics(self, op: Embed) -> Numerics:
        return EXACT


@kernel("torch.argmax", code=f"{CODE}:argmax")
class TorchArgMax(Kernel[ArgMax]):
    """``Tensor.argmax``, which gives the first of equals."""

    needs = TORCH

    def numerics(self, op: ArgMax) -> Numerics:
        return EXACT


@kernel("torch.sample", code=f"{CODE}:sample")
class TorchSample(Kernel[Sample]):
    """A stable sort of each row; where all are greedy, ArgMax alone."""

    needs = TORCH

    def makes(self, op: Sample) -> tuple[Format, ...]:
        return (Tensor("int64"),)

    def parts(self, op: Sample) -> Mapping[str, Part]:
        return {"greedy": Part(ArgMax(vocab=op.vocab, dtype=op.dtype))}
