"""Writing to a log that may be away for a while: again and again, within a bound.

For records whose ids are stable: a batch whose answer was lost may stand on the log twice.
"""

from collections.abc import Sequence

from headrace.bus.outage import Outage
from headrace.bus.protocol import Bus, Message
from headrace.errors import BusUnavailable


async def produce(bus: Bus, messages: Sequence[Message], *, outage_ms_max: int) -> None:
    """Durable when it returns. Raises BusUnavailable once the log has been away for longer than
    `outage_ms_max`."""
    outage = Outage(outage_ms_max)
    while True:
        try:
            await bus.produce(messages)
        except BusUnavailable as error:
            await outage.pause(error)
        else:
            outage.alive()
            return
