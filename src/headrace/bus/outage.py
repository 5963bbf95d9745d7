"""How long a log (or a store) has been away, for processes that wait for it within a bound.

An outage begins with the first failure after the last answer: what a process did in between without asking
does not count. Not here: what is tried again (each process knows), the pauses inside one call of a bus.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Final

from headrace import log
from headrace.errors import HeadraceError

_logger = logging.getLogger(__name__)

RETRY_S: Final = 0.5
"""Pause before it is asked again."""


class Outage:
    """`alive` when it answered, `pause` when it did not; one for each log or store that a process uses."""

    def __init__(self, ms_max: int, *, now_s: Callable[[], float] = time.monotonic) -> None:
        self._ms_max = ms_max
        self._now_s = now_s
        self._since_s: float | None = None

    @property
    def away_ms(self) -> int:
        """Since the first failure after the last answer; 0 without one."""
        return 0 if self._since_s is None else int((self._now_s() - self._since_s) * 1000)

    def alive(self) -> None:
        """It answered."""
        if self._since_s is not None:
            log.event(_logger, "available", after_ms=self.away_ms)
            self._since_s = None

    def failed(self, error: HeadraceError) -> None:
        """It did not answer. Raises `error` once that has been so for longer than `ms_max`."""
        if self._since_s is None:
            self._since_s = self._now_s()
            log.event(_logger, "unavailable", level=logging.WARNING, reason=error)
        elif self.away_ms > self._ms_max:
            raise error

    async def pause(self, error: HeadraceError) -> None:
        """As `failed`, and waits a little before it is asked again."""
        self.failed(error)
        await asyncio.sleep(RETRY_S)
