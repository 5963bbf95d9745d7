"""Time as an argument: a wall clock in milliseconds that tests can hold still.

Not for pacing I/O (asyncio does that) and never called by a stream processor: a processor is given `now_ms`.
"""

import time
from typing import Protocol


class Clock(Protocol):
    def now_ms(self) -> int:
        """Milliseconds since the Unix epoch."""
        ...


class SystemClock:
    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000


class Age:
    """Since it was made, by whichever clock says longer: the monotonic one stands still while a machine is
    asleep, the wall clock may be set back. For who must not be late by another's clock."""

    def __init__(self) -> None:
        self._monotonic_s = time.monotonic()
        self._wall_s = time.time()

    def seconds(self) -> float:
        return max(time.monotonic() - self._monotonic_s, time.time() - self._wall_s)


class ManualClock:
    """Stands where it is put. `ManualClock(1000).advance(5)` reads 1005."""

    def __init__(self, now_ms: int = 0) -> None:
        self._now_ms = now_ms

    def now_ms(self) -> int:
        return self._now_ms

    def advance(self, delta_ms: int) -> None:
        self._now_ms += delta_ms
