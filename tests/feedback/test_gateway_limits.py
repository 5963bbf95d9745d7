"""A gateway under attack: no token, too much, too large, too slow, too many. It says so and serves on."""

import asyncio
import contextlib
import socket
import subprocess
from pathlib import Path

import grpc.aio
import pytest
from gateway_place import HEAD, Place, event, json_batch, method, on_a_gateway, sent

from headrace.errors import ConfigError, FeedbackOverloaded, FeedbackUnauthenticated
from headrace.producers import feedback
from headrace.producers.config import GatewayConfig
from headrace.producers.gateway import keys, over_grpc
from headrace.rpc.feedback import Event
from headrace.rpc.feedback_messages import RETRY_AFTER, request_of

TOKEN = "t" * 20
BODY = request_of([event(1)]).SerializeToString()


@pytest.fixture
def tokens(tmp_path: Path) -> str:
    path = tmp_path / "tokens"
    path.write_text(f"# who may publish\nada {TOKEN}\nteam {'u' * 20}\n")
    return str(path)


async def refused(place: Place, body: bytes, *, token: str = "") -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await place.publish(body, token=token)
    return caught.value


def test_wrong_or_missing_token(tmp_path: Path, tokens: str) -> None:
    """Without a token of this gateway nothing is taken, and no answer shows one; its name is the user."""

    async def act(place: Place) -> None:
        for wrong in ("", "x" * 20, TOKEN[:-1]):
            error = await refused(place, BODY, token=wrong)
            assert error.code() is grpc.StatusCode.UNAUTHENTICATED
            answer = await place.post(json_batch([event(1)]), Authorization=f"Bearer {wrong}")
            assert (answer.status, answer.headers["WWW-Authenticate"]) == (401, "Bearer")
            assert TOKEN[:8] not in f"{error.details()}{answer.body}"
        assert (await place.post(json_batch([event(1)]), Authorization=TOKEN)).status == 401
        assert await place.records() == []
        assert (await place.publish(BODY, token=TOKEN)).accepted == 1
        nameless = json_batch([event(2, user="")])
        for token in (TOKEN, "u" * 20):
            assert (await place.post(nameless, Authorization=f"bearer {token}")).status == 200
        assert len({r.user for r in await place.records() if r.event_id == "e2"}) == 2

    on_a_gateway(tmp_path, act, tokens_file=tokens)


def test_a_stream_needs_a_token(tmp_path: Path, tokens: str) -> None:
    """A stream without a token ends before its first batch is read."""

    async def act(place: Place) -> None:
        async with grpc.aio.insecure_channel(place.addresses.grpc) as channel:
            call = method(channel, "PublishStream")(iter([BODY]))
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.read()
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert await place.records() == []

    on_a_gateway(tmp_path, act, tokens_file=tokens)


@pytest.mark.parametrize(
    "lines",
    [
        "ada short",
        "ada",
        f"ada {TOKEN}\nada {'u' * 20}",
        f"ada {TOKEN}\nbob {TOKEN}",
        f"ada {TOKEN} hers",
        f"ada short own {TOKEN}",
        "",
    ],
)
def test_token_files_that_are_none(tmp_path: Path, lines: str) -> None:
    """A short token, a missing one, a name or a token twice, another word or no line at all: the gateway does
    not start."""
    path = tmp_path / "tokens"
    path.write_text(lines)
    with pytest.raises(ConfigError, match=str(path)):
        keys.load(str(path), events_per_s=1.0)


def test_ten_megabytes(tmp_path: Path) -> None:
    """An event of 10 MB is refused before it is read, over both protocols; the next one is served."""

    async def act(place: Place) -> None:
        huge = event(1, text="x" * 10_000_000)
        error = await refused(place, request_of([huge]).SerializeToString())
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        body = json_batch([huge])
        answer = await sent(place, HEAD + b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
        assert answer.startswith(b"HTTP/1.1 413")
        assert b"expected at most 1000000 bytes" in answer
        assert (await place.publish(BODY)).accepted == 1

    on_a_gateway(tmp_path, act)


def test_batches_have_a_bound(tmp_path: Path) -> None:
    """A batch over the bound is no batch: INVALID_ARGUMENT and 400, not to be sent again."""

    async def act(place: Place) -> None:
        many = [event(i) for i in range(11)]
        error = await refused(place, request_of(many).SerializeToString())
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        answer = await place.post(json_batch(many))
        assert (answer.status, "at most 10 events, got 11" in answer.body["error"]) == (400, True)

    on_a_gateway(tmp_path, act, batch_events_max=10)


def test_rate_of_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At 10 events a second with a burst of 20, another 20 right after the burst are told to come back in two
    seconds; over both protocols."""
    take = keys.Bucket.take
    monkeypatch.setattr(keys.Bucket, "take", lambda bucket, events, now_s: take(bucket, events, 0.0))

    async def act(place: Place) -> None:
        batch = request_of([event(i) for i in range(20)]).SerializeToString()
        assert (await place.publish(batch)).accepted == 20
        error = await refused(place, batch)
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        told = dict(error.trailing_metadata() or ())[RETRY_AFTER]
        assert int(told) == 2001
        answer = await place.post(json_batch([event(i) for i in range(20)]))
        assert (answer.status, answer.headers["Retry-After"]) == (429, "3")

    on_a_gateway(tmp_path, act, rate_events_per_s=10.0)


def test_bucket() -> None:
    """10 a second, burst 20: 20 at once, then 5 more after half a second, and the wait is told to the ms."""
    bucket = keys.Bucket(10.0, 0.0)
    bucket.take(20, 0.0)
    with pytest.raises(FeedbackOverloaded) as caught:
        bucket.take(5, 0.1)
    assert caught.value.retry_after_ms == 401
    bucket.take(5, 0.5)
    bucket.take(100, 10.0)  # larger than the bucket: passes when it is full, and is owed
    with pytest.raises(FeedbackOverloaded) as caught:
        bucket.take(1, 10.0)
    assert caught.value.retry_after_ms == 8101


def test_keys_answer_for_their_own_token() -> None:
    """Each token finds its name; a prefix or another scheme finds none."""
    known = keys.Keys({"ada": TOKEN, "bob": "b" * 20}, events_per_s=1.0)
    assert known.of(f"Bearer {'b' * 20}").name == "bob"
    for wrong in (f"Basic {TOKEN}", TOKEN, f"Bearer {TOKEN}x", "Bearer ", "Bearer \udcff"):
        with pytest.raises(FeedbackUnauthenticated):
            known.of(wrong)


def test_slow_heads_and_bodies(tmp_path: Path) -> None:
    """200 slowloris clients, each a byte of a head or a body: closed in time, while others are served."""

    async def act(place: Place) -> None:
        host, port = place.addresses.http.split(":")
        head = b"POST /v1/events HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        head += b"Content-Length: 50\r\n\r\n{"
        slow = [await asyncio.open_connection(host, int(port)) for _ in range(200)]
        for number, (_, writer) in enumerate(slow):
            writer.write(head if number % 2 else head[:20])
        assert (await place.post(json_batch([event(1)]))).status == 200
        answers = await asyncio.wait_for(asyncio.gather(*(reader.read() for reader, _ in slow)), 60)
        assert {answer.partition(b"\r\n")[0] for answer in answers} == {b"", b"HTTP/1.1 408 Request Timeout"}
        assert (await place.post(json_batch([event(2)]))).status == 200
        for _, writer in slow:
            writer.close()

    on_a_gateway(tmp_path, act, head_ms_max=400, body_ms_max=400)


def test_a_thousand_connections(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """1,000 idle connections on each port, of which 100 are let in: the others are closed with a reason, and
    a client that was there before is served throughout."""
    monkeypatch.setattr(over_grpc, "HANDSHAKE_MS", 60_000)

    async def act(place: Place) -> None:
        async with grpc.aio.insecure_channel(place.addresses.grpc) as channel:
            publish = method(channel, "Publish")
            await publish(BODY, timeout=60)
            sockets = await asyncio.to_thread(connected, place.addresses.http, 1000)
            sockets += await asyncio.to_thread(connected, place.addresses.grpc, 1000)
            assert (await publish(request_of([event(2)]).SerializeToString(), timeout=60)).accepted == 1
            assert await asyncio.to_thread(said, sockets[1999]) == b""
            told = await asyncio.to_thread(said, sockets[999])
            assert told.startswith(b"HTTP/1.1 503")
            assert b"Retry-After" in told
            for one in sockets:
                one.close()
            answer = None
            while answer is None:  # as soon as the closed ones are noticed
                with contextlib.suppress(OSError):  # closed before it could say why
                    found = await place.post(json_batch([event(3)]))
                    answer = found if found.status == 200 else None
            assert (await publish(request_of([event(4)]).SerializeToString(), timeout=60)).accepted == 1

    # Connecting may take longer than an idle connection is kept, which would free places meanwhile.
    on_a_gateway(tmp_path, act, connections_max=100, head_ms_max=60_000)


def connected(address: str, count: int) -> list[socket.socket]:
    host, port = address.split(":")
    return [socket.create_connection((host, int(port)), timeout=60) for _ in range(count)]


def said(one: socket.socket) -> bytes:
    with contextlib.suppress(ConnectionError):
        return one.recv(1000)
    return b""


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"grpc": "0.0.0.0:0"}, "gateway.grpc: expected tokens"),
        ({"http": "[::]:0", "tokens_file": "given"}, "gateway.http: expected gateway.tls_cert"),
        ({"tls_cert": "missing.pem", "tls_key": "missing.pem"}, "gateway.tls_cert.*cannot be read"),
        ({"tls_cert": "missing.pem"}, "gateway.tls_cert, tls_key: expected both or neither"),
        ({"tls_key": "missing.pem"}, "gateway.tls_cert, tls_key: expected both or neither"),
        ({"tls_client_ca": "missing.pem"}, "expected both or neither, and both for tls_client_ca"),
        ({"http": "localhost"}, "gateway.http: expected an address HOST:PORT, got 'localhost'"),
        ({"grpc": "127.0.0.1:notaport"}, "gateway.grpc: expected an address"),
        ({"http": "127.0.0.1:notaport"}, "gateway.http: expected an address"),
    ],
)
def test_settings_that_would_be_unsafe(
    tmp_path: Path, tokens: str, settings: dict[str, str], expected: str
) -> None:
    """Other machines need tokens and TLS; wrong files and addresses are named."""
    given = {name: tokens if value == "given" else value for name, value in settings.items()}

    async def act(place: Place) -> None:
        raise AssertionError("it started")

    with pytest.raises(ConfigError, match=expected):
        on_a_gateway(tmp_path, act, **given)


def test_reach() -> None:
    """Behind a proxy that ends TLS plain text is allowed, with tokens; loopback by any name needs neither."""
    feedback.check_reach(
        GatewayConfig(grpc="0.0.0.0:1", http="10.0.0.1:1", plaintext=True), open_to_all=False
    )
    feedback.check_reach(GatewayConfig(grpc="localhost:1", http="[::1]:1"), open_to_all=True)


def test_tls(tmp_path: Path) -> None:
    """With a certificate both protocols are TLS; a client without one of the authority is turned away."""
    import ssl
    import urllib.request

    cert, key = certificate(tmp_path / "server")
    own, own_key = certificate(tmp_path / "client")

    async def act(place: Place) -> None:
        mutual = grpc.ssl_channel_credentials(cert.read_bytes(), own_key.read_bytes(), own.read_bytes())
        one_sided = grpc.ssl_channel_credentials(cert.read_bytes())
        target = place.addresses.grpc.replace("127.0.0.1", "localhost")
        async with grpc.aio.secure_channel(target, mutual) as channel:
            assert (await method(channel, "Publish")(BODY, timeout=60)) is not None
        async with grpc.aio.secure_channel(target, one_sided) as channel:
            with pytest.raises(grpc.aio.AioRpcError):
                await method(channel, "Publish")(BODY, timeout=3)
        url = f"https://{place.addresses.http.replace('127.0.0.1', 'localhost')}/healthz"
        context = ssl.create_default_context(cafile=str(cert))
        with pytest.raises(OSError):  # in TLS or right after it, as the version of TLS has it
            await asyncio.to_thread(urllib.request.urlopen, url, context=context)
        context.load_cert_chain(own, own_key)
        answer = await asyncio.to_thread(urllib.request.urlopen, url, context=context)
        with answer:
            assert answer.status == 200

    on_a_gateway(tmp_path, act, tls_cert=str(cert), tls_key=str(key), tls_client_ca=str(own))


def test_a_handshake_that_does_not_come(tmp_path: Path) -> None:
    """A connection that never begins TLS is closed like one that sends no head."""
    cert, key = certificate(tmp_path / "server")

    async def act(place: Place) -> None:
        host, port = place.addresses.http.split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        with contextlib.suppress(ConnectionError):
            assert await asyncio.wait_for(reader.read(), 60) == b""
        writer.close()

    on_a_gateway(tmp_path, act, tls_cert=str(cert), tls_key=str(key), head_ms_max=300)


def certificate(stem: Path) -> tuple[Path, Path]:
    """A self-signed certificate for localhost and its key. Skips without the `openssl` program."""
    cert, key = stem.with_suffix(".pem"), stem.with_suffix(".key")
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
    ]
    command += ["-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    try:
        subprocess.run([*command, "-keyout", key, "-out", cert], check=True, capture_output=True, timeout=30)
    except FileNotFoundError:
        pytest.skip("no openssl")
    return cert, key


def test_a_full_queue_says_come_back(tmp_path: Path) -> None:
    """With 5 events waiting for a slow log the sixth is told to come back; the five become durable."""
    from headrace.bus import open_bus
    from headrace.clock import SystemClock
    from headrace.producers.gateway.intake import Intake
    from headrace.producers.gateway.writer import Lane, Writer
    from headrace.wire.pseudonyms import Pseudonyms
    from headrace.wire.topics import FEEDBACK

    intake = Intake(
        run="r", region="local", pseudonyms=Pseudonyms("r1", b"s" * 32), text_keys=None, clock=SystemClock()
    )

    async def run() -> None:
        async with open_bus("sqlite::memory:") as bus:
            await bus.create_topics([FEEDBACK])
            writer = Writer(bus, GatewayConfig(pending_events_max=5), SystemClock())
            events: list[Event | str] = [event(i) for i in range(5)]
            names, messages, _ = intake.take(events, sender="x")
            done = writer.submit(Lane(), names, messages)
            with pytest.raises(FeedbackOverloaded, match="at most 5 events and"):
                writer.submit(Lane(), names[:1], messages[:1])
            writing = asyncio.create_task(writer.run())
            assert await done == 0
            writer.room_for(5)
            writer.drain()
            await writing

    asyncio.run(run())
