"""Times of calls: by replaying one graph of all of them where the device captures, else one after the other."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hal.runtime import Runtime

TRIES = 5
CEILING = 2**31  # bytes of each side


def microseconds(runtime: Runtime, calls: Sequence[Callable[[], Any]], *, captures: bool = True) -> float:
    """Microseconds of one call: what two more rounds of all of them add, the least of several tries.

    Where they add nothing that can be measured, a third of three rounds: a bound from above.
    Where no graph can be captured, or none may hold the calls, the host's own time is in it.
    """
    import torch

    for call in calls:
        call()
    if not (runtime.can_capture and captures):

        def host(rounds: int) -> float:
            begun = time.perf_counter()
            for _ in range(rounds):
                for call in calls:
                    call()
            if torch.accelerator.is_available():
                torch.accelerator.synchronize()
            return (time.perf_counter() - begun) * 1e6

        return _least(host, len(calls))
    torch.accelerator.synchronize()
    # outputs must not be given away while the graph lives
    replay, _kept = runtime.capture(lambda: [call() for call in calls])
    place = torch.device(runtime.place)

    def device(rounds: int) -> float:
        begin, end = (torch.Event(place, enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(rounds):
            replay()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e3

    return _least(device, len(calls))


def _least(timed: Callable[[int], float], count: int) -> float:
    timed(1)
    one, three = (min(timed(rounds) for _ in range(TRIES)) for rounds in (1, 3))
    # the clock cannot tell two rounds: three whole rounds are at least what they take
    more = (three - one) / 2 if three > one else three / 3
    return more / count


def ceiling(runtime: Runtime, size: int = CEILING) -> float:
    """Bytes per second, read and written, of ``torch.mul(x, 1, out=y)``, which is faster than a copy."""
    import torch

    x = torch.ones(size // 4, device=runtime.place)
    y = torch.empty_like(x)
    return 2 * size / microseconds(runtime, [lambda: torch.mul(x, 1, out=y)]) * 1e6
