"""Ranks of one model over torch.distributed: what tensor parallelism needs, on any of its backends."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class Ranks:
    """The processes of torch.distributed's default group, as the runtime's communicator."""

    def __init__(self) -> None:
        import torch.distributed as dist

        self._dist = dist
        self.rank, self.world = dist.get_rank(), dist.get_world_size()

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over ranks in float32, in the order of ranks: on every rank the same bits."""
        parts = self.all_gather(tensor)
        total = parts[0].float()
        for part in parts[1:]:
            total = total + part.float()
        return total.to(tensor.dtype)

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's tensor, in the order of ranks."""
        parts = [tensor.new_empty(tensor.shape) for _ in range(self.world)]
        if tensor.numel():
            self._dist.all_gather(parts, tensor.contiguous())
        return parts

    def all_gather_object(self, value: str) -> list[str]:
        """Every rank's text, in the order of ranks."""
        found: list[str] = [""] * self.world
        self._dist.all_gather_object(found, value)
        return found


def from_environment() -> Ranks | None:
    """The ranks that ``torchrun`` started, or nothing where this process is alone."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return None
    import torch.distributed as dist

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    return Ranks()
