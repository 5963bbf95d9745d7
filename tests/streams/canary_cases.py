"""The canary's process, the same on both logs: what it decides stands on `weights`, and the log is its
state."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from canary_log import day, published, said

from headrace.bus import open_bus
from headrace.bus.protocol import Bus, Message
from headrace.config import RunConfig
from headrace.errors import Fenced
from headrace.streams import canary
from headrace.streams.release import CanaryConfig
from headrace.wire.codec import decode, encode
from headrace.wire.records import Exposure, Record, WeightsPublished
from headrace.wire.release import ReleaseConfig
from headrace.wire.topics import DEAD_LETTERS, EXPOSURES, TOPICS, WEIGHTS

CONFIG = CanaryConfig(stages=(0.1, 0.5), exposures_min=60)
GRADUAL = ReleaseConfig(mode="gradual")


class CanaryCases:
    """Subclasses give `address` and a `run_name` of their own."""

    @pytest.fixture
    def address(self) -> str:
        raise NotImplementedError

    @pytest.fixture
    def run_name(self) -> str:
        return "test"

    def test_a_release_and_a_rollback_across_restarts(self, address: str, run_name: str) -> None:
        """Version 1 gets half of its first stage's exposures, the canary is stopped and started; with the
        other half it is promoted, so nothing was forgotten and nothing counted twice; version 2 is broken and
        taken back, told by a third canary that starts after everything was written. Bytes that are no
        exposure end up as a dead letter."""

        async def scenario() -> None:
            async with opened(address) as bus:
                send = Sender(bus, run_name)
                await send(published(0))
                async with running(bus, run_name):
                    await self.until_said(bus, run_name, 1)
                    await send(published(1))
                    await self.until_said(bus, run_name, 2)
                    await send(*day(30, stable=0, canary=1))
                    await bus.produce([Message(EXPOSURES.name, f"bad-{run_name}".encode(), b"\\xc1", ())])
                    await until_read(bus, run_name)
                assert (await self.said(bus, run_name))[2:] == []
                async with running(bus, run_name):
                    await send(*day(30, stable=0, canary=1, seed=1))
                    await self.until_said(bus, run_name, 3)
                    await send(*day(60, stable=0, canary=1, seed=2), published(2))
                    await self.until_said(bus, run_name, 5)
                await send(*day(60, stable=1, canary=2, broken=True, seed=3))
                async with running(bus, run_name):
                    found = await self.until_said(bus, run_name, 6)
                assert found == [
                    ("promoted", 0, 1.0),
                    ("promoted", 1, 0.1),
                    ("promoted", 1, 0.5),
                    ("promoted", 1, 1.0),
                    ("promoted", 2, 0.1),
                    ("revoked", 2, 0.0),
                ]
                key = f"bad-{run_name}".encode()
                letters = await everything(bus, DEAD_LETTERS.name)
                assert [letter.by for letter in letters if letter.key == key] == ["canary"]

        asyncio.run(scenario())

    def test_a_second_canary_fences_the_first(self, address: str, run_name: str) -> None:
        """The first ends as fenced at its next decision; every decision stands once."""

        async def scenario() -> None:
            async with opened(address) as bus, opened(address) as other:
                send = Sender(bus, run_name)
                run = RunConfig(name=run_name)
                first = asyncio.create_task(canary.run(bus, run, GRADUAL, CONFIG, asyncio.Event()))
                await send(published(0))
                await self.until_said(bus, run_name, 1)
                async with running(other, run_name):
                    await send(published(1))
                    await self.until_said(bus, run_name, 2)
                    await send(*day(60, stable=0, canary=1))
                    with pytest.raises(Fenced):
                        await asyncio.wait_for(first, 60)
                    await self.until_said(bus, run_name, 3)
                assert await self.said(bus, run_name) == [
                    ("promoted", 0, 1.0),
                    ("promoted", 1, 0.1),
                    ("promoted", 1, 0.5),
                ]

        asyncio.run(scenario())

    def test_a_stuck_release_raises_an_alarm(
        self, address: str, run_name: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Eight users in all, a tenth of whom should try version 1: said once in the log, with the users that
        would be enough, and kept for who asks."""

        async def scenario() -> None:
            async with opened(address) as bus:
                send = Sender(bus, run_name)
                await send(published(0))
                async with running(bus, run_name):
                    await self.until_said(bus, run_name, 1)
                    await send(published(1))
                    await self.until_said(bus, run_name, 2)
                    for number, item in enumerate(day(120, stable=0, canary=1)):
                        await send(msgspec.structs.replace(item, user=f"u{number % 8}"))
                    await until_read(bus, run_name)
                found = await canary.found_stuck(bus, run_name, CONFIG)
                assert found is not None and (found.version, found.users_min) == (1, 400)

        with caplog.at_level("WARNING"):
            asyncio.run(scenario())
        [alarm] = [record.message for record in caplog.records if "release_stuck" in record.message]
        assert "version 1 is stuck at 10 % of users" in alarm and "400 users are enough" in alarm

    async def said(self, bus: Bus, run_name: str) -> list[tuple[str, int, float]]:
        records = [r for r in await everything(bus, WEIGHTS.name) if r.run == run_name]
        return said([r for r in records if not isinstance(r, WeightsPublished)])

    async def until_said(self, bus: Bus, run_name: str, count: int) -> list[tuple[str, int, float]]:
        """All decisions, as soon as there are `count`."""
        async with asyncio.timeout(60):
            while len(found := await self.said(bus, run_name)) < count:  # noqa: ASYNC110 - another task writes
                await asyncio.sleep(0.02)
        return found


class Sender:
    """Sends records to where they belong, as of `run_name`; exposures in order, in one partition."""

    def __init__(self, bus: Bus, run_name: str) -> None:
        self._bus = bus
        self._run_name = run_name

    async def __call__(self, *records: Record) -> None:
        messages = []
        for record in records:
            record = msgspec.structs.replace(record, run=self._run_name)
            value, headers = encode(record, source="test", now_ms=0)
            topic = EXPOSURES.name if isinstance(record, Exposure) else WEIGHTS.name
            messages.append(Message(topic, b"k", value, headers, 0))
        await self._bus.produce(messages)


@asynccontextmanager
async def opened(address: str) -> AsyncIterator[Bus]:
    async with open_bus(address) as bus:
        await bus.create_topics(list(TOPICS.values()))
        yield bus


@asynccontextmanager
async def running(bus: Bus, run_name: str) -> AsyncIterator[None]:
    stop = asyncio.Event()
    task = asyncio.create_task(canary.run(bus, RunConfig(name=run_name), GRADUAL, CONFIG, stop))
    try:
        yield
    finally:
        stop.set()
        await asyncio.wait_for(task, 60)


async def until_read(bus: Bus, run_name: str) -> None:
    """Until the canary has committed a position at the end of the exposures: it commits what it only counted
    when it stops, or at once with a dead letter."""
    async with asyncio.timeout(60):
        while True:
            ends = await bus.ends([EXPOSURES.name])
            committed = await bus.committed(canary.group_of(run_name), [EXPOSURES.name])
            if committed and all(committed.get(tp, 0) >= end for tp, end in ends.items()):
                return
            await asyncio.sleep(0.02)


async def everything(bus: Bus, topic: str) -> list[Any]:
    begins, ends = await bus.begins([topic]), await bus.ends([topic])
    return [
        decode(d.topic, d.value or b"", d.headers)
        for tp, end in ends.items()
        async for d in bus.read_range(tp, begins[tp], end)
    ]
