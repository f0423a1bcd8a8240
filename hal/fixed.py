"""A decode or verify batch at fixed addresses, which a captured graph reads: filled from the host by one copy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hal.batch import Batch, Host, Sampling
from hal.errors import HalError

if TYPE_CHECKING:
    import torch

# name, dtype, how many numbers
SECTIONS = (
    ("ids", "int64", "tokens"),
    ("positions", "int64", "tokens"),
    ("cells", "int64", "tokens"),
    ("slots", "int32", "rows"),
    ("contexts", "int32", "rows"),
    ("kv_lengths", "int32", "rows"),
    ("accepted", "int32", "rows"),
    ("top_k", "int32", "rows"),
    ("temperature", "float32", "rows"),
    ("top_p", "float32", "rows"),
    ("uniform", "float32", "tokens"),
    ("cu_seqlens", "int32", "starts"),
    ("padding", "bool", "tokens"),
    ("page_table", "int32", "table"),
)


class FixedBatch:
    """``rows`` sequences of one token each, or of ``each`` to verify; those that are not used have slot -1.

    ``ids`` ``[rows * each]`` int64 and ``batch`` stay where they are for good; ``fill`` writes both.
    """

    def __init__(self, rows: int, pages: int, page_size: int, place: str, each: int = 1) -> None:
        import torch

        self.rows, self.pages, self.page_size, self.each = rows, pages, page_size, each
        counts = {"tokens": rows * each, "rows": rows, "starts": rows + 1, "table": rows * pages}
        offsets, at = {}, 0
        for name, kind, what in SECTIONS:
            size = counts[what] * getattr(torch, kind).itemsize
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
        self.batch = Batch(mode="decode" if each == 1 else "verify", host=Host((), (), (), ()), **placed)
        self._on_host["cu_seqlens"].copy_(torch.arange(rows + 1) * each)
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

    def follow(self, accepted: torch.Tensor) -> None:
        """Make the next verify step of this one where it stands, of whose tokens so many ``[rows]`` are accepted.

        No host takes part. The ids are still to be written; random numbers stay: for greedy steps only.
        """
        import torch

        batch = self.batch
        batch.contexts.add_(accepted)
        batch.kv_lengths.add_(accepted)
        batch.accepted.copy_(accepted)
        positions = batch.contexts.long()[:, None] + torch.arange(self.each, device=accepted.device)
        batch.positions.copy_(positions.flatten())
        batch.cells.copy_(cells_of(batch, positions, self.page_size).flatten())

    def fill(
        self,
        ids: Sequence[int],
        contexts: Sequence[int],
        slots: Sequence[int],
        pages: Sequence[Sequence[int]],
        sampling: Sequence[Sampling],
        accepted: Sequence[int] = (),
    ) -> None:
        """Write a step of ``len(contexts)`` sequences and padding after them; one copy, two if pages changed."""
        import torch

        used, size, each = len(contexts), self.page_size, self.each
        if used > self.rows:
            raise HalError(f"batch: {used} sequences do not fit {self.rows} rows")
        # of each token: its sequence's pages, its position, how it is sampled
        tokens = [
            (row, c + step, s) for row, c, s in zip(pages, contexts, sampling, strict=True) for step in range(each)
        ]
        written = {
            "ids": (ids, 0),
            "positions": ([at for _, at, _ in tokens], 0),
            "cells": ([row[at // size] * size + at % size for row, at, _ in tokens], -1),
            "slots": (slots, -1),
            "contexts": (contexts, 0),
            "kv_lengths": ([c + each for c in contexts], each),
            "accepted": (accepted or [0] * used, 0),
            "top_k": ([s.top_k for s in sampling], 0),
            "temperature": ([s.temperature for s in sampling], 0.0),
            "top_p": ([s.top_p for s in sampling], 1.0),
            "uniform": ([s.uniform(at + 1) for _, at, s in tokens], 0.0),
            "padding": ([False] * len(tokens), True),
        }
        for name, (values, rest) in written.items():
            view = self._on_host[name]
            view[: len(values)] = torch.tensor(values, dtype=view.dtype)
            view[len(values) :] = rest
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
            (each,) * self.rows,
            (*contexts, *(0,) * rest_rows),
            (*slots, *(-1,) * rest_rows),
            (*(accepted or (0,) * used), *(0,) * rest_rows),
            all(s.temperature == 0 for s in sampling),
        )


class Behind:
    """A decode batch of the sequences of a verify batch, for drafts after it: the device alone moves it."""

    def __init__(self, fixed: FixedBatch) -> None:
        import torch

        verify, rows = fixed.batch, fixed.rows
        place = verify.slots.device
        self._verify, self._page_size = verify, fixed.page_size
        contexts, kv_lengths, accepted = torch.zeros(3, rows, dtype=torch.int32, device=place)
        positions, cells = torch.zeros(2, rows, dtype=torch.int64, device=place)
        self.batch = replace(
            verify,
            mode="decode",
            cu_seqlens=torch.arange(rows + 1, dtype=torch.int32, device=place),
            padding=torch.zeros(rows, dtype=torch.bool, device=place),
            uniform=torch.zeros(rows, device=place),
            contexts=contexts,
            kv_lengths=kv_lengths,
            accepted=accepted,
            positions=positions,
            cells=cells,
            plans={},
        )

    def start(self) -> None:
        """The token at each sequence's context."""
        self.batch.padding.copy_(self._verify.slots < 0)
        self._at(self._verify.contexts)

    def advance(self) -> None:
        """The token after it."""
        self._at(self.batch.contexts + 1)

    def _at(self, contexts: torch.Tensor) -> None:
        batch = self.batch
        batch.contexts.copy_(contexts)
        batch.kv_lengths.copy_(contexts + 1)
        batch.positions.copy_(contexts)
        batch.cells.copy_(cells_of(batch, batch.positions[:, None], self._page_size)[:, 0])


def cells_of(batch: Batch, positions: torch.Tensor, page_size: int) -> torch.Tensor:
    """KV cells of ``positions`` ``[sequences, n]``; negative for padding and beyond a sequence's pages."""
    import torch

    most = batch.page_table.shape[1]
    page = positions // page_size
    found = batch.page_table.gather(1, page.clamp(max=most - 1)).long() * page_size + positions % page_size
    return torch.where((page < most) & (batch.slots >= 0)[:, None], found, -1)
