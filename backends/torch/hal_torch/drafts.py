"""Declarations: drafted tokens, verified and judged."""

from __future__ import annotations

from collections.abc import Mapping

from hal.device import Device
from hal.formats import STATIC_FP8, Format, Tensor
from hal.kernel import Kernel, Part, kernel
from hal.layout import KV, VK, Layout
from hal.ops import Accept, ArgMax, AttentionVerify, GatedDeltaVerify
from hal.requirement import library

CODE = "hal_torch.code"
TORCH = (library("torch", ">=2.9"),)


@kernel("torch.verify", code=f"{CODE}.drafts:verify")
class Verify(Kernel[GatedDeltaVerify]):
    """Pending tokens as one product into the state, then all rows of a sequence as one chunk."""

    needs = TORCH
    captures = False

    def reads(self, op: GatedDeltaVerify, device: Device) -> Mapping[str, tuple[Layout, ...]]:
        return {**op.rings(), "delta": (VK(), KV())}

    def makes(self, op: GatedDeltaVerify) -> tuple[Format, ...]:
        return (Tensor(op.dtype), STATIC_FP8)


@kernel("torch.attention_verify", code=f"{CODE}.attention:prefill")
class AttentionFew(Kernel[AttentionVerify]):
    """``scaled_dot_product_attention``, a sequence at a time."""

    needs = TORCH
    captures = False


@kernel("torch.accept", code=f"{CODE}.drafts:accept")
class TorchAccept(Kernel[Accept]):
    """As ``torch.sample`` row by row, then comparisons; where all are greedy, ArgMax picks."""

    needs = TORCH
    launches = 12

    def makes(self, op: Accept) -> tuple[Format, ...]:
        return (Tensor("int64"),)

    def parts(self, op: Accept) -> Mapping[str, Part]:
        return {"greedy": Part(ArgMax(vocab=op.vocab, dtype=op.dtype))}
