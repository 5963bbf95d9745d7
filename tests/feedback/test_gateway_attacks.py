"""What a stranger, a web page or one client might try against the others: it is refused, and the others are
served."""

import asyncio
import contextlib
import gzip
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from gateway_place import HEAD, Place, event, gateway, json_batch, method, on_a_gateway, sent
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from test_gateway_limits import certificate

from headrace.bus import open_bus
from headrace.bus.protocol import Message
from headrace.clock import SystemClock
from headrace.errors import FeedbackOverloaded
from headrace.producers.client.transport import HttpTransport
from headrace.producers.config import GatewayConfig
from headrace.producers.gateway import writer
from headrace.producers.gateway.writer import Lane, Writer
from headrace.rpc import feedback_pb2 as pb
from headrace.rpc.feedback_messages import SERVICE, request_of
from headrace.wire.topics import FEEDBACK

TOKEN, OTHER = "t" * 20, "o" * 20
BODY = request_of([event(1)]).SerializeToString()


@pytest.fixture
def tokens(tmp_path: Path) -> str:
    path = tmp_path / "tokens"
    path.write_text(f"ada {TOKEN} own\nteam {OTHER}\n")
    return str(path)


def bearer(token: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token}"),)


# Who.


def test_an_own_token_speaks_for_its_name_alone(tmp_path: Path, tokens: str) -> None:
    """Of a token that is its user's own, events in another's name are refused one by one; another token
    vouches for whom it names."""

    async def act(place: Place) -> None:
        claims = [event(1, user="bob"), event(2, user="ada"), event(3, user="")]
        answer = await place.post(json_batch(claims), Authorization=f"Bearer {TOKEN}")
        assert (answer.status, answer.body["accepted"]) == (200, 2)
        [refused] = answer.body["refused"]
        assert (refused["index"], refused["reason"].startswith("user: expected none or ada")) == (0, True)
        reply = await place.publish(request_of([event(4, user="bob")]).SerializeToString(), token=TOKEN)
        assert reply.accepted == 0
        reply = await place.publish(request_of([event(1, user="bob")]).SerializeToString(), token=OTHER)
        assert (reply.accepted, reply.duplicates) == (1, 0)
        by_user: dict[str, list[str]] = {}
        for record in await place.records():
            by_user.setdefault(record.user, []).append(record.event_id)
        assert sorted(sorted(ids) for ids in by_user.values()) == [["e1"], ["e2", "e3"]]

    on_a_gateway(tmp_path, act, tokens_file=tokens)


def test_what_needs_no_token(tmp_path: Path, tokens: str) -> None:
    """Without a token a probe learns the health, and nothing else of any service."""

    async def act(place: Place) -> None:
        async with grpc.aio.insecure_channel(place.addresses.grpc) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            asked = health_pb2.HealthCheckRequest(service=SERVICE)
            assert (await health.Check(asked, timeout=60)).status == health_pb2.HealthCheckResponse.SERVING
            listing = reflection_pb2.ServerReflectionRequest(list_services="")
            reflection = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo
            for call in (health.Watch(asked, timeout=60), reflection(iter([listing]), timeout=60)):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call.read()
                assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
            for call in (
                health.Watch(asked, timeout=60, metadata=bearer(TOKEN)),
                reflection(iter([listing]), timeout=60, metadata=bearer(TOKEN)),
            ):
                assert await call.read()
                call.cancel()

    on_a_gateway(tmp_path, act, tokens_file=tokens)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Content-Type": "text/plain", "Origin": "http://evil.example"}, 415),
        ({"Content-Type": "application/x-www-form-urlencoded"}, 415),
        ({"Host": "evil.example:8480"}, 403),
        ({"Host": "evil.example"}, 403),
        ({"Host": "localhost:8480"}, 200),
        ({"Host": "[::1]:8480"}, 200),
        ({"Content-Type": "application/json; charset=utf-8"}, 200),
    ],
)
def test_a_web_page_does_not_speak_for_the_user(tmp_path: Path, headers: dict[str, str], status: int) -> None:
    """A gateway that asks nobody for a token takes nothing that any page in a browser could send: plain text
    without asking for leave, or to a name of the page's own that leads here."""

    async def act(place: Place) -> None:
        assert (await place.post(json_batch([event(1)]), **headers)).status == status
        assert len(await place.records()) == (status == 200)

    on_a_gateway(tmp_path, act)


def test_any_name_leads_to_a_gateway_with_tokens(tmp_path: Path, tokens: str) -> None:
    """Where a token is asked for, the name by which a proxy or a client calls does not matter."""

    async def act(place: Place) -> None:
        headers = {"Host": "feedback.example", "Authorization": f"Bearer {TOKEN}"}
        assert (await place.post(json_batch([event(1, user="")]), **headers)).status == 200

    on_a_gateway(tmp_path, act, tokens_file=tokens)


# One keeps the others out.


async def never(first: bytes | None = None) -> AsyncIterator[bytes]:
    """A call's body that does not end."""
    if first is not None:
        yield first
    await asyncio.Event().wait()
    yield b""


def open_call(make: Any) -> Any:
    return make(never())


def test_calls_that_hold_on_keep_nobody_out(tmp_path: Path, tokens: str) -> None:
    """Hundreds of calls without a token, of health checks that never ask and of one name's streams that never
    end: another name is served, and the one learns its limit."""

    async def act(place: Place) -> None:
        held: list[Any] = []
        async with grpc.aio.insecure_channel(place.addresses.grpc) as channel:
            for path in (f"/{SERVICE}/Publish", f"/{SERVICE}/PublishStream", "/grpc.health.v1.Health/Watch"):
                held += [open_call(channel.stream_stream(path)) for _ in range(40)]
            held += [open_call(channel.stream_unary("/grpc.health.v1.Health/Check")) for _ in range(40)]
            streams = [
                method(channel, "PublishStream")(never(BODY), metadata=bearer(TOKEN)) for _ in range(8)
            ]
            for stream in streams:
                assert (await stream.read()).number == 0
            one_more = method(channel, "PublishStream")(never(BODY), metadata=bearer(TOKEN))
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await one_more.read()
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "expected at most 8 under way of one name" in (caught.value.details() or "")
            other = request_of([event(2)]).SerializeToString()
            assert (await place.publish(other, token=OTHER)).accepted == 1
            for call in (*held, *streams, one_more):
                call.cancel()

    on_a_gateway(tmp_path, act, tokens_file=tokens, streams_max=16)


async def empty() -> AsyncIterator[bytes]:
    """A call's body without a message."""
    return
    yield b""


@pytest.mark.parametrize(
    ("body", "settings", "code"),
    [
        (never, {"body_ms_max": 300}, grpc.StatusCode.UNAVAILABLE),
        (empty, {}, grpc.StatusCode.INVALID_ARGUMENT),
    ],
)
def test_a_call_without_its_message_ends(
    tmp_path: Path,
    tokens: str,
    body: Callable[[], AsyncIterator[bytes]],
    settings: dict[str, int],
    code: grpc.StatusCode,
) -> None:
    """A unary call whose message does not come in time, or never, is ended by the gateway."""

    async def act(place: Place) -> None:
        async with grpc.aio.insecure_channel(place.addresses.grpc) as channel:
            call: Any = channel.stream_unary(f"/{SERVICE}/Publish")
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(body(), metadata=bearer(TOKEN), timeout=60)
            assert (caught.value.code(), "message" in (caught.value.details() or "")) == (code, True)

    on_a_gateway(tmp_path, act, tokens_file=tokens, **settings)


def test_batches_too_long_are_not_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a million events in 1 MB are counted and refused before any of them is read, over both
    protocols and when one of them is not UTF-8."""
    from headrace.producers.gateway import over_http
    from headrace.rpc import feedback_messages

    read: list[object] = []

    def note(what: object) -> Any:
        read.append(what)
        raise AssertionError("it was read")

    class Events:
        decode = staticmethod(note)

    monkeypatch.setattr(feedback_messages, "event_of", note)
    monkeypatch.setattr(over_http, "_events", Events)

    async def act(place: Place) -> None:
        bad = pb.RawPublishRequest(events=[b"\x0a\x01\xff"] * 2000).SerializeToString()
        for body in (b"\x0a\x00" * 490_000, bad):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await place.publish(body)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert "expected at most 1000 events" in (caught.value.details() or "")
        answer = await place.post(b'{"events":[' + b",".join([b"1"] * 490_000) + b"]}")
        assert (answer.status, "expected at most 1000 events" in answer.body["error"]) == (400, True)
        assert read == []

    on_a_gateway(tmp_path, act)


def test_bytes_that_wait_are_bounded() -> None:
    """With 1,000 bytes allowed to wait, a sender behind 1,200 is told to come back, however few events that
    are; one write takes as many bytes as it may; what waited is written."""

    async def run() -> None:
        async with open_bus("sqlite::memory:") as bus:
            await bus.create_topics([FEEDBACK])
            queue = Writer(bus, GatewayConfig(pending_bytes_max=1_000), SystemClock())
            done = [
                queue.submit(Lane(), [f"{i} u"], [Message(FEEDBACK.name, b"s", bytes(600))]) for i in range(2)
            ]
            with pytest.raises(FeedbackOverloaded, match="and 1000 bytes waiting"):
                queue.submit(Lane(), ["x u"], [Message(FEEDBACK.name, b"s", b"")])
            writing = asyncio.create_task(queue.run())
            assert await asyncio.gather(*done) == [0, 0]
            queue.room_for(1)
            queue.drain()
            await writing

    asyncio.run(run())


def test_one_write_is_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of 600 bytes under a bound of 1,300 go two by two; one that is larger alone goes alone."""
    monkeypatch.setattr(writer, "GROUP_BYTES_MAX", 1_300)

    async def run() -> None:
        async with open_bus("sqlite::memory:") as bus:
            queue = Writer(bus, GatewayConfig(), SystemClock())
            for size in (600, 600, 600, 5_000, 1):
                queue.submit(Lane(), ["e u"], [Message(FEEDBACK.name, b"s", bytes(size))])
            sizes = [[w.size for w in queue._next_group()] for _ in range(4)]
            assert sizes == [[600, 600], [600], [5_000], [1]]
            assert (queue._queued_bytes, queue._queued_events) == (0, 0)

    asyncio.run(run())


# Bodies.


def test_deep_nesting_is_a_fault_of_its_event(tmp_path: Path) -> None:
    """100,000 brackets are no batch (400) and no server error; in an unknown field of an event likewise."""

    async def act(place: Place) -> None:
        deep = b"[" * 100_000
        inside = b'{"events":[{"event_id":"e","suggestion_id":"s","kind":"shown","x":%s}]}'
        for body in (deep, inside % (deep + b"]" * 100_000)):
            answer = await place.post(body)
            assert (answer.status, "expected" in answer.body["error"]) == (400, True)

    on_a_gateway(tmp_path, act)


def test_compressed_bombs(tmp_path: Path) -> None:
    """50 MB that are 50 kB on the way are refused at the limit of a message, over both protocols."""
    bomb = gzip.compress(bytes(50_000_000))
    assert len(bomb) < 60_000

    async def act(place: Place) -> None:
        answer = await place.post(bomb, **{"Content-Encoding": "gzip"})
        assert answer.status == 413
        options = (("grpc.max_send_message_length", -1),)
        async with grpc.aio.insecure_channel(place.addresses.grpc, options=options) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await method(channel, "Publish")(
                    bytes(50_000_000), compression=grpc.Compression.Gzip, timeout=60
                )
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (await place.publish(BODY)).accepted == 1

    on_a_gateway(tmp_path, act)


def test_what_is_announced_as_too_large_is_not_waited_for(tmp_path: Path) -> None:
    """A body that says it has 10 MB is refused before a byte of it came; one in chunks when it has gone over
    the limit."""

    async def act(place: Place) -> None:
        answer = await sent(place, HEAD + b"Content-Length: 10000000\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 413")
        chunk = b"%x\r\n%s\r\n" % (60_000, b"x" * 60_000)
        answer = await sent(place, HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunk * 20)
        assert answer.startswith(b"HTTP/1.1 413")

    on_a_gateway(tmp_path, act)


HIDDEN = json_batch([event(66)])
SECOND = HEAD + b"Content-Length: %d\r\n\r\n%s" % (len(HIDDEN), HIDDEN)


@pytest.mark.parametrize(
    "data",
    [
        HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + SECOND,
        HEAD + b"Content-Length: 3\r\nContent-Length: %d\r\n\r\nabc" % (3 + len(SECOND)) + SECOND,
        HEAD + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n" + SECOND,
        HEAD + b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n" + SECOND,
        HEAD + b"Content-Length: +3\r\n\r\nabc" + SECOND,
        HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\nabc\r\n0\r\n\r\n" + SECOND,
    ],
)
def test_no_request_hides_behind_another(tmp_path: Path, data: bytes) -> None:
    """A head whose length can be read in two ways is refused, and what follows it is no request."""

    async def act(place: Place) -> None:
        assert b" 400 " in (await sent(place, data)).partition(b"\r\n")[0]
        assert await place.records() == []

    on_a_gateway(tmp_path, act)


def test_huge_heads(tmp_path: Path) -> None:
    """A head of one line of 1 MB, of 10,000 lines, or metadata of 1 MB: refused, and the next is served."""

    async def act(place: Place) -> None:
        for lines in (b"X: " + b"x" * 1_000_000 + b"\r\n", b"X: y\r\n" * 10_000):
            answer = await sent(place, HEAD + lines + b"Content-Length: 0\r\n\r\n")
            assert answer.startswith((b"HTTP/1.0 400", b"HTTP/1.1 400")) or answer == b""
        options = (("grpc.max_metadata_size", 4 << 20), ("grpc.absolute_max_metadata_size", 4 << 20))
        async with grpc.aio.insecure_channel(place.addresses.grpc, options=options) as channel:
            with pytest.raises(grpc.aio.AioRpcError):
                await method(channel, "Publish")(BODY, timeout=60, metadata=(("x", "x" * 1_000_000),))
        assert (await place.publish(BODY)).accepted == 1
        assert (await place.post(json_batch([event(2)]))).status == 200

    on_a_gateway(tmp_path, act)


def test_requests_piled_up_on_one_connection(tmp_path: Path) -> None:
    """50,000 requests at once on one connection, whose answers nobody reads: others are served meanwhile."""

    async def act(place: Place) -> None:
        host, port = place.addresses.http.split(":")
        with socket.create_connection((host, int(port))) as one:
            one.setblocking(False)
            data = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n" * 50_000
            with contextlib.suppress(BlockingIOError):
                one.send(data)
            assert (await place.post(json_batch([event(1)]))).status == 200

    on_a_gateway(tmp_path, act)


# TLS.


def test_clients_look_whom_they_talk_to(tmp_path: Path) -> None:
    """Over https and grpcs a client tells nothing to a gateway whose certificate is another's, or is made for
    another name; with the right one it does."""
    from headrace.errors import FeedbackUnavailable
    from headrace.producers.client.transport import transport_to

    cert, key = certificate(tmp_path / "server")
    stranger, _ = certificate(tmp_path / "stranger")

    async def act(place: Place) -> None:
        port, http = place.addresses.grpc.rpartition(":")[2], place.addresses.http.rpartition(":")[2]
        for scheme, at in (("https", http), ("grpcs", port)):
            for host, ca_file in (("localhost", None), ("localhost", stranger), ("127.0.0.1", cert)):
                transport = transport_to(f"{scheme}://{host}:{at}", token=TOKEN, ca_file=ca_file)
                with pytest.raises(FeedbackUnavailable):
                    await asyncio.to_thread(transport.send, [event(1)], timeout_s=5)
                transport.close()
            transport = transport_to(f"{scheme}://localhost:{at}", token=TOKEN, ca_file=cert)
            reply = await asyncio.to_thread(transport.send, [event(1)], timeout_s=60)
            assert reply.accepted == 1
            transport.close()
        assert len(await place.records()) == 1

    on_a_gateway(tmp_path, act, tls_cert=str(cert), tls_key=str(key))


def test_redirects_lead_nowhere(tmp_path: Path) -> None:
    """A client follows no answer to another address: its token and its events stay where they were meant."""

    async def run() -> None:
        from headrace.errors import FeedbackUnavailable

        asked: list[bytes] = []

        async def answer(reader: asyncio.StreamReader, writing: asyncio.StreamWriter) -> None:
            asked.append(await reader.readline())
            writing.write(b"HTTP/1.1 307 Elsewhere\r\nLocation: http://127.0.0.1:%d/x\r\n" % port)
            writing.write(b"Content-Length: 0\r\nRetry-After: " + b"9" * 5_000 + b"\r\n\r\n")
            await writing.drain()
            writing.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        transport = HttpTransport("127.0.0.1", port, token=TOKEN, tls=None)
        with pytest.raises(FeedbackUnavailable, match="307"):
            await asyncio.to_thread(transport.send, [event(1)], timeout_s=60)
        transport.close()
        server.close()
        assert asked == [b"POST /v1/events HTTP/1.1\r\n"]

    asyncio.run(run())


# Memory of resends.


def test_what_others_put_on_the_topic_stops_no_gateway(tmp_path: Path) -> None:
    """A gateway that starts knows what the last one wrote, though a record of the topic is none."""

    async def run() -> None:
        async with open_bus("sqlite::memory:") as bus:
            async with gateway(tmp_path, bus=bus) as place:
                await place.publish(request_of([event(i) for i in range(9)]).SerializeToString())
                await bus.produce([Message(FEEDBACK.name, b"s0", b"\xc1 not a record")])
            async with gateway(tmp_path, bus=bus) as place:
                reply = await place.publish(request_of([event(i) for i in range(9)]).SerializeToString())
                assert (reply.accepted, reply.duplicates) == (9, 9)

    asyncio.run(run())
