"""The process behind `headrace canary`: exposures in, promotions and revocations on `weights` out.

Decisions, the state they came from and the consumed positions are one transaction of `canary-<run>`, so a
restart goes on where the log says it stood, and a second canary of a run fences the first. Not here: what is
decided (`streams.release`), bringing it about (`consumers.weights`).
"""

import asyncio
import logging
from collections.abc import Sequence

import msgspec

from headrace import log
from headrace.bus.dead_letters import decode_or_dead_letter
from headrace.bus.ordering import in_time_order
from headrace.bus.protocol import Bus, Delivery, Message, Reader, TopicPartition, Transactor
from headrace.clock import Clock, SystemClock
from headrace.config import RunConfig
from headrace.errors import BusUnavailable, ConfigError
from headrace.streams.release import Canary, CanaryConfig, State, Stuck, stuck
from headrace.wire.codec import encode
from headrace.wire.records import Record
from headrace.wire.release import ReleaseConfig
from headrace.wire.topics import CANARY_STATE, EXPOSURES, WEIGHTS, WEIGHTS_ACKS

_logger = logging.getLogger(__name__)

INPUTS = (WEIGHTS.name, WEIGHTS_ACKS.name, EXPOSURES.name)
POLL_MS = 200
COMMIT_S = 5.0
"""What was only counted is committed this often; a decision at once."""
RETRY_S = 0.5
OUTAGE_S_MAX = 60.0


async def run(
    bus: Bus,
    run: RunConfig,
    release: ReleaseConfig,
    config: CanaryConfig,
    stop: asyncio.Event,
    *,
    clock: Clock | None = None,
) -> None:
    """Judges versions of the run until `stop`. Raises ConfigError when live users are served at once, Fenced
    when another canary of the run has started, BusUnavailable when the log is away for longer than a
    minute."""
    if release.mode != "gradual":
        raise ConfigError(f"release.mode: expected 'gradual' for a canary to matter, got {release.mode!r}")
    process = _Process(bus, run, config, clock or SystemClock())
    while True:
        try:
            async with bus.transactor(f"canary-{run.name}") as transactor:
                await process.serve(transactor, stop)
                return
        except BusUnavailable as error:  # the outcome of a commit may be unknown: look at the log again
            if asyncio.get_running_loop().time() - process.alive_s > OUTAGE_S_MAX:
                raise
            log.event(_logger, "bus_unavailable", level=logging.WARNING, reason=error)
            await asyncio.sleep(RETRY_S)


def group_of(run_name: str) -> str:
    """Whose positions the canary commits."""
    return f"canary-{run_name}"


async def stored(bus: Bus, run_name: str) -> State | None:
    """The state that the last transaction left. None before the first, or for another format of it."""
    begins, ends = await bus.begins([CANARY_STATE.name]), await bus.ends([CANARY_STATE.name])
    value = None
    for tp, end in ends.items():
        async for delivery in bus.read_range(tp, begins[tp], end):
            if delivery.key == run_name.encode():
                value = delivery.value
    return None if value is None else msgspec.msgpack.decode(value, type=State)


async def found_stuck(bus: Bus, run_name: str, config: CanaryConfig) -> Stuck | None:
    """Whether the release that the last transaction left goes neither on nor back by itself. Raises
    BusUnavailable."""
    if CANARY_STATE.name not in await bus.topics():
        return None
    state = await stored(bus, run_name)
    return None if state is None else stuck(config, state.trial)


class _Process:
    def __init__(self, bus: Bus, run: RunConfig, config: CanaryConfig, clock: Clock) -> None:
        self._bus = bus
        self._run = run
        self._config = config
        self._clock = clock
        self._reached_ms: dict[TopicPartition, int] = {}
        self._told: tuple[int, float] | None = None
        """Version and share that were last said to be stuck."""
        self.alive_s = asyncio.get_running_loop().time()
        """Loop time of the last answer of the log."""

    async def serve(self, transactor: Transactor, stop: asyncio.Event) -> None:
        """From the state on the log to `stop`."""
        canary = Canary(self._run.name, self._config, await stored(self._bus, self._run.name))
        positions = await self._positions()
        log.event(_logger, "canary_start", stable=canary.state.release.serving("gradual").stable)
        async with self._bus.reader(positions) as reader:
            committed_s = asyncio.get_running_loop().time()
            changed = False
            while not stop.is_set():
                deliveries = await reader.read(wait_ms=POLL_MS)
                self.alive_s = asyncio.get_running_loop().time()
                letters = self._learn(canary, deliveries)
                decided = canary.decide()
                changed = changed or bool(deliveries)
                if deliveries and not decided:
                    self._alarm(canary)
                if decided or letters or (changed and self.alive_s - committed_s >= COMMIT_S):
                    await self._commit(transactor, reader, canary, decided, letters)
                    committed_s, changed = self.alive_s, False
            if changed:
                await self._commit(transactor, reader, canary, [], [])

    async def _positions(self) -> dict[TopicPartition, int]:
        """The committed ones; else the start of `weights` and of the refusals, and the end of exposures."""
        begins, ends = await self._bus.begins(INPUTS), await self._bus.ends(INPUTS)
        committed = await self._bus.committed(group_of(self._run.name), INPUTS)
        positions = {}
        for tp, begin in begins.items():
            first = ends[tp] if tp.topic == EXPOSURES.name else begin
            positions[tp] = committed.get(tp, first)
            if positions[tp] < begin:  # away for longer than the topic keeps: what is gone can't be compared
                place = f"{tp}@{positions[tp]}"
                log.event(_logger, "alarm", level=logging.WARNING, kind="exposures_gone", place=place)
                positions[tp] = begin
        return positions

    def _learn(self, canary: Canary, deliveries: Sequence[Delivery]) -> list[Message]:
        letters = []
        for at_ms, delivery in in_time_order(deliveries, self._reached_ms):
            self._reached_ms[delivery.tp] = at_ms
            record = decode_or_dead_letter(delivery, by="canary", now_ms=self._clock.now_ms())
            if isinstance(record, Message):
                letters.append(record)
            else:
                canary.learn(record, at_ms)
        return letters

    def _alarm(self, canary: Canary) -> None:
        """Once for each stage that is stuck."""
        found = stuck(self._config, canary.state.trial)
        if found is None or (found.version, found.share) == self._told:
            return
        self._told = (found.version, found.share)
        log.event(_logger, "alarm", level=logging.WARNING, kind="release_stuck", reason=found)

    async def _commit(
        self,
        transactor: Transactor,
        reader: Reader,
        canary: Canary,
        decided: Sequence[Record],
        letters: Sequence[Message],
    ) -> None:
        key = self._run.name.encode()
        messages = [Message(CANARY_STATE.name, key, msgspec.msgpack.encode(canary.state)), *letters]
        for record in decided:
            value, headers = encode(record, source="canary", now_ms=self._clock.now_ms())
            messages.append(Message(WEIGHTS.name, key, value, headers))
        await transactor.commit(messages, group=group_of(self._run.name), positions=reader.positions())
        for record in decided:
            fields = {name: getattr(record, name) for name in ("version", "share") if hasattr(record, name)}
            evidence = getattr(record, "evidence", "")
            log.event(_logger, type(record).__name__, **fields, evidence=evidence)
