"""Memory of parameters in a layout: allocated at bind, filled by the loader, sealed once."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING

from hal.errors import StorageError
from hal.layout import Param, ParamLayout

if TYPE_CHECKING:
    import torch

    from hal.layout import Layout


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
            key: torch.empty(shape, dtype=getattr(torch, kind), device=device)
            for key, (shape, kind) in shapes.items()
        }
        self._views = layout.views(self.buffers, parts)
        self._put: dict[str, dict[tuple[int, ...], int]] = {p.name: {} for p in parts}
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
        if lead < 0 or any(o + s > n for o, s, n in zip(offsets, sizes, view.shape, strict=False)):
            raise StorageError(
                f"{self.name}: {part}: {list(tensor.shape)} at {list(offsets)} does not fit {list(view.shape)}"
            )
        if tensor.dtype != view.dtype and (tensor.element_size() < 2 or view.element_size() < 2):
            raise StorageError(f"{self.name}: {part}: expected {view.dtype}, got {tensor.dtype}")
        place = view
        for axis, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
            place = place.narrow(axis, offset, size)
        place.copy_(tensor.reshape(sizes))
        self._put[part][offsets] = prod(sizes)
        self.sealed = False

    def missing(self) -> list[str]:
        """Parts that were not put whole."""
        return [n for n, put in self._put.items() if sum(put.values()) != self._views[n].numel()]

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
