"""The trainer's input: how live units come beside the groups that set a step's pace."""

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from training_place import Place, messages

from headrace.bus.protocol import Bus, Message, TopicPartition
from headrace.consumers.batches import Batch, Batches
from headrace.store.blobs import Blobs
from headrace.wire.records import Experience
from headrace.wire.topics import EXPERIENCE, EXPERIENCE_LIVE

LONG_MS = 60_000
GROUPS = ["test-g0", "test-g1"]


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def live(units: Sequence[Experience]) -> list[Message]:
    marked = messages([msgspec.structs.replace(unit, source="live") for unit in units], partition=0)
    return [Message(EXPERIENCE_LIVE.name, m.key, m.value, m.headers, m.partition) for m in marked]


async def batch_of(place: Place, bus: Bus, wait_ms: int, late: list[Message]) -> Batch | None:
    """A batch of two groups and of up to three live units; `late` are written while it waits."""
    run = msgspec.structs.replace(place.run, live_per_step=3, live_wait_ms=wait_ms)
    groups, units = (
        bus.reader({TopicPartition(topic, 0): 0}) for topic in (EXPERIENCE.name, EXPERIENCE_LIVE.name)
    )
    async with groups as of_groups, units as of_units:
        readers = {EXPERIENCE.name: of_groups, EXPERIENCE_LIVE.name: of_units}
        batches = Batches(readers, Blobs.open(place.store), run, alarm_ms=LONG_MS, positions={})
        taking = asyncio.create_task(batches.next(set(), 0, asyncio.Event()))
        for message in late:
            await asyncio.sleep(0.2)
            assert not taking.done()
            await bus.produce([message])
        return await asyncio.wait_for(taking, 30)


def taken(batch: Batch | None) -> list[str]:
    assert batch is not None
    return [entry.consumed.group_id for entry in batch.entries]


def test_missing_live_units_are_waited_for(place: Place) -> None:
    """Two groups and one of three live units are there: the batch ends with the third, long before its time
    is over, and not before."""

    async def scenario() -> None:
        async with place.opened() as bus:
            everything = place.groups(6)
            units = live(everything[2:])
            await bus.produce([*messages(everything[:2], partition=0), units[0]])
            began_s = time.monotonic()
            batch = await batch_of(place, bus, LONG_MS, units[1:3])
            assert time.monotonic() - began_s < LONG_MS / 1000
            assert taken(batch) == [*GROUPS, "test-g2", "test-g3", "test-g4"]

    asyncio.run(scenario())


def test_live_units_are_not_waited_for_longer_than_said(place: Place) -> None:
    """One of three comes, and no more: after its time the batch goes without the others, having waited."""

    async def scenario() -> None:
        async with place.opened() as bus:
            everything = place.groups(3)
            await bus.produce(messages(everything[:2], partition=0))
            batch = await batch_of(place, bus, 1_500, live(everything[2:]))
            assert taken(batch) == [*GROUPS, "test-g2"]
            assert batch is not None and batch.wait_s >= 1.4
            at_once = await batch_of(place, bus, 0, [])
            assert taken(at_once) == [*GROUPS, "test-g2"]

    asyncio.run(scenario())


def test_a_stop_ends_the_wait_for_live_units(place: Place) -> None:
    """The groups are there, no live unit is: told to stop, the batch goes without them."""

    async def scenario() -> None:
        async with place.opened() as bus:
            await bus.produce(messages(place.groups(2), partition=0))
            run = msgspec.structs.replace(place.run, live_per_step=3, live_wait_ms=10 * LONG_MS)
            stop = asyncio.Event()
            async with (
                bus.reader({TopicPartition(EXPERIENCE.name, 0): 0}) as groups,
                bus.reader({TopicPartition(EXPERIENCE_LIVE.name, 0): 0}) as units,
            ):
                readers = {EXPERIENCE.name: groups, EXPERIENCE_LIVE.name: units}
                batches = Batches(readers, Blobs.open(place.store), run, alarm_ms=LONG_MS, positions={})
                taking = asyncio.create_task(batches.next(set(), 0, stop))
                await asyncio.sleep(0.3)
                stop.set()
                assert taken(await asyncio.wait_for(taking, 30)) == GROUPS

    asyncio.run(scenario())
