"""Graphs: what a step launches, recorded once and replayed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

R = TypeVar("R")


def capture(work: Callable[[], R]) -> tuple[Callable[[], None], R]:
    """Record ``work`` on a stream of its own: (replay, its result at fixed addresses)."""
    import torch

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = work()
    return graph.replay, result
