"""One batch to a gateway and its answer, over HTTP or gRPC; blocking, for the client's own thread.

HTTP needs nothing but the standard library and passes every proxy: the choice for an editor. gRPC is for
collectors that publish for many. Not here: trying again (`client`).
"""

import http.client
import socket
import ssl
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Protocol
from urllib.parse import urlsplit

import msgspec

from headrace.errors import (
    ConfigError,
    FeedbackError,
    FeedbackOverloaded,
    FeedbackUnauthenticated,
    FeedbackUnavailable,
)
from headrace.rpc.feedback import Event, Refusal, Reply

RETRY_MS: Final = 1000
ANSWER_BYTES_MAX: Final = 1 << 20
_replies = msgspec.json.Decoder(Reply)


class Transport(Protocol):
    def send(self, events: Sequence[Event], *, timeout_s: float) -> Reply:
        """The gateway's answer. Raises FeedbackUnavailable or FeedbackOverloaded (nothing of the batch is
        acknowledged, send it again), FeedbackUnauthenticated, FeedbackError (it is no batch)."""
        ...

    def interrupt(self) -> None:
        """What is under way fails soon, and so does what comes after. From any thread."""
        ...

    def close(self) -> None:
        """From the thread that sends."""
        ...


def transport_to(address: str, *, token: str, ca_file: Path | None) -> Transport:
    """By the scheme of `address`: http, https, grpc or grpcs `://HOST:PORT`. Raises ConfigError, which never
    shows the token."""
    if not (token.isascii() and token.isprintable() and " " not in token):
        raise ConfigError("token: expected printable ASCII without spaces, got something else")
    parts = urlsplit(address)
    with suppress(ValueError):
        if parts.hostname and parts.port:
            secure = parts.scheme in ("https", "grpcs")
            if parts.scheme in ("http", "https"):
                return HttpTransport(
                    parts.hostname, parts.port, token=token, tls=_context(ca_file) if secure else None
                )
            if parts.scheme in ("grpc", "grpcs"):
                return GrpcTransport(
                    f"{parts.hostname}:{parts.port}", token=token, secure=secure, ca_file=ca_file
                )
    raise ConfigError(f"gateway: expected http://, https://, grpc:// or grpcs://HOST:PORT, got {address!r}")


def _context(ca_file: Path | None) -> ssl.SSLContext:
    """Raises ConfigError for a file that holds no certificates."""
    try:
        return ssl.create_default_context(cafile=None if ca_file is None else str(ca_file))
    except OSError as error:
        raise ConfigError(f"{ca_file}: expected certificates, cannot be read: {error}") from error


def _whole(told: str, otherwise: int) -> int:
    """A number of at most nine digits."""
    return int(told) if told.isdecimal() and len(told) <= 9 else otherwise


class HttpTransport:
    """`POST /v1/events` over one kept connection."""

    def __init__(self, host: str, port: int, *, token: str, tls: ssl.SSLContext | None) -> None:
        self._place = f"{host}:{port}"
        self._connection = (
            http.client.HTTPConnection(host, port)
            if tls is None
            else http.client.HTTPSConnection(host, port, context=tls)
        )
        self._interrupted = False
        self._headers = {"Content-Type": "application/json"}
        if token:
            self._headers["Authorization"] = f"Bearer {token}"

    def send(self, events: Sequence[Event], *, timeout_s: float) -> Reply:
        body = msgspec.json.encode({"events": events})
        was_open = self._connection.sock is not None
        try:
            try:
                return self._exchange(body, timeout_s)
            except ConnectionError:
                # A gateway closes a connection that was quiet for a while: that says nothing of the next one.
                if not was_open or self._interrupted:
                    raise
                self._connection.close()
                return self._exchange(body, timeout_s)
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()
            raise FeedbackUnavailable(f"{self._place}: {error or type(error).__name__}") from error

    def interrupt(self) -> None:
        self._interrupted = True
        if (sock := self._connection.sock) is not None:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)  # closing it is for the thread that reads

    def close(self) -> None:
        self._connection.close()

    def _exchange(self, body: bytes, timeout_s: float) -> Reply:
        if self._interrupted:
            raise FeedbackUnavailable(f"{self._place}: this client is closing")
        connection = self._connection
        connection.timeout = timeout_s
        if connection.sock is not None:
            connection.sock.settimeout(timeout_s)
        connection.request("POST", "/v1/events", body, self._headers)
        answer = connection.getresponse()
        content = answer.read(ANSWER_BYTES_MAX)
        return self._reply(answer.status, answer.headers.get("Retry-After", ""), content)

    def _reply(self, status: int, retry_after: str, content: bytes) -> Reply:
        if status in (200, 422):
            try:
                return _replies.decode(content)
            except msgspec.DecodeError as error:
                raise FeedbackUnavailable(f"{self._place}: not a gateway's answer: {error}") from error
        place = f"{self._place}: {status} {content[:300].decode(errors='replace')}"
        wait_ms = 1000 * _whole(retry_after, RETRY_MS // 1000)
        if status in (401, 403):
            raise FeedbackUnauthenticated(place)
        if status == 429:
            raise FeedbackOverloaded(place, retry_after_ms=wait_ms)
        if status in (400, 413) and content.startswith(b'{"error":'):
            raise FeedbackError(place)
        # Whatever else comes is not from a gateway: a proxy, a portal. It passes.
        raise FeedbackUnavailable(place, retry_after_ms=wait_ms)


class GrpcTransport:
    """`Publish` over one channel. Imports grpc when it is made."""

    def __init__(self, address: str, *, token: str, secure: bool, ca_file: Path | None) -> None:
        import grpc

        from headrace.rpc import feedback_messages
        from headrace.rpc.feedback_pb2_grpc import FeedbackStub

        self._grpc, self._messages = grpc, feedback_messages
        self._place = address
        if secure:
            _context(ca_file)  # grpc would only fail later, and not say why
            authority = None if ca_file is None else ca_file.read_bytes()
            self._channel = grpc.secure_channel(address, grpc.ssl_channel_credentials(authority))
        else:
            self._channel = grpc.insecure_channel(address)
        self._stub = FeedbackStub(self._channel)  # type: ignore[no-untyped-call]
        self._metadata = (("authorization", f"Bearer {token}"),) if token else ()

    def send(self, events: Sequence[Event], *, timeout_s: float) -> Reply:
        message = self._messages.request_of(events)
        try:
            reply = self._stub.Publish(message, timeout=timeout_s, metadata=self._metadata)
        except self._grpc.RpcError as error:
            raise self._named(error) from error
        except ValueError as error:  # the channel is closed
            raise FeedbackUnavailable(f"{self._place}: {error}") from error
        return Reply(
            accepted=reply.accepted,
            duplicates=reply.duplicates,
            refused=tuple(
                Refusal(index=item.index, event_id=item.event_id, reason=item.reason)
                for item in reply.refused
            ),
        )

    def interrupt(self) -> None:
        self._channel.close()

    def close(self) -> None:
        self._channel.close()

    def _named(self, error: Any) -> FeedbackError:
        codes = self._grpc.StatusCode
        code, place = error.code(), f"{self._place}: {error.details()}"
        trailing = dict(error.trailing_metadata() or ())
        told = trailing.get(self._messages.RETRY_AFTER, "")
        wait_ms = _whole(told, RETRY_MS)
        if code in (codes.UNAUTHENTICATED, codes.PERMISSION_DENIED):
            return FeedbackUnauthenticated(place)
        if code == codes.RESOURCE_EXHAUSTED and not told and "larger than max" in str(error.details()):
            return FeedbackError(place)
        if code == codes.RESOURCE_EXHAUSTED:
            return FeedbackOverloaded(place, retry_after_ms=wait_ms)
        if code == codes.INVALID_ARGUMENT:
            return FeedbackError(place)
        # UNIMPLEMENTED is also what a proxy's 404 becomes: not from a gateway, and it passes.
        return FeedbackUnavailable(place, retry_after_ms=wait_ms)
