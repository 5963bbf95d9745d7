"""A gateway that dies, and a log that is away: what was acknowledged is on the topic, and nothing twice after
the client has sent again."""

import asyncio
import contextlib
import gc
import os
import signal
import sqlite3
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import grpc.aio
import pytest
from gateway_place import GatewayProcess, event, gateway, method, records

from headrace.bus import local_kafka, open_bus
from headrace.bus.kafka import KafkaBus
from headrace.bus.protocol import Bus, Message
from headrace.bus.sqlite import SqliteBus
from headrace.errors import BusUnavailable, FeedbackUnavailable
from headrace.producers.client import FeedbackClient
from headrace.producers.config import GatewayConfig
from headrace.producers.gateway.recent import Recent
from headrace.producers.gateway.writer import Lane, Writer
from headrace.rpc.feedback import Event
from headrace.rpc.feedback_messages import RETRY_AFTER, request_of
from headrace.wire.topics import FEEDBACK

WAIT_S = 90.0


def batches(tag: str, count: int, size: int = 20) -> list[list[Event]]:
    return [
        [event(0, event_id=f"{tag}-{size * n + i}", suggestion_id=f"{tag}-{n % 3}") for i in range(size)]
        for n in range(count)
    ]


async def until(what: Callable[[], object]) -> None:
    """Waits for a condition; the test's own deadline ends it."""
    while not what():  # noqa: ASYNC110 - conditions of other threads and processes
        await asyncio.sleep(0.002)


async def streamed(
    address: str, work: Sequence[list[Event]], acknowledged: list[int], *, last: asyncio.Event | None = None
) -> None:
    """Sends `work` on one stream and notes the acknowledged batches; holds the last one back until `last`."""

    async def bodies() -> AsyncIterator[bytes]:
        for number, batch in enumerate(work):
            if last is not None and number == len(work) - 1:
                await last.wait()
            yield request_of(batch, number).SerializeToString()

    async with grpc.aio.insecure_channel(address) as channel:
        async for reply in method(channel, "PublishStream")(bodies()):
            acknowledged.append(reply.number)


async def killed_in_mid_stream(home: Path, address: str, tag: str) -> None:
    """Streams, kills the gateway after ten acknowledgements, and before the last one however slow this test
    is; starts it, sends what has none again."""
    work = batches(tag, 200)
    process = GatewayProcess(home, address)
    await asyncio.to_thread(process.start)
    acknowledged: list[int] = []
    killed = asyncio.Event()
    sending = asyncio.create_task(streamed(process.grpc, work, acknowledged, last=killed))
    await until(lambda: len(acknowledged) >= 10)
    await asyncio.to_thread(process.end, signal.SIGKILL)
    killed.set()
    with contextlib.suppress(grpc.aio.AioRpcError):
        await sending
    assert acknowledged == list(range(len(acknowledged)))
    assert len(acknowledged) < len(work), "it died too late to show anything"
    async with open_bus(address) as bus:
        there = [r.event_id for r in await records(bus) if r.event_id.startswith(tag)]
        assert {e.event_id for n in acknowledged for e in work[n]} <= set(there)
        await asyncio.to_thread(process.start)
        rest = work[len(acknowledged) :]
        await streamed(process.grpc, rest, [])
        assert await asyncio.to_thread(process.end) == 0
        found = [r for r in await records(bus) if r.event_id.startswith(tag)]
    assert Counter(r.event_id for r in found) == Counter(e.event_id for batch in work for e in batch)
    for suggestion in range(3):
        mine = [r.event_id for r in found if r.suggestion_id == f"{tag}-{suggestion}"]
        assert mine == [e.event_id for n, batch in enumerate(work) if n % 3 == suggestion for e in batch]


def test_gateway_killed_in_mid_stream(tmp_path: Path) -> None:
    """kill -9 during a stream, on the embedded log: acknowledged is there, resent is once, order holds."""

    async def run() -> None:
        address = f"sqlite:{tmp_path / 'log'}"
        async with open_bus(address) as bus:
            await bus.create_topics([FEEDBACK])
        await asyncio.wait_for(killed_in_mid_stream(tmp_path / "run", address, "k"), WAIT_S)

    asyncio.run(run())


@pytest.mark.kafka
def test_gateway_killed_in_mid_stream_on_kafka(tmp_path: Path, kafka: str) -> None:
    """The same on a real broker."""
    tag = os.urandom(4).hex()
    asyncio.run(asyncio.wait_for(killed_in_mid_stream(tmp_path / "run", f"kafka:{kafka}", tag), WAIT_S))


async def away_and_back(
    bus: Bus, home: Path, away: Callable[[], object], back: Callable[[], object], *, away_s: float = 0.0
) -> None:
    """Publishes through a client before, while and after the log is away, for `away_s` and a little more."""
    async with gateway(home, bus=bus) as place:
        address = f"grpc://{place.addresses.grpc}"
        client = await asyncio.to_thread(FeedbackClient, address, buffer=home / "buffer.db", user="ada")
        try:
            client.publish(event_id="before", suggestion_id="s", kind="shown")
            assert await asyncio.to_thread(client.flush, 60.0)
            await asyncio.to_thread(away)
            for number in range(30):
                client.publish(event_id=f"while-{number}", suggestion_id="s", kind="shown")
            await until(lambda: client.status().last_error)
            assert client.status().waiting == 30
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await place.publish(request_of([event(1)]).SerializeToString())
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            assert RETRY_AFTER in dict(caught.value.trailing_metadata() or ())
            await asyncio.sleep(away_s)
            await asyncio.to_thread(back)
            client.publish(event_id="after", suggestion_id="s", kind="shown")
            assert await asyncio.to_thread(client.flush, 60.0), client.status()
        finally:
            await asyncio.to_thread(client.close, 0.0)
        found = [r.event_id for r in await place.records() if r.event_id != "e1"]
    assert found == ["before", *(f"while-{n}" for n in range(30)), "after"]


def test_log_locked_for_a_while(tmp_path: Path) -> None:
    """The embedded log does not take a write in time: UNAVAILABLE with a time; later all is there, once."""
    path = tmp_path / "log"
    other = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=10)

    async def run() -> None:
        async with SqliteBus(path, lock_wait_ms=100) as bus:
            await asyncio.wait_for(
                away_and_back(
                    bus,
                    tmp_path / "gw",
                    lambda: other.execute("BEGIN IMMEDIATE"),
                    lambda: other.execute("ROLLBACK"),
                ),
                WAIT_S,
            )

    asyncio.run(run())
    other.close()


@pytest.mark.kafka
@pytest.mark.timeout(300)
def test_broker_away(tmp_path: Path, kafka: str) -> None:
    """The broker is stopped for a minute, far longer than the bus tries: the client keeps all, and sends it
    when it is back."""
    if lack := local_kafka.missing():
        pytest.skip(f"no local broker: {lack}")
    directory = tmp_path / "kafka"
    address = local_kafka.up(directory)

    async def run() -> None:
        async with KafkaBus(address) as patient:
            await patient.create_topics([FEEDBACK])
        async with KafkaBus(address, retry_s=1.0) as bus:
            await asyncio.wait_for(
                away_and_back(
                    bus,
                    tmp_path / "gw",
                    lambda: local_kafka.down(directory),
                    lambda: local_kafka.up(directory),
                    away_s=60.0,
                ),
                60.0 + 2 * WAIT_S,
            )

    try:
        asyncio.run(run())
    finally:
        local_kafka.down(directory)


class Doubtful:
    """A bus whose next write happens and then fails, as when an acknowledgement is lost."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self.fail = False

    def __getattr__(self, name: str) -> object:
        return getattr(self._bus, name)

    async def produce(self, messages: Sequence[Message]) -> list[int]:
        offsets = await self._bus.produce(messages)
        if self.fail:
            self.fail = False
            raise BusUnavailable("no answer")
        return offsets


def test_an_acknowledgement_that_was_lost(tmp_path: Path) -> None:
    """The log took a batch and its answer was lost: the batch is refused, those behind it too, and sent again
    all are there once, in order."""

    async def run() -> None:
        async with open_bus("sqlite::memory:") as bus:
            await bus.create_topics([FEEDBACK])
            doubtful = Doubtful(bus)
            doubtful.fail = True
            async with gateway(tmp_path, bus=doubtful) as place:  # type: ignore[arg-type]
                work = batches("d", 10)
                acknowledged: list[int] = []
                while len(acknowledged) < len(work):
                    with contextlib.suppress(grpc.aio.AioRpcError):
                        todo: list[int] = []
                        await streamed(place.addresses.grpc, work[len(acknowledged) :], todo)
                        acknowledged += todo
                found = [r.event_id for r in await place.records() if r.suggestion_id == "d-0"]
            assert found == [e.event_id for n in (0, 3, 6, 9) for e in work[n]]

    asyncio.run(asyncio.wait_for(run(), WAIT_S))


def test_after_a_failed_batch_its_lane_is_closed() -> None:
    """What a stream had put behind a batch that failed never overtakes it."""

    async def run() -> None:
        async with open_bus("sqlite::memory:") as bus:
            await bus.create_topics([FEEDBACK])
            doubtful = Doubtful(bus)
            writer = Writer(doubtful, GatewayConfig(), _Clock())  # type: ignore[arg-type]
            doubtful.fail = True
            lane, message = Lane(), Message(FEEDBACK.name, b"s", b"")
            done = writer.submit(lane, ["a u"], [message])
            writing = asyncio.create_task(writer.run())
            with pytest.raises(FeedbackUnavailable):
                await done
            await until(lambda: not writer.away)
            with pytest.raises(FeedbackUnavailable, match="a batch before this one failed"):
                writer.submit(lane, ["b u"], [message])
            assert await writer.submit(Lane(), ["b u"], [message]) == 0
            writer.drain()
            with pytest.raises(FeedbackUnavailable, match="stopping"):
                writer.room_for(1)
            await writing

    asyncio.run(asyncio.wait_for(run(), WAIT_S))


def test_a_failure_that_nobody_waits_for_is_quiet() -> None:
    """A stream ends at its first batch that failed; those behind it are refused without a trace in the
    log."""
    told: list[object] = []

    async def run() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: told.append(context))
        async with open_bus("sqlite::memory:") as bus:
            await bus.create_topics([FEEDBACK])
            doubtful = Doubtful(bus)
            writer = Writer(doubtful, GatewayConfig(), _Clock())  # type: ignore[arg-type]
            doubtful.fail = True
            lane, message = Lane(), Message(FEEDBACK.name, b"s", b"")
            first = writer.submit(lane, ["a u"], [message])
            writer.submit(lane, ["b u"], [message])
            writing = asyncio.create_task(writer.run())
            with pytest.raises(FeedbackUnavailable):
                await first
            await until(lambda: not writer.away)
            writer.drain()
            await writing
            gc.collect()

    asyncio.run(asyncio.wait_for(run(), WAIT_S))
    assert told == []


class _Clock:
    def now_ms(self) -> int:
        return 0


def test_recent_is_bounded() -> None:
    """Of 10 remembered ids the newest 5 are always known, and never more than 10 are held."""
    recent = Recent(10)
    for number in range(100):
        recent.add([str(number)])
        assert len(recent) <= 10
        assert all(str(n) in recent for n in range(max(0, number - 4), number + 1))
    assert "80" not in recent


def test_what_came_before_sigterm_is_durable(tmp_path: Path) -> None:
    """A gateway that is asked to stop ends with 0, and all that it acknowledged, and no more, is there."""

    async def run() -> None:
        address = f"sqlite:{tmp_path / 'log'}"
        async with open_bus(address) as bus:
            process = GatewayProcess(tmp_path / "run", address)
            await bus.create_topics([FEEDBACK])
            await asyncio.to_thread(process.start)
            acknowledged: list[int] = []
            work = batches("t", 300)
            sending = asyncio.create_task(streamed(process.grpc, work, acknowledged))
            await until(lambda: len(acknowledged) >= 5)
            assert await asyncio.to_thread(process.end) == 0
            with contextlib.suppress(grpc.aio.AioRpcError):
                await sending
            there = [r.event_id for r in await records(bus)]
            assert sorted(there) == sorted(e.event_id for n in acknowledged for e in work[n])

    asyncio.run(asyncio.wait_for(run(), WAIT_S))
