"""Which records the ledger may still need, and who says so before they leave the log."""

import asyncio
import json
import re
import sqlite3
from pathlib import Path

import msgspec
import pytest
from training_place import CONFIG, Place, messages

from headrace.bus.protocol import Bus, TopicPartition
from headrace.bus.sqlite import SqliteBus
from headrace.cli import main
from headrace.clock import ManualClock
from headrace.consumers.retention import needed, outlook
from headrace.errors import StoreError
from headrace.store.blobs import Blobs
from headrace.wire.records import TrainStep
from headrace.wire.topics import DAY_MS, TOPICS

ZERO = TopicPartition("experience", 0)
NINETY = 90 * DAY_MS


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


async def trained(place: Place, bus: Bus) -> list[TrainStep]:
    """Four steps of two groups, all in partition 0; checkpoints of steps 2 and 4."""
    await bus.produce(messages(place.groups(8), partition=0))
    config = msgspec.structs.replace(CONFIG, checkpoint_every=2)
    await place.train(bus, place.until(2), config)
    return await place.train(bus, place.until(4), config)


def cut(place: Place, before: int) -> None:
    """What retention does."""
    with sqlite3.connect(place.bus.removeprefix("sqlite:")) as db:
        [(number,)] = db.execute("SELECT id FROM partitions WHERE topic = 'experience' AND partition = 0")
        db.execute(
            "DELETE FROM records WHERE place >= ? AND place < ?", (number << 40, number << 40 | before)
        )
        db.execute("UPDATE partitions SET begin = ? WHERE id = ?", (before, number))
    db.close()


def test_what_is_needed(place: Place) -> None:
    """From the start all, after step 2 what step 3 read first, from the end what none has read."""

    async def scenario() -> None:
        async with place.opened() as bus:
            steps = await trained(place, bus)
            assert [needed(steps, since)[ZERO] for since in (0, 2, 3, 4)] == [0, 4, 6, 8]
            assert needed([], 0) == {}

    asyncio.run(scenario())


def test_warned_before_and_told_after(place: Place) -> None:
    """Ninety days: kept at first, soon with less than nine left; then offsets 4 and 5 are gone, which step 3
    needs. A clock that was set back lengthens nothing below zero."""

    async def scenario() -> None:
        clock = ManualClock(1_800_000_000_000)
        async with SqliteBus(place.bus.removeprefix("sqlite:"), clock=clock) as bus:
            await bus.create_topics(list(TOPICS.values()))
            steps = await trained(place, bus)
            now_ms = clock.now_ms()
            found = await outlook(bus, steps, now_ms=now_ms)
            assert (found.state, found.since, found.left_ms, found.retention_ms) == (
                "kept",
                2,
                NINETY,
                NINETY,
            )
            late = await outlook(bus, steps, now_ms=now_ms + 82 * DAY_MS)
            assert (late.state, late.left_ms) == ("soon", 8 * DAY_MS)
            assert (await outlook(bus, steps, now_ms=now_ms + 99 * DAY_MS)).left_ms == 0
            assert (await outlook(bus, steps, now_ms=now_ms - DAY_MS)).state == "kept"
            cut(place, 4)
            found = await outlook(bus, steps, now_ms=now_ms)
            assert (found.state, found.gone_since_start) == ("kept", True)
            cut(place, 6)
            found = await outlook(bus, steps, now_ms=now_ms)
            assert (found.state, found.gone_text()) == ("gone", "experience[0]@4..5")

    asyncio.run(scenario())


def test_status_and_recovery_name_the_offsets(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    """`headrace status` warns; a recovery that needs what is gone says which offsets those were."""

    async def prepare() -> None:
        async with place.opened() as bus:
            await trained(place, bus)

    async def recover() -> None:
        async with place.opened() as bus:
            blobs = Blobs.open(place.store)
            newest = (await place.ledger(bus))[-1].checkpoint
            assert newest is not None
            await blobs.delete(newest.uri)
            with pytest.raises(
                StoreError, match=r"experience\[0\]@4..5: expected 2 records of step 3, 2 of them have left"
            ):
                await place.train(bus, place.until(5))

    asyncio.run(prepare())
    at = ["status", "--bus", place.bus, "--run.name", "test"]
    assert main(at) == 0
    said = capsys.readouterr().out
    assert re.search(r"records needed +of the steps after 2 are kept for another (90 d 0|89 d 23) h", said)
    cut(place, 6)
    assert main(at) == 0
    assert "WARNING: of the steps after 2 are gone: experience[0]@4..5" in capsys.readouterr().out
    assert main([*at, "--json"]) == 0
    records = json.loads(capsys.readouterr().out)["records"]
    assert (records["state"], records["log_begins"]) == ("gone", {"experience[0]": 6})
    asyncio.run(recover())
