"""One real run of the loop, through `headrace demo`, with faults put into it while it works. Not tests.

A process is killed in mid-work and nowhere else: it is frozen first, the log is read to its end, and only
if its work is seen there to be under way it gets SIGKILL; otherwise it goes on.
"""

import asyncio
import os
import signal
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import zstandard

from headrace.bus import open_bus, protocol
from headrace.bus.protocol import Bus, Delivery, Message, TopicPartition
from headrace.cli.process import living
from headrace.errors import BusUnavailable, WireError
from headrace.wire.codec import DECODED_BYTES_MAX, Headers, at, decode, type_name
from headrace.wire.records import (
    DeadLetter,
    Experience,
    Prompt,
    Reward,
    RolloutStep,
    TrainStep,
    WeightsAck,
)
from headrace.wire.topics import RECORD_BYTES_MAX, TOPICS

DEADLINE_S = 240.0
"""Of each wait: seconds on an idle machine, minutes on a crowded one."""
QUIET_S = 0.25
"""How long clients stand still before the broker is killed: docs/bus.md tells of the kill in the instant of a
commit."""
GROUPS_PER_STEP = 4
GROUP_SIZE = 4
SMALL = (
    *("--run.groups_per_step", str(GROUPS_PER_STEP), "--run.group_size", str(GROUP_SIZE)),
    *("--evaluation.tasks", "0", "--trainer.checkpoint_every", "3", "--plain"),
)
INPUTS = ("prompts", "rollout.steps", "rewards", "experience", "weights", "train.steps")
"""Topics that a process of the loop works from."""
WATCHED = {*INPUTS, "weights.acks", "dead.letters"} - {"weights"}
JUNK_KEY = b"junk"


class Watch:
    """What stands on the log of a running loop, as far as it was read."""

    def __init__(self, bus: Bus, run: str) -> None:
        self._bus = bus
        self._run = run
        self._there = False
        self._positions: dict[TopicPartition, int] = {}
        self.step = 0
        self.issued: set[str] = set()
        self.begun: dict[str, set[str]] = defaultdict(set)
        """By worker: groups with a turn on the log."""
        self.judged: set[str] = set()
        self.closed: dict[tuple[int, int], str] = {}
        self.consumed: set[tuple[int, int]] = set()
        self.serving: list[WeightsAck] = []
        self.letters: dict[str, list[DeadLetter]] = defaultdict(list)
        """By the place of the record."""

    async def refresh(self) -> bool:
        """Reads what is committed by now; whether it read all of that: while the log is away it can't."""
        try:
            if not self._there:
                self._there = (await self._bus.topics()).keys() >= WATCHED
            ends = await self._bus.ends(sorted(WATCHED)) if self._there else {}
            new = {tp: self._positions.get(tp, 0) for tp in ends if ends[tp] > self._positions.get(tp, 0)}
            if not new:
                return True
            async with self._bus.reader(new) as reader, asyncio.timeout(DEADLINE_S):
                while any(reader.positions()[tp] < ends[tp] for tp in new):
                    for delivery in await reader.read():
                        self._apply(delivery)
                    self._positions.update(reader.positions())
        except BusUnavailable:
            return False
        return True

    def _apply(self, delivery: Delivery) -> None:
        try:
            record = decode(delivery.topic, delivery.value or b"", delivery.headers)
        except WireError:
            return
        match record:
            case Prompt():
                self.issued.add(record.group_id)
            case RolloutStep():
                self.begun[record.worker].add(record.group_id)
            case Reward():
                self.judged.add(record.group_id)
            case Experience():
                self.closed[delivery.partition, delivery.offset] = record.group_id
            case TrainStep():
                self.step = record.step
                self.consumed |= {(unit.partition, unit.offset) for unit in record.consumed}
            case WeightsAck():
                self.serving.append(record)
            case DeadLetter():
                self.letters[at(record.topic, record.partition, record.offset)].append(record)

    @property
    def served(self) -> int:
        """The newest version that a replica has acknowledged."""
        return max((ack.version for ack in self.serving if ack.outcome == "serving"), default=0)

    def rolling(self, worker: str) -> bool:
        """The worker has groups whose first turns are out and whose rewards are not."""
        return bool(self.begun[worker] - self.judged)

    def generating(self) -> bool:
        """Prompts are out and not judged: the workers ask for tokens."""
        return bool(self.issued - self.judged)

    def joining(self) -> bool:
        """Groups have begun, and are not closed."""
        return bool(set().union(*self.begun.values()) - set(self.closed.values()))

    def training(self) -> bool:
        """Closed groups wait for their step."""
        return bool(self.closed.keys() - self.consumed)


class FaultyRun:
    """A demo that runs as a process of its own; use `started`."""

    def __init__(self, process: asyncio.subprocess.Process, run_dir: Path, output: Path, bus: Bus) -> None:
        self.process = process
        self.run_dir = run_dir
        self.output = output
        self.bus = bus
        self.watch = Watch(bus, run_dir.name)
        self.killed: list[str] = []

    async def until(self, what: Callable[[], bool], expected: str) -> None:
        """Waits until `what()` holds of a fresh watch. AssertionError at the deadline, or when the demo
        ended before."""
        end = time.monotonic() + DEADLINE_S
        while True:
            ended = self.process.returncode is not None
            whole = await self.watch.refresh()
            if what():
                return
            assert not (ended and whole), f"expected {expected}, the demo ended:\n{self.told()}"
            assert time.monotonic() < end, f"expected {expected} within {DEADLINE_S} s:\n{self.told()}"
            await asyncio.sleep(0.05)

    async def kill(self, name: str, working: Callable[[], bool]) -> None:
        """SIGKILL for the process `name` at a moment when `working()` certainly holds."""
        while name not in self.killed:
            await self.until(lambda: name in living(self.run_dir) and working(), f"{name} in mid-work")
            pid = living(self.run_dir)[name]
            os.kill(pid, signal.SIGSTOP)
            if await self.watch.refresh() and working():
                os.kill(pid, signal.SIGKILL)
                self.killed.append(name)
            else:
                os.kill(pid, signal.SIGCONT)

    async def goes_on(self) -> None:
        """Waits for a step after the one of now."""
        before = self.watch.step
        await self.until(lambda: self.watch.step > before, f"a step after step {before}")

    async def end(self) -> int:
        """Waits for the demo's end; its exit code."""
        async with asyncio.timeout(DEADLINE_S):
            code = await self.process.wait()
        async with asyncio.timeout(DEADLINE_S):
            while not await self.watch.refresh():  # noqa: ASYNC110 - nobody tells that the log is back
                await asyncio.sleep(0.05)
        return code

    def told(self) -> str:
        """The last lines of the demo and of each of its processes."""
        paths = [self.output, *sorted((self.run_dir / "logs").glob("*.log"))]
        return "\n".join(f"-- {path.name}\n{path.read_text()[-2000:]}" for path in paths)

    def log(self, name: str) -> str:
        return (self.run_dir / "logs" / f"{name}.log").read_text()


@asynccontextmanager
async def started(run_dir: Path, address: str, *words: str) -> AsyncIterator[FaultyRun]:
    """`headrace demo` in `run_dir` on the log at `address`; nothing of it outlives the block."""
    output = run_dir.with_suffix(".out")
    with output.open("ab") as told:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "headrace", "demo", "--run-dir", str(run_dir), "--bus", address),
            *(*SMALL, *words),
            stdout=told,
            stderr=told,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
    try:
        async with open_bus(address) as bus:
            yield FaultyRun(process, run_dir, output, bus)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@asynccontextmanager
async def quiet(pids: Sequence[int]) -> AsyncIterator[None]:
    """Clients of a log that stand still in the block, and for QUIET_S before it: what they had committed is
    settled, what they had begun is not."""
    for pid in pids:
        _send(pid, signal.SIGSTOP)
    try:
        await asyncio.sleep(QUIET_S)
        yield
    finally:
        for pid in pids:
            _send(pid, signal.SIGCONT)


def _send(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def junk() -> list[tuple[bytes, Headers]]:
    """Values with headers that no reader may take: undecodable, of no known type, bombs, over the limit."""

    def headers(topic_type: str, *more: tuple[str, bytes]) -> Headers:
        return (("ce_type", topic_type.encode()), *more)

    zeros = zstandard.ZstdCompressor(level=3).compress(bytes(DECODED_BYTES_MAX + 1))
    return [
        (b"\xc1 no MessagePack", headers("{own}")),
        (b"\x80", headers("headrace.Surprise.v9")),
        (b"\xdd\xff\xff\xff\xff", headers("{own}")),  # an array of four thousand million
        (b"\x91" * 100_000, headers("{own}")),  # as many arrays, one in the other
        (zeros, headers("{own}", ("content-encoding", b"zstd"))),
        (bytes(RECORD_BYTES_MAX + 1), headers("{own}")),
    ]


async def put_junk(bus: Bus, topics: Sequence[str] = INPUTS) -> dict[str, bytes]:
    """Sends all junk to each topic, past the limit that our own writers keep; place -> value."""
    places: dict[str, bytes] = {}
    for topic in topics:
        own = type_name(TOPICS[topic].records[0])
        messages = [
            Message(
                topic,
                JUNK_KEY,
                value,
                tuple((name, header.replace(b"{own}", own.encode())) for name, header in headers),
            )
            for value, headers in junk()
        ]
        partition = protocol.partition_of(JUNK_KEY, TOPICS[topic].partitions)
        for message in messages:
            [offset] = await bus.produce([message])
            places[at(topic, partition, offset)] = message.value or b""
    return places
