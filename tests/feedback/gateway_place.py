"""A gateway for a test: in this process on a log in memory, or as a process of its own that can be killed."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import grpc.aio
import msgspec

from headrace.bus import open_bus
from headrace.bus.protocol import Bus
from headrace.cli.gateway import addresses_of
from headrace.config import RunConfig
from headrace.errors import ConfigError
from headrace.producers import feedback
from headrace.producers.config import GatewayConfig
from headrace.rpc import feedback_pb2 as pb
from headrace.rpc.feedback import Event
from headrace.rpc.feedback_messages import SERVICE
from headrace.wire.codec import decode
from headrace.wire.records import Feedback
from headrace.wire.topics import FEEDBACK

WAIT_S = 90.0
"""Longer than any wait inside of it, and less than a test may take."""
ROOT = Path(__file__).resolve().parents[2]
HEAD = b"POST /v1/events HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def event(number: int = 0, **fields: Any) -> Event:
    """Event `number` of Ada's."""
    known: dict[str, Any] = {
        "event_id": f"e{number}",
        "suggestion_id": f"s{number // 3}",
        "kind": "shown",
        "user": "ada@example.org",
    }
    return Event(**known | fields)


def method(channel: grpc.aio.Channel, name: str) -> Any:
    """`Publish` or `PublishStream` of a channel, taking bytes as they are."""
    make: Any = channel.stream_stream if name == "PublishStream" else channel.unary_unary
    return make(f"/{SERVICE}/{name}", response_deserializer=pb.PublishReply.FromString)


class Place(NamedTuple):
    """A running gateway, and the log behind it."""

    bus: Bus
    addresses: feedback.Addresses

    async def records(self) -> list[Feedback]:
        return await records(self.bus)

    async def publish(self, body: bytes, *, token: str = "") -> pb.PublishReply:
        """One unary call with `body` as it is."""
        async with grpc.aio.insecure_channel(self.addresses.grpc) as channel:
            call = method(channel, "Publish")
            metadata = (("authorization", f"Bearer {token}"),) if token else ()
            reply: pb.PublishReply = await call(body, timeout=WAIT_S, metadata=metadata)
            return reply

    async def post(self, body: bytes, **headers: str) -> "Answer":
        return await asyncio.to_thread(post, f"http://{self.addresses.http}/v1/events", body, **headers)


async def records(bus: Bus) -> list[Feedback]:
    """Everything on the topic, partition by partition."""
    ends = await bus.ends([FEEDBACK.name])
    found = []
    for tp, begin in (await bus.begins([FEEDBACK.name])).items():
        async for delivery in bus.read_range(tp, begin, ends[tp]):
            record = decode(FEEDBACK.name, delivery.value or b"", delivery.headers)
            assert isinstance(record, Feedback)
            assert delivery.key == record.suggestion_id.encode()
            found.append(record)
    return found


@asynccontextmanager
async def gateway(home: Path, *, bus: Bus | None = None, **settings: Any) -> AsyncIterator[Place]:
    """A gateway on `bus`, or on a log in memory."""
    async with open_bus("sqlite::memory:") as memory:
        log = bus or memory
        await log.create_topics([FEEDBACK])
        stop = asyncio.Event()
        ready: asyncio.Future[feedback.Addresses] = asyncio.get_running_loop().create_future()
        config = GatewayConfig(home=str(home), **settings)
        running = asyncio.create_task(feedback.run(log, RunConfig(), config, stop, ready.set_result))
        either: set[asyncio.Future[Any]] = {running, ready}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED, timeout=WAIT_S)
        if running.done():
            running.result()
        yield Place(log, ready.result())
        stop.set()
        await asyncio.wait_for(running, WAIT_S)


def on_a_gateway(home: Path, act: Callable[[Place], Coroutine[Any, Any, None]], **settings: Any) -> None:
    """Runs `act` with a gateway of `settings`."""

    async def run() -> None:
        async with gateway(home, **settings) as place:
            await asyncio.wait_for(act(place), WAIT_S)

    asyncio.run(run())


class Answer(NamedTuple):
    status: int
    body: Any
    headers: dict[str, str]


def post(url: str, body: bytes | None, **headers: str) -> Answer:
    """`body` None: GET."""
    request = urllib.request.Request(url, data=body, headers={"Content-Type": "application/json", **headers})
    try:
        with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
            return Answer(answer.status, json.loads(answer.read()), dict(answer.headers))
    except urllib.error.HTTPError as error:
        with error:
            content = error.read()
        body_of = json.loads(content) if content.startswith(b"{") else content.decode()
        return Answer(error.code, body_of, dict(error.headers))


async def sent(place: Place, data: bytes) -> bytes:
    """What the HTTP port answers to `data` until it closes. Reads while it writes: what is too large is
    refused before all of it came, and the rest is not waited for long."""
    host, port = place.addresses.http.split(":")
    reader, writing = await asyncio.open_connection(host, int(port))
    writing.write(data)
    answer = b""
    with contextlib.suppress(ConnectionError):
        while chunk := await asyncio.wait_for(reader.read(65_536), 60):
            answer += chunk
    writing.close()
    return answer


def json_batch(events: Sequence[Any]) -> bytes:
    return msgspec.json.encode({"events": events})


class GatewayProcess:
    """`headrace gateway` on the log at `bus`; started again under the same addresses."""

    def __init__(self, home: Path, bus: str, *words: str) -> None:
        self.home = home
        self._words = ("gateway", "--run-dir", str(home), "--bus", bus, *words)
        self._process: subprocess.Popen[bytes] | None = None
        home.mkdir(parents=True, exist_ok=True)

    @property
    def grpc(self) -> str:
        return addresses_of(self.home)[0]

    @property
    def http(self) -> str:
        return f"http://{addresses_of(self.home)[1]}"

    def start(self) -> None:
        """Returns when it answers."""
        with (self.home / "gateway.log").open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "headrace", *self._words],
                stdout=output,
                stderr=output,
                env={k: v for k, v in os.environ.items() if not k.startswith("HEADRACE_")},
            )
        deadline_s = time.monotonic() + WAIT_S
        while not self._answers():
            assert self._process.poll() is None, (self.home / "gateway.log").read_text()
            assert time.monotonic() < deadline_s, (self.home / "gateway.log").read_text()
            time.sleep(0.02)

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Sends the signal and waits; the exit code."""
        assert self._process is not None
        self._process.send_signal(number)
        return self._process.wait(WAIT_S)

    def _answers(self) -> bool:
        try:
            return post(f"{self.http}/healthz", None).status in (200, 503)
        except (OSError, ConfigError):  # not there yet
            return False
