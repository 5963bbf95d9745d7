"""The weights relay of a region: from an announcement to replicas that really serve it.

Announcements are hints: the relay takes the newest, builds it from the store, verifies its root, stages a
file per replica, has it loaded and says on `weights.acks` what is served. A replica that restarted, or missed
a version, is seen by its status and brought to the newest one. While anything fails, the old version serves
on. Not here: building a version (`consumers.versions`), the swap itself (`inference`).
"""

import asyncio
import logging
import re
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Final, NamedTuple

from headrace import log
from headrace.bus.dead_letters import decode_or_dead_letter
from headrace.bus.protocol import Bus, Delivery, Message
from headrace.clock import Clock, SystemClock
from headrace.config import RunConfig
from headrace.consumers.config import RelayConfig
from headrace.consumers.versions import Held, Versions
from headrace.errors import (
    BusUnavailable,
    InferenceError,
    InferenceUnavailable,
    StoreError,
)
from headrace.policy import checkpoint
from headrace.rpc.client import InferenceClient
from headrace.rpc.generation import Loaded, ReplicaStatus
from headrace.store.blobs import BlobReader
from headrace.wire.codec import encode
from headrace.wire.records import WeightsAck, WeightsPublished
from headrace.wire.topics import WEIGHTS, WEIGHTS_ACKS

_logger = logging.getLogger(__name__)

READ_MS: Final = 200
RETRY_S: Final = 0.5
LOADING_FACTOR: Final = 4
"""Times `load_ms_max` that a replica counts as loading after its answer stayed out."""
RESTART_S: Final = 1.0
"""A replica whose start seems later than before by more than this is another incarnation."""
REPLICA_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


async def run(
    bus: Bus,
    run: RunConfig,
    config: RelayConfig,
    blobs: BlobReader,
    replicas: Sequence[str],
    stop: asyncio.Event,
    *,
    clock: Clock | None = None,
) -> None:
    """Keeps the replicas at these addresses on the newest announced version until `stop` is set.

    Raises BusUnavailable when the log stays away for longer than `outage_ms_max`. Faults of a replica or of
    the store are logged and tried again.
    """
    relay = _Relay(bus, run, config, blobs, clock or SystemClock())
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(InferenceClient(address)) for address in replicas]
        tasks = [asyncio.create_task(relay.follow(stop))]
        tasks += [asyncio.create_task(_Replica(relay, client).keep(stop)) for client in clients]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


class _Relay:
    """What the replicas of a region share."""

    def __init__(
        self, bus: Bus, run: RunConfig, config: RelayConfig, blobs: BlobReader, clock: Clock
    ) -> None:
        self._bus = bus
        self.run = run
        self.config = config
        self.versions = Versions(blobs, config.versions_max)
        self._clock = clock
        self._news = asyncio.Event()

    async def follow(self, stop: asyncio.Event) -> None:
        """Reads announcements, those of before the start first and at once."""
        away_since_s: float | None = None
        while not stop.is_set():
            try:
                begins = await self._bus.begins([WEIGHTS.name])
                ends = await self._bus.ends([WEIGHTS.name])
                for tp, end in ends.items():
                    await self._learn([d async for d in self._bus.read_range(tp, begins[tp], end)])
                async with self._bus.reader(ends) as reader:
                    while not stop.is_set():
                        away_since_s = None
                        await self._learn(await reader.read(wait_ms=READ_MS))
            except BusUnavailable as error:
                away_since_s = away_since_s or time.monotonic()
                if (time.monotonic() - away_since_s) * 1000 > self.config.outage_ms_max:
                    raise
                log.event(_logger, "bus_unavailable", level=logging.WARNING, reason=error)
                await asyncio.sleep(RETRY_S)

    async def _learn(self, deliveries: Sequence[Delivery]) -> None:
        letters = []
        for delivery in deliveries:
            record = decode_or_dead_letter(delivery, by="relay", now_ms=self._clock.now_ms())
            if isinstance(record, Message):
                letters.append(record)
            elif isinstance(record, WeightsPublished) and record.run == self.run.name:
                self.versions.announce(record)
        if letters:
            await self._bus.produce(letters)
        if deliveries:
            self._news.set()
            self._news = asyncio.Event()

    async def wait(self, stop: asyncio.Event, timeout_ms: int) -> None:
        """Until there is news, a stop, or the time is over."""
        waits = [asyncio.create_task(event.wait()) for event in (self._news, stop)]
        try:
            await asyncio.wait(waits, timeout=timeout_ms / 1000, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waits:
                task.cancel()

    async def acknowledge(
        self, replica: str, version: int, root: str, *, refused: str, pause_ms: float
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


class _Load(NamedTuple):
    """A load whose answer did not come: it may be going on in the replica."""

    version: int
    root: str
    replica_started_s: float
    deadline_s: float


class _Replica:
    """Brings one replica to the newest version, again and again."""

    def __init__(self, relay: _Relay, client: InferenceClient) -> None:
        self._relay = relay
        self._client = client
        self._acked: tuple[int, str] | None = None
        self._pending: _Load | None = None
        self._reachable = True
        self._refused: tuple[int, str] | None = None

    async def keep(self, stop: asyncio.Event) -> None:
        config = self._relay.config
        while not stop.is_set():
            wait_ms = config.poll_ms
            try:
                status = await self._client.status()
                self._see(True)
                if not await self._bring_to_newest(status):
                    wait_ms = config.retry_ms
            except InferenceUnavailable as error:
                self._see(False, error)
            except (StoreError, InferenceError, OSError) as error:
                log.event(
                    _logger,
                    "alarm",
                    level=logging.WARNING,
                    kind="weights_not_loaded",
                    replica=self._client.address,
                    reason=error,
                )
                wait_ms = config.retry_ms
            await self._relay.wait(stop, wait_ms)

    async def _bring_to_newest(self, status: ReplicaStatus) -> bool:
        """False when the replica refused what it should serve."""
        target = self._relay.versions.newest
        if target is None or self._loading(status):
            return True
        if (status.version, status.root) == (target.version, target.root):
            await self._acknowledge(status.replica, status.version, status.root)
            return True
        held = await self._relay.versions.obtain()
        if (held.version, held.root) == (status.version, status.root):
            return True
        path = await asyncio.to_thread(self._stage, status.replica, held)
        loaded = await self._load(status, held, path)
        if loaded is None:
            return True
        if loaded.serving:
            self._refused = None
            await self._acknowledge(status.replica, loaded.version, loaded.root, pause_ms=loaded.pause_ms)
            return True
        if self._refused != (held.version, held.root):
            self._refused = (held.version, held.root)
            log.event(
                _logger,
                "alarm",
                level=logging.WARNING,
                kind="weights_refused",
                replica=status.replica,
                version=held.version,
                reason=loaded.detail,
            )
            await self._relay.acknowledge(
                status.replica, held.version, held.root, refused=loaded.detail or "refused", pause_ms=0.0
            )
        return False

    async def _load(self, status: ReplicaStatus, held: Held, path: Path) -> Loaded | None:
        """One load. None when its answer stays out: `_loading` then watches it, instead of sending it
        again."""
        load_s_max = self._relay.config.load_ms_max / 1000
        now_s = time.monotonic()
        self._acked = None
        self._pending = _Load(
            held.version, held.root, now_s - status.up_s, now_s + LOADING_FACTOR * load_s_max
        )
        try:
            loaded = await self._client.load_weights(
                version=held.version, path=str(path), root=held.root, timeout_s=load_s_max
            )
        except InferenceUnavailable as error:
            log.event(
                _logger,
                "load_unanswered",
                level=logging.WARNING,
                replica=status.replica,
                version=held.version,
                reason=error,
            )
            return None
        self._pending = None
        log.event(
            _logger,
            "loaded" if loaded.serving else "refused",
            replica=status.replica,
            version=held.version,
            pause_ms=loaded.pause_ms,
        )
        return loaded

    def _loading(self, status: ReplicaStatus) -> bool:
        """Whether a load that we sent may still be going on in this very incarnation of the replica."""
        pending = self._pending
        if pending is None:
            return False
        now_s = time.monotonic()
        restarted = now_s - status.up_s > pending.replica_started_s + RESTART_S
        ended = (status.version, status.root) == (pending.version, pending.root)
        if ended or restarted or now_s > pending.deadline_s:
            self._pending = None
        return self._pending is not None

    def _stage(self, replica: str, held: Held) -> Path:
        """The weights as a file that the replica can read; only the newest `staged_max` stay."""
        if not REPLICA_NAME.fullmatch(replica):
            raise InferenceError(
                f"{self._client.address}: expected a replica name fit for a folder, got {replica!r}"
            )
        folder = Path(self._relay.config.stage_dir).resolve() / replica
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"v{held.version:08d}-{held.root[:12]}.safetensors"
        checkpoint.save(path, held.weights)
        others = [other for other in sorted(folder.glob("v*.safetensors")) if other != path]
        for other in others[: max(0, len(others) + 1 - self._relay.config.staged_max)]:
            other.unlink(missing_ok=True)
        for unfinished in folder.glob("v*.part"):  # of a relay that was killed
            unfinished.unlink(missing_ok=True)
        return path

    async def _acknowledge(self, replica: str, version: int, root: str, *, pause_ms: float = 0.0) -> None:
        if self._acked != (version, root) and await self._relay.acknowledge(
            replica, version, root, refused="", pause_ms=pause_ms
        ):
            self._acked = (version, root)

    def _see(self, reachable: bool, error: InferenceUnavailable | None = None) -> None:
        """Logs when a replica goes away or comes back; the next version it serves is acknowledged anew."""
        if reachable != self._reachable:
            name = "replica_back" if reachable else "replica_away"
            log.event(
                _logger, name, level=logging.WARNING, replica=self._client.address, reason=error or "answers"
            )
            self._reachable = reachable
            self._acked = None
