"""A cancellation reaches through the ends of Kafka clients, whatever aiokafka does with it; with doubles."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from types import SimpleNamespace

import pytest

from headrace.bus.kafka import sending
from headrace.bus.kafka.reading import stop


class Client:
    closed = False

    async def close(self) -> None:
        self.closed = True


class SlowProducer:
    """Its sending task ends some time after it is told to, as with a broker that does not answer."""

    def __init__(self) -> None:
        self.client = Client()
        self._txn_manager = None
        self.told = asyncio.Event()
        self._sender = SimpleNamespace(sender_task=asyncio.ensure_future(self._send()))

    async def _send(self) -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            self.told.set()
            await asyncio.sleep(0.05)

    async def stop(self) -> None:
        self.told.set()
        await asyncio.sleep(60)


class DeafConsumer:
    """Keeps every cancellation to itself while it stops."""

    def __init__(self) -> None:
        self._client = Client()
        self.told = asyncio.Event()

    async def stop(self) -> None:
        self.told.set()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(60)


class BrokenConsumer(DeafConsumer):
    """Lets out the cancellation of a task of its own."""

    async def stop(self) -> None:
        raise asyncio.CancelledError


async def cancelled(client: SlowProducer | DeafConsumer, end: Callable[..., Awaitable[None]]) -> bool:
    """Whether `end(client)`, cancelled in its middle, ends as cancelled."""
    ending = asyncio.ensure_future(end(client))
    await client.told.wait()
    ending.cancel()
    await asyncio.wait({ending}, timeout=30)
    return ending.cancelled()


@pytest.mark.parametrize("end", [sending.abandon, sending.stop])
def test_a_producer_that_ends_passes_a_cancellation_on(end: Callable[..., Awaitable[None]]) -> None:
    """It is closed, and the task that ended it is cancelled, though its sender was still at work."""

    async def act() -> None:
        producer = SlowProducer()
        await asyncio.sleep(0)
        assert await cancelled(producer, end)
        assert producer.client.closed
        producer._sender.sender_task.cancel()

    asyncio.run(act())


def test_a_consumer_that_stops_passes_a_cancellation_on() -> None:
    """Ours comes out of a stop that keeps it to itself; one of aiokafka's own does not, and the client is
    closed all the same."""

    async def act() -> None:
        assert await cancelled(DeafConsumer(), stop)
        broken = BrokenConsumer()
        await stop(broken)  # nobody cancelled us
        assert broken._client.closed

    asyncio.run(act())
