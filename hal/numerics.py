"""What a kernel promises of its numbers. Every promise is checked by ``hal verify``."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class Class(IntEnum):
    """From strictest to loosest."""

    EXACT = 0  # byte-equal; only for ops that move or encode
    REASSOCIATED = 1  # the same precision, another order of operations
    LOSSY = 2  # approximate arithmetic; refused unless the policy allows it


@dataclass(frozen=True)
class Numerics:
    """A class and two flags: the same bits each time; the same bits for a row in any batch.

    ``roundings``: how many values on the way are rounded to the op's dtype; sums never are.
    ``narrow``: the element types of those that are encoded on the way, as a checkpoint's scheme says.
    """

    kind: Class
    deterministic: bool = True
    batch_invariant: bool = False
    roundings: int = 0
    narrow: tuple[str, ...] = ()

    def loosened(self, other: Numerics) -> Numerics:
        """The loosest of two, as a composed kernel has of its parts."""
        return Numerics(
            max(self.kind, other.kind),
            self.deterministic and other.deterministic,
            self.batch_invariant and other.batch_invariant,
            self.roundings + other.roundings,
            self.narrow + other.narrow,
        )

    def __str__(self) -> str:
        flags = [n for n in ("deterministic", "batch_invariant") if getattr(self, n)]
        narrow = [f"encodes {kind}" for kind in self.narrow]
        return " ".join([self.kind.name, *flags, f"{self.roundings} roundings", *narrow])


EXACT = Numerics(Class.EXACT, batch_invariant=True)
REASSOCIATED = Numerics(Class.REASSOCIATED)
LOSSY = Numerics(Class.LOSSY)
