"""A client of one inference replica, with deadlines and back-off. One channel, any number of calls at once.

A request has no side effect and its samples are fixed by its own fields, so sending it again is always safe.
It never chooses between replicas: its caller does.
"""

import asyncio
import hashlib
from collections.abc import AsyncGenerator
from contextlib import aclosing
from types import TracebackType
from typing import Final, Self

import grpc
import grpc.aio

from headrace.errors import InferenceError, InferenceUnavailable, Overloaded
from headrace.rpc import inference_pb2 as pb
from headrace.rpc.generation import Completion, Generation, Loaded, Progress, ReplicaStatus
from headrace.rpc.inference_pb2_grpc import InferenceStub
from headrace.rpc.messages import MESSAGE_BYTES_MAX, EventReader, request_message, status_of

BACKOFF_S_MIN: Final = 0.05
BACKOFF_S_MAX: Final = 2.0
CHANNEL_OPTIONS: Final = (
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.enable_retries", 0),  # `generate` retries by itself, and says so
    ("grpc.keepalive_time_ms", 30_000),  # a vanished replica is noticed; servers refuse more often than this
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.initial_reconnect_backoff_ms", 100),  # a restarted replica is used again at once
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
)


class InferenceClient:
    """`async with InferenceClient("127.0.0.1:5000") as client`, or close it by `await client.close()`."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._channel = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        self._stub = InferenceStub(self._channel)  # type: ignore[no-untyped-call]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._channel.close()

    async def generate(self, request: Generation, *, timeout_s: float) -> list[Completion]:
        """One completion a sequence, in the order of the request. Tries again, with back-off, while the
        replica is overloaded or away, until `timeout_s` is over. Raises InferenceError (the request is
        wrong), Overloaded or InferenceUnavailable (the last refusal)."""
        message = request_message(request)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        attempt = 0
        while True:
            try:
                return await self._generate_once(request, message, deadline - loop.time())
            except (Overloaded, InferenceUnavailable):
                delay_s = _backoff_s(request.group_id, attempt)
                if loop.time() + delay_s >= deadline:
                    raise
            await asyncio.sleep(delay_s)
            attempt += 1

    def stream(self, request: Generation, *, timeout_s: float) -> AsyncGenerator[Progress]:
        """Progress as it comes; no second try. Closing it early (`aclosing`) cancels the request and frees
        its slots. Raises as `generate` does."""
        return self._events(request, request_message(request), timeout_s)

    async def load_weights(
        self, *, version: int, path: str, root: str, timeout_s: float, hold: bool = False
    ) -> Loaded:
        """Makes the replica read the staged safetensors file at `path` and serve it as the newest, or only
        `hold` it for `set_release`. Calling twice is safe.
        Raises InferenceUnavailable: the load may be going on, so ask `status` before sending it again."""
        call = self._stub.LoadWeights(
            pb.LoadWeightsRequest(version=version, path=path, root=root, hold=hold), timeout=timeout_s
        )
        try:
            reply = await call
        except grpc.aio.AioRpcError as error:
            raise _error_of(error, f"{self.address}: weights {version}") from error
        return Loaded(
            serving=reply.serving,
            version=reply.version,
            root=reply.root,
            pause_ms=reply.pause_ms,
            detail=reply.detail,
            unfit=reply.unfit,
        )

    async def set_release(
        self, *, run: str, stable: int | None, canary: int | None, share: float, timeout_s: float = 5.0
    ) -> str:
        """Live users get `stable`, and a `share` of them `canary`, both hosted by the replica; None and None
        end the release. Returns why it could not be, or nothing. Calling twice is safe. Raises
        InferenceUnavailable, InferenceError."""
        request = pb.SetReleaseRequest(run=run, stable=stable, canary=canary, share=share)
        try:
            reply = await self._stub.SetRelease(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise _error_of(error, f"{self.address}: release of {stable}") from error
        return "" if reply.set else reply.detail

    async def status(self, *, timeout_s: float = 5.0) -> ReplicaStatus:
        """Raises InferenceUnavailable."""
        try:
            reply = await self._stub.Status(pb.StatusRequest(), timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise _error_of(error, f"{self.address}: status") from error
        return status_of(reply)

    async def _generate_once(
        self, request: Generation, message: pb.GenerateRequest, timeout_s: float
    ) -> list[Completion]:
        done: dict[int, Completion] = {}
        async with aclosing(self._events(request, message, timeout_s)) as events:
            async for progress in events:
                if progress.completion is not None:
                    done[progress.member] = progress.completion
        missing = [item.member for item in request.sequences if item.member not in done]
        if missing:
            raise InferenceUnavailable(
                f"{self.address}: {request.group_id}: expected every member to end, {missing} did not"
            )
        return [done[item.member] for item in request.sequences]

    async def _events(
        self, request: Generation, message: pb.GenerateRequest, timeout_s: float
    ) -> AsyncGenerator[Progress]:
        place = f"{self.address}: {request.group_id}"
        reader = EventReader(place)
        call = self._stub.Generate(message, timeout=timeout_s)
        try:
            async for event in call:
                yield reader.progress(event)
        except grpc.aio.AioRpcError as error:
            raise _error_of(error, place) from error
        finally:
            call.cancel()


def _backoff_s(group_id: str, attempt: int) -> float:
    """Doubles up to the bound; spread over half of it by the group, so that groups do not return as one."""
    digest = hashlib.blake2b(f"{group_id}/{attempt}".encode(), digest_size=4).digest()
    spread = int.from_bytes(digest, "little") / 2**32
    return float(min(BACKOFF_S_MIN * 2 ** min(attempt, 16), BACKOFF_S_MAX) * (0.5 + 0.5 * spread))


def _error_of(error: grpc.aio.AioRpcError, place: str) -> InferenceError:
    code, detail = error.code(), error.details()
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return Overloaded(f"{place}: {detail}")
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return InferenceUnavailable(f"{place}: expected an answer within the deadline, got none")
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
        return InferenceUnavailable(f"{place}: {detail}")
    return InferenceError(f"{place}: {detail} ({code.name})")
