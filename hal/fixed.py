"""A decode batch at fixed addresses, which a captured graph reads: filled from the host by one copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hal.batch import Batch, Host, Sampling
from hal.errors import HalError

if TYPE_CHECKING:
    import torch

# name, dtype, numbers per row (0: one more than the rows; -1: a row of the page table)
SECTIONS = (
    ("ids", "int64", 1),
    ("positions", "int64", 1),
    ("cells", "int64", 1),
    ("slots", "int32", 1),
    ("contexts", "int32", 1),
    ("kv_lengths", "int32", 1),
    ("accepted", "int32", 1),
    ("top_k", "int32", 1),
    ("temperature", "float32", 1),
    ("top_p", "float32", 1),
    ("uniform", "float32", 1),
    ("cu_seqlens", "int32", 0),
    ("padding", "bool", 1),
    ("page_table", "int32", -1),
)


class FixedBatch:
    """``rows`` sequences of one token each; rows that are not used have slot -1.

    ``ids`` ``[rows]`` int64 and ``batch`` stay where they are for good; ``fill`` writes both.
    """

    def __init__(self, rows: int, pages: int, page_size: int, place: str) -> None:
        import torch

        self.rows, self.pages, self.page_size = rows, pages, page_size
        offsets, at = {}, 0
        for name, kind, each in SECTIONS:
            count = rows + 1 if each == 0 else rows * pages if each < 0 else rows
            size = count * getattr(torch, kind).itemsize
            offsets[name] = (at, size, getattr(torch, kind))
            at = -(-(at + size) // 16) * 16
        self._table_at = offsets["page_table"][0]
        self._device = torch.zeros(at, dtype=torch.uint8, device=place)
        self._host = torch.zeros(at, dtype=torch.uint8, pin_memory=self._device.device.type != "cpu")
        self._on_host: dict[str, Any] = {}
        placed: dict[str, Any] = {}
        for name, (start, size, kind) in offsets.items():
            self._on_host[name] = self._host[start : start + size].view(kind)
            placed[name] = self._device[start : start + size].view(kind)
        for side in (self._on_host, placed):
            side["page_table"] = side["page_table"].view(rows, pages)
        self.ids = placed.pop("ids")
        self.batch = Batch(mode="decode", host=Host((), (), (), ()), **placed)
        self._on_host["cu_seqlens"].copy_(torch.arange(rows + 1))
        self._on_host["accepted"].zero_()
        self._tables: tuple[tuple[int, ...], ...] | None = None

    def advance(self, tokens: torch.Tensor) -> None:
        """Make the next step of this one where it stands: ``tokens`` ``[rows]`` are its ids, all else moves on by one.

        No host takes part, so a graph may hold it. Random numbers stay: for greedy steps only.
        """
        import torch

        batch, size = self.batch, self.page_size
        self.ids.copy_(tokens)
        for counted in (batch.positions, batch.contexts, batch.kv_lengths):
            counted.add_(1)
        page = (batch.positions // size).clamp_(max=self.pages - 1)
        cells = batch.page_table.gather(1, page[:, None])[:, 0] * size + batch.positions % size
        batch.cells.copy_(torch.where(batch.padding, -1, cells))

    def fill(
        self,
        ids: Sequence[int],
        contexts: Sequence[int],
        slots: Sequence[int],
        pages: Sequence[Sequence[int]],
        sampling: Sequence[Sampling],
    ) -> None:
        """Write a step of ``len(ids)`` sequences and padding after them; one copy, two if pages changed."""
        import torch

        used, size = len(ids), self.page_size
        if used > self.rows:
            raise HalError(f"batch: {used} sequences do not fit {self.rows} rows")
        cells = [row[c // size] * size + c % size for row, c in zip(pages, contexts, strict=True)]
        written = {
            "ids": (ids, 0),
            "positions": (contexts, 0),
            "cells": (cells, -1),
            "slots": (slots, -1),
            "contexts": (contexts, 0),
            "kv_lengths": ([c + 1 for c in contexts], 1),
            "top_k": ([s.top_k for s in sampling], 0),
            "temperature": ([s.temperature for s in sampling], 0.0),
            "top_p": ([s.top_p for s in sampling], 1.0),
            "uniform": ([s.uniform(c + 1) for s, c in zip(sampling, contexts, strict=True)], 0.0),
            "padding": ([False] * used, True),
        }
        for name, (values, rest) in written.items():
            view = self._on_host[name]
            view[:used] = torch.tensor(values, dtype=view.dtype)
            view[used:] = rest
        tables = tuple(tuple(row) for row in pages)
        end = self._table_at
        if tables != self._tables:
            self._tables, end = tables, self._host.numel()
            table = self._on_host["page_table"]
            table.fill_(-1)
            for row, entries in enumerate(pages):
                if len(entries) > self.pages:
                    raise HalError(f"batch: {len(entries)} pages do not fit {self.pages}")
                table[row, : len(entries)] = torch.tensor(entries, dtype=table.dtype)
        self._device[:end].copy_(self._host[:end], non_blocking=True)
        rest_rows = self.rows - used
        self.batch.host = Host(
            (1,) * self.rows,
            (*contexts, *(0,) * rest_rows),
            (*slots, *(-1,) * rest_rows),
            (0,) * self.rows,
            all(s.temperature == 0 for s in sampling),
        )
