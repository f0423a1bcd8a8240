"""Ranks of one model: what tensor parallelism needs, over any backend of torch.distributed."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from hal.errors import BindError, HalError

if TYPE_CHECKING:
    import torch


class Comm(Protocol):
    """What the ranks of one model share. ``all_gather_object`` is used at load only."""

    rank: int
    world: int

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor: ...

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]: ...

    def all_gather_object(self, value: str) -> list[str]: ...


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
    text = os.environ.get("WORLD_SIZE", "1")
    if not text.isdigit():
        raise HalError(f"WORLD_SIZE: expected a number of ranks, got {text!r}")
    if int(text) == 1:
        return None
    import torch.distributed as dist

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    return Ranks()


def agree(comm: Comm, lines: Sequence[str]) -> None:
    """Raise BindError unless all ranks chose alike, naming the first difference."""
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    if len(set(comm.all_gather_object(digest))) == 1:
        return
    everyone = [text.split("\n") for text in comm.all_gather_object("\n".join(lines))]
    for rank, theirs in enumerate(everyone):
        pairs = zip(everyone[0], theirs, strict=False)
        differ = next(((a, b) for a, b in pairs if a != b), None)
        if differ or len(theirs) != len(everyone[0]):
            shown = differ or (f"{len(everyone[0])} ops", f"{len(theirs)} ops")
            raise BindError(f"ranks chose differently: rank 0 {shown[0]}; rank {rank} {shown[1]}")
