"""Durable events a second through the feedback gateway, beside bare aiokafka on the same broker in the same
run; latencies at a quarter of that load.

Broker, gateway and load generator are processes of one machine. An event counts when its acknowledgement
came back: it is in the log with acks=all. The generator sends batches that are ready as bytes, over two
streams, 16 batches ahead at most. Bare aiokafka gets the very records that the gateway writes, keys, headers
and values ready, and sends them in a loop of `send` (idempotent, acks=all), whose futures it awaits at the
end: no network in front, nothing checked. Rounds of both take turns and the median counts.
"""

import asyncio
import itertools
import os
import random
import signal
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import grpc.aio
from aiokafka import AIOKafkaProducer

from benchmarks.page import table
from headrace.bus import local_kafka, open_bus
from headrace.bus.protocol import Message
from headrace.cli.gateway import addresses_of
from headrace.clock import SystemClock
from headrace.producers.gateway.intake import Intake
from headrace.rpc import feedback_pb2 as pb
from headrace.rpc.feedback import Event
from headrace.rpc.feedback_messages import SERVICE, request_of
from headrace.wire.pseudonyms import Pseudonyms
from headrace.wire.topics import FEEDBACK

BATCH, STREAMS, AHEAD, CALLS = 100, 2, 16, 32
EVENTS, UNARY_EVENTS, ROUNDS, PACED_S = 60_000, 3_000, 5, 4.0
START_S = 30.0
BARS = (40_000.0, 1.5)
KINDS = ("shown", "accepted", "rejected", "shown", "partially_accepted")

Send = Callable[[bytes], Awaitable[object]]


def events(count: int) -> list[Event]:
    """As editors make them: three events a suggestion, 500 users."""
    tag, draw = uuid.uuid4().hex[:8], random.Random(0)
    return [
        Event(
            event_id=uuid.uuid4().hex,
            suggestion_id=f"demo-live-{tag}-{number // 3:07d}",
            kind=KINDS[number % 5],
            editor_ms=1_790_000_000_000 + number,
            view_id=f"v{number % 1000}",
            user=f"user{draw.randrange(500)}@example.org",
            client="vscode/1.99.0",
            accepted_length=12 if number % 5 in (1, 4) else None,
        )
        for number in range(count)
    ]


def bodies(count: int, batch: int) -> list[bytes]:
    """Batches ready to be sent."""
    made = events(count)
    return [request_of(made[i : i + batch]).SerializeToString() for i in range(0, count, batch)]


def records(count: int) -> list[Message]:
    """What the gateway would write of as many events."""
    pseudonyms = Pseudonyms("r1", b"benchmark" * 4)
    intake = Intake(run="demo", region="local", pseudonyms=pseudonyms, text_keys=None, clock=SystemClock())
    return intake.take(events(count), sender="bench").messages


class Latency(NamedTuple):
    p50_ms: float
    p99_ms: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "Latency":
        ordered = sorted(seconds)
        return cls(
            *(1000 * ordered[min(len(ordered) - 1, int(share * len(ordered)))] for share in (0.5, 0.99))
        )


class Rates(NamedTuple):
    """Of one page."""

    bare: list[float]
    streamed: list[float]
    unary: list[float]
    streamed_latency: Latency
    unary_latency: Latency


@asynccontextmanager
async def gateway(address: str, home: Path) -> AsyncIterator[str]:
    """A gateway process on the log at `address`; its gRPC address."""
    words = ("gateway", "--run-dir", str(home), "--bus", address, "--gateway.rate_events_per_s", "1e7")
    process = await asyncio.to_thread(_started, words, home)
    try:
        deadline_s = time.monotonic() + START_S
        while not (found := await asyncio.to_thread(_listening, home)):
            if process.poll() is not None or time.monotonic() > deadline_s:
                raise SystemExit(f"the gateway did not start, see {home / 'gateway.log'}")
            await asyncio.sleep(0.05)
        yield found
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(20)


def _started(words: Sequence[str], home: Path) -> "subprocess.Popen[bytes]":
    home.mkdir(parents=True, exist_ok=True)
    (home / "gateway.addresses").unlink(missing_ok=True)
    with (home / "gateway.log").open("wb") as output:
        return subprocess.Popen([sys.executable, "-m", "headrace", *words], stdout=output, stderr=output)


def _listening(home: Path) -> str:
    return addresses_of(home)[0] if (home / "gateway.addresses").exists() else ""


class Generator:
    """The load."""

    def __init__(self, address: str) -> None:
        self._channels = [
            grpc.aio.insecure_channel(address, options=(("grpc.use_local_subchannel_pool", 1),))
            for _ in range(STREAMS)
        ]

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close()

    async def streamed(self, batches: Sequence[bytes]) -> float:
        """Events a second, all acknowledged."""
        started_s = time.perf_counter()
        acknowledged = await asyncio.gather(
            *(self._stream(channel, batches[i::STREAMS]) for i, channel in enumerate(self._channels))
        )
        return sum(acknowledged) / (time.perf_counter() - started_s)

    async def _stream(self, channel: grpc.aio.Channel, batches: Sequence[bytes]) -> int:
        ahead = asyncio.Semaphore(AHEAD)

        async def sent() -> AsyncIterator[bytes]:
            for batch in batches:
                await ahead.acquire()
                yield batch

        call: Any = channel.stream_stream(
            f"/{SERVICE}/PublishStream", response_deserializer=pb.PublishReply.FromString
        )
        accepted = 0
        async for reply in call(sent()):
            assert not reply.refused
            accepted += reply.accepted
            ahead.release()
        return accepted

    async def unary(self, batches: Sequence[bytes]) -> float:
        """Events a second of one event a call, `CALLS` at once."""
        waiting = iter(batches)
        publish = self._publish()

        async def caller() -> None:
            for body in waiting:
                await publish(body)

        started_s = time.perf_counter()
        await asyncio.gather(*(caller() for _ in range(CALLS)))
        return len(batches) / (time.perf_counter() - started_s)

    async def paced(self, batches: Sequence[bytes], per_s: float) -> Latency:
        """From the moment a batch was due to its acknowledgement, `per_s` of them a second: a late start
        counts."""
        publish = self._publish()
        taken_s: list[float] = []
        loop = asyncio.get_running_loop()
        first_s = loop.time() + 0.1

        async def one(body: bytes, due_s: float) -> None:
            await publish(body)
            taken_s.append(loop.time() - due_s)

        async with asyncio.TaskGroup() as calls:
            for number, body in enumerate(batches):
                due_s = first_s + number / per_s
                await asyncio.sleep(max(0.0, due_s - loop.time()))
                calls.create_task(one(body, due_s))
        return Latency.of(taken_s)

    def _publish(self) -> Send:
        calls: Iterator[Any] = itertools.cycle(
            [
                channel.unary_unary(f"/{SERVICE}/Publish", response_deserializer=pb.PublishReply.FromString)
                for channel in self._channels
            ]
        )

        async def publish(body: bytes) -> None:
            reply = await next(calls)(body, timeout=30)
            assert not reply.refused

        return publish


async def bare(address: str, messages: Sequence[Message]) -> float:
    """Records a second of a `send` loop."""
    producer = AIOKafkaProducer(bootstrap_servers=address, acks="all", enable_idempotence=True)
    await producer.start()
    try:
        await producer.send_and_wait(FEEDBACK.name, messages[0].value, key=messages[0].key)
        started_s = time.perf_counter()
        sent = [await producer.send(m.topic, m.value, key=m.key, headers=list(m.headers)) for m in messages]
        await asyncio.gather(*sent)
        return len(messages) / (time.perf_counter() - started_s)
    finally:
        await producer.stop()


async def measure(
    address: str, home: Path, *, count: int = EVENTS, unary: int = UNARY_EVENTS, rounds: int = ROUNDS
) -> Rates:
    """All figures on the broker at `address` (`host:port`)."""
    async with open_bus(f"kafka:{address}") as bus:
        await bus.create_topics([FEEDBACK])
    bares: list[float] = []
    streamed: list[float] = []
    unaries: list[float] = []
    async with gateway(f"kafka:{address}", home) as listening:
        load = Generator(listening)
        await load.streamed(bodies(count // 10, BATCH))  # warm
        for _ in range(rounds):
            work, same = bodies(count, BATCH), records(count)
            bares.append(await bare(address, same))
            streamed.append(await load.streamed(work))
            unaries.append(await load.unary(bodies(unary, 1)))
        quarter = statistics.median(streamed) / 4 / BATCH
        at_quarter = await load.paced(bodies(BATCH * max(1, int(quarter * PACED_S)), BATCH), quarter)
        quarter = statistics.median(unaries) / 4
        alone = await load.paced(bodies(max(1, int(quarter * PACED_S)), 1), quarter)
        await load.close()
    return Rates(bares, streamed, unaries, at_quarter, alone)


def page(rates: Rates) -> str:
    """Tables of the gateway's part."""
    bare, streamed, unary = (statistics.median(r) for r in (rates.bare, rates.streamed, rates.unary))
    ratio = streamed / bare
    rows = [
        ["gateway, streams of batches of 100", streamed, min(rates.streamed), max(rates.streamed)],
        ["gateway, one event a call, 32 at once", unary, min(rates.unary), max(rates.unary)],
        ["bare aiokafka, `send` loop", bare, min(rates.bare), max(rates.bare)],
    ]
    waits = [
        ["batches of 100", streamed / 4, *rates.streamed_latency],
        ["one event a call", unary / 4, *rates.unary_latency],
    ]
    bars = [
        ["durable events / s, streamed", f">= {BARS[0]:,.0f}", f"{streamed:,.0f}", _holds(streamed, BARS[0])],
        ["of bare aiokafka's `send` loop", f">= {BARS[1]:g}", f"{ratio:.2f}", _holds(ratio, BARS[1])],
    ]
    return "\n".join(
        [
            table(["durable events / s", "median", "least", "most"], rows),
            table(["at a quarter of that load", "events / s", "p50 ms", "p99 ms"], waits),
            table(["bar", "expected", "measured", "holds"], bars),
        ]
    )


def _holds(measured: float, bar: float) -> str:
    return "yes" if measured >= bar else "no"


def run(home: Path, *, rounds: int = ROUNDS) -> str:
    """The gateway's part of the page, on $HEADRACE_KAFKA or a broker of its own in `home`."""
    given = os.environ.get("HEADRACE_KAFKA")
    address = given or local_kafka.up(home / "kafka")
    try:
        return page(asyncio.run(measure(address, home / "gateway", rounds=rounds)))
    finally:
        if not given:
            local_kafka.down(home / "kafka")
