"""Writing to a log that may be away for a while: again and again, within a bound.

For records whose ids are stable: a batch whose answer was lost may stand on the log twice.
"""

import asyncio
from collections.abc import Sequence
from typing import Final

from headrace.bus.protocol import Bus, Message
from headrace.errors import BusUnavailable

RETRY_S: Final = 0.5
"""Pause before the log is tried again."""


async def produce(bus: Bus, messages: Sequence[Message], *, outage_ms_max: int) -> None:
    """Durable when it returns. Raises BusUnavailable once the log has been away for longer than
    `outage_ms_max`."""
    loop = asyncio.get_running_loop()
    until_s = loop.time() + outage_ms_max / 1000
    while True:
        try:
            await bus.produce(messages)
            return
        except BusUnavailable:
            if loop.time() > until_s:
                raise
        await asyncio.sleep(RETRY_S)
