"""Who may hold a gRPC call: known from its head, before anything of its body is read.

Without this, calls that never send their message, or that only watch the health, would take the slots of all
others, and without a token. Not here: what a call does (`over_grpc`), how much a name may send (`keys`).
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, Final, NoReturn

import grpc
import grpc.aio

from headrace.errors import (
    FeedbackError,
    FeedbackOverloaded,
    FeedbackUnauthenticated,
    FeedbackUnavailable,
    HeadraceError,
)
from headrace.producers.gateway.door import Door
from headrace.rpc.feedback_messages import RETRY_AFTER

OPEN_METHODS: Final = frozenset({"/grpc.health.v1.Health/Check"})
"""Answered without a token: what probes ask."""
NAMELESS_MAX: Final = 16
"""Calls under way without a token."""
RETRY_MS: Final = 1000
_CODES: Final = (
    (FeedbackUnauthenticated, grpc.StatusCode.UNAUTHENTICATED),
    (FeedbackOverloaded, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (FeedbackUnavailable, grpc.StatusCode.UNAVAILABLE),
)

Context = grpc.aio.ServicerContext[Any, Any]


class Calls(grpc.aio.ServerInterceptor):
    """Of `door.config.streams_max` calls one name holds at most half, so that none keeps all others out; a
    message that is the only one of its call comes within `body_ms_max`."""

    def __init__(self, door: Door) -> None:
        self._door = door
        self._body_s = door.config.body_ms_max / 1000
        streams_max = door.config.streams_max
        self._of_one_max = streams_max if door.open else max(1, streams_max // 2)
        self.total_max = streams_max + NAMELESS_MAX
        self._held: dict[str | None, int] = {}

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        name = None
        if handler_call_details.method not in OPEN_METHODS:
            try:
                name = self._door.sender(authorization(handler_call_details.invocation_metadata)).name
            except FeedbackUnauthenticated as error:
                return _refusing(error)
        if handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler(
                self._streaming(handler, name), handler.request_deserializer, handler.response_serializer
            )
        return grpc.stream_unary_rpc_method_handler(
            self._unary(handler, name), handler.request_deserializer, handler.response_serializer
        )

    def _unary(self, handler: Any, name: str | None) -> Any:
        assert not handler.request_streaming, "no method streams to one answer"

        async def call(bodies: AsyncIterator[Any], context: Context) -> Any:
            try:
                with self._slot(name):
                    return await handler.unary_unary(await self._only(bodies), context)
            except HeadraceError as error:
                await abort(context, error)

        return call

    def _streaming(self, handler: Any, name: str | None) -> Any:
        async def call(bodies: AsyncIterator[Any], context: Context) -> None:
            try:
                with self._slot(name):
                    if handler.request_streaming:
                        answers = handler.stream_stream(bodies, context)
                    else:
                        answers = handler.unary_stream(await self._only(bodies), context)
                    await _written(answers, context)
            except HeadraceError as error:
                await abort(context, error)

        return call

    async def _only(self, bodies: AsyncIterator[Any]) -> Any:
        """Raises FeedbackUnavailable when it does not come, FeedbackError when there is none."""
        try:
            async with asyncio.timeout(self._body_s):
                return await anext(aiter(bodies))
        except StopAsyncIteration:
            raise FeedbackError("call: expected a message, got none") from None
        except TimeoutError:
            raise FeedbackUnavailable(f"call: expected its message within {self._body_s:g} s") from None

    @contextlib.contextmanager
    def _slot(self, name: str | None) -> Iterator[None]:
        most = NAMELESS_MAX if name is None else self._of_one_max
        held = self._held.get(name, 0)
        if held >= most:
            raise FeedbackOverloaded(
                f"calls: expected at most {most} under way of one name, got more", retry_after_ms=RETRY_MS
            )
        self._held[name] = held + 1
        try:
            yield
        finally:
            self._held[name] -= 1


def authorization(metadata: Any) -> str | bytes | None:
    """The first header of that name."""
    return next((value for name, value in metadata or () if name == "authorization"), None)


async def abort(context: Context, error: HeadraceError) -> NoReturn:
    """Ends the call with the code of `error`, and when to come again."""
    code = next((code for kind, code in _CODES if isinstance(error, kind)), grpc.StatusCode.INVALID_ARGUMENT)
    trailing: tuple[tuple[str, str], ...] = ()
    if isinstance(error, FeedbackOverloaded | FeedbackUnavailable):
        trailing = ((RETRY_AFTER, str(error.retry_after_ms)),)
    await context.abort(code, str(error), trailing)


def _refusing(error: HeadraceError) -> Any:
    async def call(bodies: AsyncIterator[bytes], context: Context) -> None:
        await abort(context, error)

    return grpc.stream_unary_rpc_method_handler(call)


async def _written(answers: Any, context: Context) -> None:
    """Of a servicer's method, which yields its answers or writes them itself."""
    if not hasattr(answers, "__aiter__"):
        await answers
        return
    async with contextlib.aclosing(answers):
        async for answer in answers:
            await context.write(answer)
