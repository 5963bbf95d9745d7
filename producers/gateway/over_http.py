"""The gateway's HTTP half, for editors that cannot speak gRPC: `POST /v1/events`, `/healthz`,
`/openapi.json`.

A body is ours (`{"events": [...]}`) or Tabby's (`{"type": "view", ...}`). Every limit has an answer: 401 no
token, 403 a page that only says it is of this machine, 408 a slow body, 413 a large one, 415 no JSON, 422
nothing in it is good, 429 and 503 with `Retry-After`. A head
that does not come in time, or a connection too many, is closed. Not here: what becomes of a batch (`door`).
"""

import asyncio
import contextlib
import math
import ssl
import time
from ipaddress import ip_address
from typing import Any, Final

import msgspec
from aiohttp import web

from headrace.errors import (
    ConfigError,
    FeedbackError,
    FeedbackOverloaded,
    FeedbackUnauthenticated,
    FeedbackUnavailable,
    WireError,
)
from headrace.producers.adapters import tabby
from headrace.producers.gateway import openapi
from headrace.producers.gateway.door import Door
from headrace.producers.gateway.writer import Lane
from headrace.rpc.feedback import Event, check_count

STOP_S: Final = 1.0
LINE_BYTES_MAX: Final = 4096
_FULL: Final = (
    b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
)


class _Batch(msgspec.Struct, frozen=True):
    events: list[msgspec.Raw]


_batches = msgspec.json.Decoder(_Batch)
_events = msgspec.json.Decoder(Event)
_NO_JSON: Final = (msgspec.DecodeError, RecursionError)
"""What a decoder raises; the latter for a few thousand brackets in each other."""


class HttpHalf:
    """`start` gives the address; `stop` ends what is still under way."""

    def __init__(self, door: Door, context: ssl.SSLContext | None) -> None:
        self._door = door
        self._context = context
        self._body_s = door.config.body_ms_max / 1000
        self._head_s = door.config.head_ms_max / 1000
        app = web.Application(client_max_size=door.config.message_bytes_max)
        app.router.add_post("/v1/events", self._publish)
        app.router.add_get("/healthz", self._health)
        app.router.add_get("/openapi.json", self._page)
        self._runner = web.AppRunner(
            app,
            access_log=None,
            keepalive_timeout=self._head_s,
            max_line_size=LINE_BYTES_MAX,
            max_field_size=LINE_BYTES_MAX,
            lingering_time=STOP_S,
            shutdown_timeout=STOP_S,
        )
        self._server: asyncio.Server | None = None

    async def start(self, address: str) -> str:
        """Opens the port; the address with its number. Raises ConfigError."""
        host, _, port = address.rpartition(":")
        await self._runner.setup()
        try:
            self._server = await asyncio.get_running_loop().create_server(
                self._connection,
                host.strip("[]"),
                int(port),
                ssl=self._context,
                ssl_handshake_timeout=self._head_s if self._context else None,
            )
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"gateway.http: expected an address to listen on, got {address!r}: {error}"
            ) from error
        return f"{host}:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        await self._runner.cleanup()

    def _connection(self) -> asyncio.Protocol:
        server = self._runner.server
        assert server is not None
        if len(server.connections) >= self._door.config.connections_max:
            return _OneTooMany()
        return server()

    async def _publish(self, request: web.Request) -> web.Response:
        try:
            key = self._door.sender(request.headers.get("Authorization"))
            self._check_origin(request)
            body = await self._body(request)
            now_ms, events_max = time.time_ns() // 1_000_000, self._door.config.batch_events_max
            events = parse(body, now_ms=now_ms, events_max=events_max)
            reply = await self._door.take(key, Lane(), events).reply()
        except (FeedbackError, WireError) as error:
            return _refused(error)
        nothing_good = bool(reply.refused) and not reply.accepted
        return _json(reply, status=422 if nothing_good else 200)

    def _check_origin(self, request: web.Request) -> None:
        """A page in a browser of this machine can post anywhere, but only plain text, unless it is asked for
        leave first, and to a name that its author may lead to this machine: where nobody needs a token,
        neither may speak for the user. Raises _NotJson, _NotHere."""
        if request.content_type != "application/json":
            raise _NotJson(f"Content-Type: expected application/json, got {request.content_type[:60]!a}")
        host = request.headers.get("Host", "localhost")
        if self._door.open and not is_loopback(host):
            raise _NotHere(f"Host: expected a name of this machine, got {host[:60]!a}")

    async def _body(self, request: web.Request) -> bytes:
        """Raises _TooLarge, _TooSlow."""
        limit = self._door.config.message_bytes_max
        if (request.content_length or 0) > limit:
            raise _TooLarge(f"body: expected at most {limit} bytes, got {request.content_length}")
        try:
            async with asyncio.timeout(self._body_s):
                return await request.read()
        except web.HTTPRequestEntityTooLarge as error:
            raise _TooLarge(f"body: expected at most {limit} bytes, got more") from error
        except TimeoutError:
            raise _TooSlow(f"body: expected all of it within {self._body_s:g} s") from None

    async def _health(self, request: web.Request) -> web.Response:
        serving = self._door.serving
        return _json({"status": "serving" if serving else "log away"}, status=200 if serving else 503)

    async def _page(self, request: web.Request) -> web.Response:
        return _json(openapi.page())


class _TooLarge(FeedbackError):
    pass


class _TooSlow(FeedbackError):
    pass


class _NotJson(FeedbackError):
    pass


class _NotHere(FeedbackError):
    pass


class _OneTooMany(asyncio.Protocol):
    """Says so, and goes."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        transport.write(_FULL)
        transport.close()


def is_loopback(address: str) -> bool:
    """Of `HOST` or `HOST:PORT`: it names this machine and no other can reach it there."""
    host = address if address.endswith("]") or ":" not in address else address.rpartition(":")[0]
    with contextlib.suppress(ValueError):
        return ip_address(host.strip("[]")).is_loopback
    return host.lower() == "localhost"


def parse(body: bytes, *, now_ms: int, events_max: int) -> list[Event | str]:
    """The events of a body; in place of a malformed one, what is wrong with it. Raises WireError when the
    whole is neither ours nor Tabby's, FeedbackError when it holds more than `events_max`."""
    try:
        batch = _batches.decode(body)
    except _NO_JSON as error:
        try:
            return list(tabby.events(msgspec.json.decode(body), now_ms=now_ms))
        except (*_NO_JSON, WireError) as tabbys:
            ours = f'{{"events": [...]}} ({error})'
            raise WireError(f"body: expected {ours} or an event of Tabby's ({tabbys})") from None
    check_count(len(batch.events), events_max)
    events: list[Event | str] = []
    for raw in batch.events:
        try:
            events.append(_events.decode(raw))
        except _NO_JSON as error:
            events.append(f"event: {error}")
    return events


def _refused(error: FeedbackError | WireError) -> web.Response:
    statuses: tuple[tuple[type[Exception], int], ...] = (
        (FeedbackUnauthenticated, 401),
        (_TooSlow, 408),
        (_TooLarge, 413),
        (_NotJson, 415),
        (_NotHere, 403),
        (FeedbackOverloaded, 429),
        (FeedbackUnavailable, 503),
    )
    status = next((status for kind, status in statuses if isinstance(error, kind)), 400)
    response = _json({"error": str(error)}, status=status)
    if isinstance(error, FeedbackOverloaded | FeedbackUnavailable):
        response.headers["Retry-After"] = str(math.ceil(error.retry_after_ms / 1000))
    if status in (408, 413):
        response.force_close()  # the rest of the body is not wanted
    if status == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    return response


def _json(value: Any, *, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")
