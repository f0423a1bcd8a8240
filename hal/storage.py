"""Memory of parameters in a layout: allocated at bind, filled by the loader, sealed once."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from hal.errors import StorageError
from hal.layout import Param, ParamLayout

if TYPE_CHECKING:
    import torch

    from hal.layout import Layout

Box = tuple[tuple[int, int], ...]  # first and last + 1 on each axis


class Storage:
    """One memory of one op or group: addresses, shapes and dtypes are final from the start.

    ``put`` takes this rank's slice of a part, in any order, again on reload. ``seal`` raises
    naming what is missing, then lets the layout shuffle or convert in place.
    """

    def __init__(self, name: str, parts: Sequence[Param], layout: ParamLayout, device: str) -> None:
        import torch

        self.name = name
        self.parts = tuple(parts)
        self.layout = layout
        kinds = {p.dtype for p in parts}
        shapes = layout.buffers(parts)
        if len(shapes) < len(parts) and len(kinds) > 1:
            raise StorageError(f"{name}: {layout} holds one dtype, the parts have {sorted(kinds)}")
        self.buffers = {
            key: torch.empty(shape, dtype=getattr(torch, kind), device=device) for key, (shape, kind) in shapes.items()
        }
        self._views = layout.views(self.buffers, parts)
        self._put: dict[str, set[Box]] = {p.name: set() for p in parts}
        self.sealed = False

    @property
    def nbytes(self) -> int:
        """Bytes allocated, padding included."""
        return sum(b.numel() * b.element_size() for b in self.buffers.values())

    def put(self, part: str, tensor: torch.Tensor, at: tuple[int, ...] = ()) -> None:
        """Copy a tensor to a place of a part; ``at``: its offset on the first axes, 0 on the rest.

        A tensor with fewer axes than the part fills one entry of the leading ones. Dtype
        changes only between floating formats of 16 bits and more.
        """
        if part not in self._views:
            raise StorageError(f"{self.name}: no part {part!r}; the parts are {', '.join(self._views)}")
        view = self._views[part]
        lead = view.dim() - tensor.dim()
        offsets = (*at, *(0,) * (view.dim() - len(at)))
        sizes = (1,) * lead + tuple(tensor.shape)
        places = zip(offsets, sizes, view.shape, strict=False)
        if lead < 0 or len(at) > view.dim() or any(o < 0 or o + s > n for o, s, n in places):
            raise StorageError(
                f"{self.name}: {part}: {list(tensor.shape)} at {list(offsets)} does not fit {list(view.shape)}"
            )
        wide = all(t.is_floating_point() and t.element_size() > 1 for t in (tensor, view))
        if tensor.dtype != view.dtype and not wide:
            raise StorageError(f"{self.name}: {part}: expected {view.dtype}, got {tensor.dtype}")
        if self.sealed:  # a reload: whole again, or seal says what is missing
            self._put = {p.name: set() for p in self.parts}
        place = view
        for axis, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
            place = place.narrow(axis, offset, size)
        place.copy_(tensor.reshape(sizes))
        self._put[part].add(tuple((o, o + s) for o, s in zip(offsets, sizes, strict=True)))
        self.sealed = False

    def missing(self) -> list[str]:
        """Parts that were not put whole."""
        return [n for n, put in self._put.items() if _covered(put) != self._views[n].numel()]

    def seal(self) -> None:
        """All parts are there: let the layout finish. Twice is once."""
        if missing := self.missing():
            raise StorageError(f"{self.name}: not filled: {', '.join(missing)}")
        if not self.sealed:
            self.layout.seal(self.buffers, self.parts)
            self.sealed = True

    def read(self, layout: Layout | None = None) -> torch.Tensor | dict[str, torch.Tensor]:
        """The memory as ``layout``: one tensor for packed and padded, the parts for separate.

        Without one: the buffer, where it is one. May be kept, not read, before ``seal``.
        """
        from hal.layout import Packed, Padded, Separate

        if layout is not None and not self.layout.reads_as(layout):
            raise StorageError(f"{self.name}: lies {self.layout}, which cannot be read as {layout}")
        if isinstance(layout, Separate):
            return dict(self._views)
        if isinstance(layout, Packed):
            (whole,) = self.buffers.values()
            return whole[: sum(p.rows for p in self.parts)]
        if (isinstance(layout, Padded) and isinstance(self.layout, Padded)) or len(self.buffers) == 1:
            (whole,) = self.buffers.values()
            return whole
        raise StorageError(f"{self.name}: lies {self.layout} in {len(self.buffers)} buffers; name a layout to read")


def _covered(boxes: Collection[Box]) -> int:
    """Elements in any of the boxes; those that overlap count once."""
    if not boxes or not next(iter(boxes)):
        return len(boxes)
    spans: dict[tuple[int, int], set[Box]] = {}
    for span, *rest in boxes:
        spans.setdefault(span, set()).add(tuple(rest))
    if any(one[1] > other[0] for one, other in pairwise(sorted(spans))):
        edges = pairwise(sorted({edge for span in spans for edge in span}))
        spans = {(low, high): {r for (a, b), rs in spans.items() if a <= low < b for r in rs} for low, high in edges}
    return sum((high - low) * _covered(within) for (low, high), within in spans.items())
