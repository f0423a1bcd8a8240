"""Declarations: mixtures of experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from hal.device import Device
from hal.kernel import Kernel, Part, Rows, kernel
from hal.numerics import REASSOCIATED, Numerics
from hal.opening import norm_part
from hal.ops import MoE
from hal.requirement import Reason, library

CODE = "hal_torch.code.moe"
TORCH = (library("torch", ">=2.9"),)
GATHER_ROWS = 4  # above, copies of experts' weights cost more than calls per expert


class _MoE(Kernel[MoE]):
    needs = TORCH

    def numerics(self, op: MoE) -> Numerics:
        return replace(REASSOCIATED, roundings=3)  # gate and up, their product, each expert's result

    def parts(self, op: MoE) -> Mapping[str, Part]:
        return {"norm": norm_part(op)}


@kernel("torch.moe_gathered", code=f"{CODE}:gathered")
class GatheredMoE(_MoE, Kernel[MoE]):
    """For few rows: the weights of the experts chosen, gathered, then batched products."""

    launches = 12

    def rows(self, op: MoE, device: Device) -> Rows:
        return (1, GATHER_ROWS)


@kernel("torch.moe", code=f"{CODE}:by_expert")
class ExpertMoE(_MoE, Kernel[MoE]):
    """Expert by expert over the rows that chose it; reads the routing on the host."""

    captures = False
    launches = 40


@kernel("torch.moe_quantized", code=f"{CODE}:quantized")
class QuantizedMoE(_MoE, Kernel[MoE]):
    """Expert by expert: activations as the checkpoint rounds them, real values multiplied in float32."""

    captures = False
    launches = 80
    quantized = True

    def refuses(self, op: MoE, device: Device) -> Reason | None:
        return None if op.schemes() else Reason("op", f"needs quantized experts; all are in {op.dtype}")

    def numerics(self, op: MoE) -> Numerics:
        rounded = [scheme.activations.value for scheme in (op.routed, op.shared) if scheme and scheme.activations]
        # what goes into both matrices of an expert
        return replace(super().numerics(op), narrow=(*rounded[:1], *rounded[:1]))
