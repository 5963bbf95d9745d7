"""The one writer of a gateway: batches of all streams go to the log together, in the order they came, and are
acknowledged when they are durable.

What is kept here: a bounded queue, and the ids of the newest durable events, so that a resend is acknowledged
without being written again. A gateway that starts, or whose last write has an unknown outcome, reads those
ids from the end of the topic before it writes anything: so what a killed gateway had written, acknowledged or
not, is known to the next. Beyond the memory's bounds, or through another gateway at the same time, the topic
can carry an event twice; readers drop it by its id.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from headrace import log
from headrace.bus.protocol import Bus, Delivery, Message
from headrace.clock import Clock
from headrace.errors import BusUnavailable, FeedbackOverloaded, FeedbackUnavailable, WireError
from headrace.producers.config import GatewayConfig
from headrace.producers.gateway.recent import Recent, name_of
from headrace.wire.codec import decode_as
from headrace.wire.records import Record
from headrace.wire.topics import FEEDBACK

GROUP_EVENTS_MAX: Final = 4000
"""Most events of one write: below it, whatever waits goes together."""
GROUP_BYTES_MAX: Final = 8_000_000
RETRY_S: Final = 0.5
AWAY_RETRY_MS: Final = 2000
FULL_RETRY_MS: Final = 100

_logger = logging.getLogger(__name__)


class _Seen(Record, frozen=True, kw_only=True):
    """What of a `Feedback` record the memory needs."""

    event_id: str
    user: str = ""


class Lane:
    """One sender whose batches keep their order: after one that failed, none goes through."""

    broken = False


@dataclass(slots=True, eq=False)
class _Waiting:
    lane: Lane
    names: Sequence[str]
    messages: Sequence[Message]
    size: int
    """Bytes of the messages' values."""
    done: "asyncio.Future[int]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Writer:
    """`submit` from any task; `run` once, after `look`."""

    def __init__(self, bus: Bus, config: GatewayConfig, clock: Clock) -> None:
        self._bus = bus
        self._config = config
        self._clock = clock
        self._recent = Recent(config.recent_events_max)
        self._queue: deque[_Waiting] = deque()
        self._queued_events = self._queued_bytes = 0
        self._work = asyncio.Event()
        self._draining = False
        self.away = False
        """The log does not answer."""
        self.written = self.repeated = 0

    def room_for(self, events: int) -> None:
        """Raises FeedbackUnavailable or FeedbackOverloaded when `events` would not be taken now."""
        if self._draining or self.away:
            what = "this gateway is stopping" if self._draining else "the log is away"
            raise FeedbackUnavailable(f"gateway: {what}: send again", retry_after_ms=AWAY_RETRY_MS)
        if not self._queue:
            return
        most, most_bytes = self._config.pending_events_max, self._config.pending_bytes_max
        if self._queued_events + events > most or self._queued_bytes > most_bytes:
            raise FeedbackOverloaded(
                f"gateway: expected at most {most} events and {most_bytes} bytes waiting for the log",
                retry_after_ms=FULL_RETRY_MS,
            )

    def submit(self, lane: Lane, names: Sequence[str], messages: Sequence[Message]) -> "asyncio.Future[int]":
        """Puts a batch in the queue. The future's result, when all of it is durable: how many events were so
        before. It raises FeedbackUnavailable when the outcome is unknown. Raises as `room_for`."""
        self.room_for(len(messages))
        if lane.broken:
            raise FeedbackUnavailable("gateway: a batch before this one failed: send both again")
        waiting = _Waiting(lane, names, messages, sum(len(message.value or b"") for message in messages))
        self._queue.append(waiting)
        self._queued_events += len(messages)
        self._queued_bytes += waiting.size
        self._work.set()
        return waiting.done

    async def look(self) -> None:
        """Learns the newest events of the topic: at most `recent_events_max` of the last `resend_ms`."""
        since_ms = self._clock.now_ms() - self._config.resend_ms
        starts = await self._bus.offsets_at(FEEDBACK.name, since_ms)
        ends = await self._bus.ends([FEEDBACK.name])
        share = self._config.recent_events_max // max(1, len(ends))
        for tp, end in ends.items():
            async for delivery in self._bus.read_range(tp, max(starts[tp], end - share), end):
                if name := _name(delivery):
                    self._recent.add([name])
        log.event(_logger, "looked", known=len(self._recent), since_ms=since_ms)

    async def run(self) -> None:
        """Writes until `drain`; returns when the queue is empty then. Raises BusError that trying again
        cannot mend."""
        while True:
            if not self._queue:
                if self._draining:
                    return
                self._work.clear()
                await self._work.wait()
                continue
            group = self._next_group()
            try:
                await self._write(group)
            except BusUnavailable as error:
                self._fail(group, error)
                await self._recover()

    def drain(self) -> None:
        """Takes nothing more; what is in the queue is still written."""
        self._draining = True
        self._work.set()

    def _next_group(self) -> list[_Waiting]:
        group: list[_Waiting] = []
        events = size = 0
        while self._queue:
            events, size = events + len(self._queue[0].messages), size + self._queue[0].size
            if group and (events > GROUP_EVENTS_MAX or size > GROUP_BYTES_MAX):
                break
            group.append(self._queue.popleft())
        self._queued_events -= sum(len(waiting.messages) for waiting in group)
        self._queued_bytes -= sum(waiting.size for waiting in group)
        return group

    async def _write(self, group: Sequence[_Waiting]) -> None:
        recent = self._recent
        fresh: dict[str, Message] = {}
        repeated = []
        for waiting in group:
            before = len(fresh)
            for name, message in zip(waiting.names, waiting.messages, strict=True):
                if name not in recent:
                    fresh.setdefault(name, message)
            repeated.append(len(waiting.messages) - (len(fresh) - before))
        if fresh:
            await self._bus.produce(list(fresh.values()))
            recent.add(fresh)
        self.written += len(fresh)
        self.repeated += sum(repeated)
        for waiting, count in zip(group, repeated, strict=True):
            if not waiting.done.done():  # its caller may have gone
                waiting.done.set_result(count)

    def _fail(self, group: Sequence[_Waiting], error: BusUnavailable) -> None:
        """Refuses what was written with an unknown outcome, and all that waits behind it."""
        self.away = True
        log.event(_logger, "bus_unavailable", level=logging.WARNING, error=error)
        for waiting in (*group, *self._queue):
            waiting.lane.broken = True
            if not waiting.done.done():
                waiting.done.set_exception(
                    FeedbackUnavailable(f"gateway: not durable: {error}", retry_after_ms=AWAY_RETRY_MS)
                )
                waiting.done.exception()  # its stream may end at an earlier one: then nobody asks for this
        self._queue.clear()
        self._queued_events = self._queued_bytes = 0

    async def _recover(self) -> None:
        """Waits for the log, and looks what of the unknown it has."""
        while not self._draining:
            try:
                await self.look()
            except BusUnavailable:
                await asyncio.sleep(RETRY_S)
            else:
                self.away = False
                log.event(_logger, "bus_back")
                return


def _name(delivery: Delivery) -> str | None:
    """None for a record that some other writer spoiled: a reader of the topic dead-letters it."""
    try:
        seen = decode_as(_Seen, delivery.value or b"", delivery.header("content-encoding"))
    except WireError:
        return None
    return name_of(seen.user, seen.event_id)
