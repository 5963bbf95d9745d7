"""The gateway's gRPC half: the `Feedback` service, with health and reflection.

Calls get the bytes of a batch, not its message, so that one malformed event doesn't take the others with it.
Not here: who may call (`calls`), what becomes of a batch (`door`).
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any, Final

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from headrace.errors import ConfigError, FeedbackOverloaded, HeadraceError
from headrace.producers.gateway.calls import Calls, Context, authorization
from headrace.producers.gateway.door import Door, Ticket
from headrace.producers.gateway.keys import Key
from headrace.producers.gateway.writer import Lane
from headrace.rpc import feedback_pb2 as pb
from headrace.rpc.feedback import Reply
from headrace.rpc.feedback_messages import SERVICE, parse

WINDOW: Final = 16
"""Batches of one stream under way: what a stream's reader may be ahead of its acknowledgements."""
STREAM_WAIT_S: Final = 5.0
"""So long a stream is held back (by not reading it) before a limit ends it."""
HANDSHAKE_MS: Final = 10_000
GRACE_S: Final = 5.0
"""For the answers to what is durable by then; a stream that goes on sending is ended after it."""


class GrpcHalf:
    """`start` gives the address; `stop` ends what is still under way."""

    def __init__(self, door: Door, credentials: grpc.ServerCredentials | None) -> None:
        config = door.config
        self._door = door
        self._credentials = credentials
        self._health = health.aio.HealthServicer()
        calls = Calls(door)
        self._server = grpc.aio.server(
            interceptors=(calls,),
            maximum_concurrent_rpcs=calls.total_max,
            options=(
                ("grpc.max_receive_message_length", config.message_bytes_max),
                ("grpc.max_metadata_size", 8192),
                ("grpc.so_reuseport", 0),  # two gateways on one port must fail, not share it
                ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
                ("grpc.max_allowed_incoming_connections", config.connections_max),
                ("grpc.max_connection_idle_ms", 300_000),
                ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
                ("grpc.keepalive_time_ms", 30_000),
                ("grpc.keepalive_timeout_ms", 10_000),
            ),
        )
        methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "Publish": grpc.unary_unary_rpc_method_handler(
                self._publish, response_serializer=pb.PublishReply.SerializeToString
            ),
            "PublishStream": grpc.stream_stream_rpc_method_handler(
                self._publish_stream, response_serializer=pb.PublishReply.SerializeToString
            ),
        }
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, methods),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection(
            (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server
        )

    async def start(self, address: str) -> str:
        """Opens the port; the address with its number. Raises ConfigError."""
        try:
            if self._credentials is None:
                port = self._server.add_insecure_port(address)
            else:
                port = self._server.add_secure_port(address, self._credentials)
        except RuntimeError as error:
            raise ConfigError(
                f"gateway.grpc: expected an address to listen on, got {address!r}: {error}"
            ) from error
        await self._server.start()
        return f"{address.rpartition(':')[0]}:{port}"

    async def tell_health(self) -> None:
        """SERVING while the log takes events."""
        status = health_pb2.HealthCheckResponse
        for name in ("", SERVICE):
            await self._health.set(name, status.SERVING if self._door.serving else status.NOT_SERVING)

    async def stop(self) -> None:
        await self._health.enter_graceful_shutdown()
        await self._server.stop(GRACE_S)

    async def _publish(self, body: bytes, context: Context) -> pb.PublishReply:
        key = self._door.sender(authorization(context.invocation_metadata()))
        number, events = parse(body, events_max=self._door.config.batch_events_max)
        ticket = self._door.take(key, Lane(), events, number)
        return _message(ticket, await ticket.reply())

    async def _publish_stream(
        self, bodies: AsyncIterator[bytes], context: Context
    ) -> AsyncIterator[pb.PublishReply]:
        """Reads ahead by at most `WINDOW` batches; answers in order. Raises what ended it (`calls`)."""
        tickets: asyncio.Queue[Ticket | HeadraceError | None] = asyncio.Queue(WINDOW)
        reading = asyncio.create_task(self._read(bodies, context, tickets))
        try:
            while (ticket := await tickets.get()) is not None:
                if isinstance(ticket, HeadraceError):
                    raise ticket
                yield _message(ticket, await ticket.reply())
        finally:
            reading.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await reading

    async def _read(
        self,
        bodies: AsyncIterator[bytes],
        context: Context,
        tickets: "asyncio.Queue[Ticket | HeadraceError | None]",
    ) -> None:
        lane = Lane()
        try:
            key = self._door.sender(authorization(context.invocation_metadata()))
            async for body in bodies:
                await tickets.put(await self._take_patiently(key, lane, body))
        except HeadraceError as error:
            await tickets.put(error)
        else:
            await tickets.put(None)

    async def _take_patiently(self, key: Key, lane: Lane, body: bytes) -> Ticket:
        """A sender over a limit is first slowed down, then refused. Raises FeedbackOverloaded after
        `STREAM_WAIT_S`."""
        number, events = parse(body, events_max=self._door.config.batch_events_max)
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + STREAM_WAIT_S
        while True:
            try:
                return self._door.take(key, lane, events, number)
            except FeedbackOverloaded as refusal:
                if loop.time() + refusal.retry_after_ms / 1000 > deadline_s:
                    raise
                await asyncio.sleep(refusal.retry_after_ms / 1000)


def _message(ticket: Ticket, reply: Reply) -> pb.PublishReply:
    return pb.PublishReply(
        number=ticket.number,
        accepted=reply.accepted,
        duplicates=reply.duplicates,
        refused=[pb.Refusal(index=r.index, event_id=r.event_id, reason=r.reason) for r in reply.refused],
    )
