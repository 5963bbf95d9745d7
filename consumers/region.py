"""What the replicas of a region share: the announcements read, the release they mean, and acknowledgements.

Not here: bringing a replica to them (`consumers.weights`), building a version (`consumers.versions`).
"""

import asyncio
import logging
from collections.abc import Sequence
from typing import Final, Literal

from headrace import log
from headrace.bus.dead_letters import decode_or_dead_letter
from headrace.bus.outage import Outage
from headrace.bus.protocol import Bus, Delivery, Message
from headrace.clock import Clock
from headrace.config import RunConfig
from headrace.consumers.config import RelayConfig
from headrace.consumers.versions import Versions
from headrace.errors import BusUnavailable
from headrace.store.blobs import BlobReader
from headrace.wire.codec import encode
from headrace.wire.records import WeightsAck, WeightsPromoted, WeightsPublished, WeightsRevoked
from headrace.wire.release import Mode, Release, Serving
from headrace.wire.topics import WEIGHTS, WEIGHTS_ACKS

_logger = logging.getLogger(__name__)

Role = Literal["", "stable", "canary"]
"""For whom a replica serves a version: for all that no release cares for, or for a side of it."""
READ_MS: Final = 200


class Region:
    """`follow` runs beside the tasks that keep the replicas; they `wait` for its news."""

    def __init__(
        self, bus: Bus, run: RunConfig, config: RelayConfig, blobs: BlobReader, clock: Clock, mode: Mode
    ) -> None:
        self._bus = bus
        self.run = run
        self.config = config
        self.versions = Versions(blobs, config.versions_max)
        self._clock = clock
        self._mode = mode
        self._release = Release()
        self._news = asyncio.Event()

    @property
    def serving(self) -> Serving:
        """What live users should have."""
        return self._release.serving(self._mode)

    async def follow(self, stop: asyncio.Event) -> None:
        """Reads announcements, those of before the start first and at once."""
        outage = Outage(self.config.outage_ms_max)
        while not stop.is_set():
            try:
                begins = await self._bus.begins([WEIGHTS.name])
                ends = await self._bus.ends([WEIGHTS.name])
                for tp, end in ends.items():
                    await self._learn([d async for d in self._bus.read_range(tp, begins[tp], end)])
                async with self._bus.reader(ends) as reader:
                    while not stop.is_set():
                        deliveries = await reader.read(wait_ms=READ_MS)
                        outage.alive()
                        await self._learn(deliveries)
            except BusUnavailable as error:
                await outage.pause(error)

    async def _learn(self, deliveries: Sequence[Delivery]) -> None:
        letters = []
        for delivery in deliveries:
            record = decode_or_dead_letter(delivery, by="relay", now_ms=self._clock.now_ms())
            if isinstance(record, Message):
                letters.append(record)
            elif isinstance(record, WeightsPublished | WeightsPromoted | WeightsRevoked):
                self._take(record)
        if letters:
            await self._bus.produce(letters)
        if deliveries:
            self._news.set()
            self._news = asyncio.Event()

    def _take(self, record: WeightsPublished | WeightsPromoted | WeightsRevoked) -> None:
        if record.run != self.run.name:
            return
        self._release.learn(record)
        release = self._release
        sides = (release.candidate, release.pinned, *release.stable[-2:])
        self.versions.need(version for version in sides if version is not None)
        if isinstance(record, WeightsPublished):
            self.versions.announce(record)

    async def wait(self, stop: asyncio.Event, timeout_ms: int) -> None:
        """Until there is news, a stop, or the time is over."""
        waits = [asyncio.create_task(event.wait()) for event in (self._news, stop)]
        try:
            await asyncio.wait(waits, timeout=timeout_ms / 1000, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waits:
                task.cancel()

    async def acknowledge(
        self,
        replica: str,
        version: int,
        root: str,
        *,
        role: Role = "",
        refused: str = "",
        unfit: bool = False,
        pause_ms: float = 0.0,
    ) -> bool:
        """Says what a replica serves, or why it refused. False when the log is away: say it again later."""
        now_ms = self._clock.now_ms()
        ack = WeightsAck(
            run=self.run.name,
            region=self.run.region,
            replica=replica,
            version=version,
            root=root,
            outcome="refused" if refused else "serving",
            role=role,
            unfit=unfit,
            detail=refused,
            pause_ms=pause_ms,
            acked_ms=now_ms,
        )
        value, headers = encode(ack, source="relay", now_ms=now_ms)
        key = f"{self.run.region}/{replica}".encode()
        try:
            await self._bus.produce([Message(WEIGHTS_ACKS.name, key, value, headers)])
        except BusUnavailable as error:
            log.event(_logger, "bus_unavailable", level=logging.WARNING, reason=error)
            return False
        return True
