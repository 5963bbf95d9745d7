"""A trainer that is not of the run which the ledger tells of refuses, names the place, and writes nothing."""

import asyncio
import sqlite3
from pathlib import Path
from typing import Any

import msgspec
import pytest
from training_place import CONFIG, Place, all_of, check_whole, messages
from training_process import seed

from headrace.bus.protocol import Bus, Message
from headrace.clock import ManualClock
from headrace.consumers import training
from headrace.consumers.ledger import read_ledger
from headrace.errors import HeadraceError, OffsetGone, TrainingError
from headrace.store.blobs import Blobs
from headrace.wire.codec import encode
from headrace.wire.topics import TRAIN_STEPS


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


async def trained(place: Place, bus: Bus) -> None:
    """Two steps of two groups, all in partition 0."""
    await bus.produce(messages(place.groups(4), partition=0))
    await place.train(bus, place.until(2))


def forget(place: Place, topic: str) -> None:
    """The topic made anew under its name: empty, from offset 0."""
    with sqlite3.connect(place.bus.removeprefix("sqlite:")) as db:
        for (number,) in db.execute("SELECT id FROM partitions WHERE topic = ?", (topic,)).fetchall():
            db.execute("DELETE FROM records WHERE place >> 40 = ?", (number,))
            db.execute("UPDATE partitions SET begin = 0, next = 0, records = 0 WHERE id = ?", (number,))
    db.close()


async def refused(place: Place, bus: Bus, error: type[HeadraceError], match: str, **changes: Any) -> None:
    """A trainer that starts now ends with `error`, and the ledger is as it was."""
    before = await all_of(bus, TRAIN_STEPS.name), await all_of(bus, "weights")
    run = msgspec.structs.replace(place.until(3), seed=changes.pop("seed", 0))
    with pytest.raises(error, match=match):
        await place.train(bus, run, **changes)
    assert (await all_of(bus, TRAIN_STEPS.name), await all_of(bus, "weights")) == before


def test_another_store(place: Place, tmp_path: Path) -> None:
    """A second run of this name, with a store of its own: that lacks version 0. The first, which waits for
    groups, is not even fenced."""

    async def scenario() -> None:
        async with place.opened() as bus:
            await trained(place, bus)
            first = asyncio.create_task(place.train(bus, place.until(3)))
            other = Blobs.open(f"file://{tmp_path}/other")
            with pytest.raises(TrainingError, match=r"the store that it began with, .*/other"):
                await place.train(bus, place.until(3), blobs=other)
            assert [blob async for blob in other.listing()] == []
            await bus.produce(messages(place.groups(6)[4:]))
            check_whole(await first, place.units(6))

    asyncio.run(scenario())


def test_another_run_seed(place: Place) -> None:
    """Its prompts would be others."""

    async def scenario() -> None:
        async with place.opened() as bus:
            await trained(place, bus)
            await refused(place, bus, TrainingError, "expected run.seed 0, as in the ledger, got 7", seed=7)

    asyncio.run(scenario())


def test_another_model_though_a_checkpoint_is_there(place: Place) -> None:
    """The newest checkpoint would hide that this trainer has another seed."""

    async def scenario() -> None:
        async with place.opened() as bus:
            await trained(place, bus)
            model, weights = seed()
            weights["embed"] = weights["embed"] + 1.0
            with pytest.raises(TrainingError, match="the run began with another model"):
                await training.run(
                    bus,
                    place.until(3),
                    CONFIG,
                    Blobs.open(place.store),
                    asyncio.Event(),
                    seed=(model, weights),
                )

    asyncio.run(scenario())


def test_a_topic_made_anew_that_is_shorter(place: Place) -> None:
    """The ledger has read up to 4, the topic ends at 1: the position is named, nothing is skipped."""

    async def scenario() -> None:
        async with place.opened() as bus:
            await trained(place, bus)
            forget(place, "experience")
            await bus.produce(messages(place.groups(1), partition=0))
            await refused(
                place,
                bus,
                OffsetGone,
                r"experience\[0\]@4: .*step 2 has read up to there; it ends at 1: another",
            )

    asyncio.run(scenario())


def test_a_topic_made_anew_that_is_longer(place: Place) -> None:
    """Another group stands where the newest step read its last."""

    async def scenario() -> None:
        async with place.opened() as bus:
            await trained(place, bus)
            forget(place, "experience")
            await bus.produce(messages(place.groups(9)[3:], partition=0))
            await refused(
                place, bus, TrainingError, r"experience\[0\]@3: expected group 'test-g3', .*found 'test-g6'"
            )

    asyncio.run(scenario())


def test_a_ledger_made_anew(place: Place) -> None:
    """Announcements without their steps; and without both, positions that only a ledger explains."""

    async def scenario() -> None:
        async with place.opened() as bus:
            await trained(place, bus)
            forget(place, "train.steps")
            await refused(place, bus, TrainingError, "expected the ledger to end at step 2, .*it ends at 0")
            forget(place, "weights")
            await refused(place, bus, TrainingError, r"expected its ledger, for trainer-test has read .*@4")

    asyncio.run(scenario())


def test_positions_beyond_the_ledger(place: Place) -> None:
    """Somebody moved the trainer's group: what lies between would never be trained."""

    async def scenario() -> None:
        async with place.opened() as bus:
            await trained(place, bus)
            with sqlite3.connect(place.bus.removeprefix("sqlite:")) as db:
                db.execute("UPDATE positions SET position = position + 9 WHERE group_name = 'trainer-test'")
            db.close()
            await refused(
                place, bus, TrainingError, r"experience\[0\]@4.*as step 2 says, found experience\[0\]@13"
            )

    asyncio.run(scenario())


def test_a_ledger_record_of_an_unknown_version(place: Place) -> None:
    """It may be a step: its place and its version are named."""

    async def scenario() -> None:
        async with place.opened() as bus:
            await trained(place, bus)
            steps = (await read_ledger(bus, "test")).steps
            value, headers = encode(steps[-1], source="t", now_ms=0)
            newer = tuple((k, v.replace(b".v1", b".v2") if k == "ce_type" else v) for k, v in headers)
            await bus.produce([Message(TRAIN_STEPS.name, b"test", value, newer)])
            ends = await bus.ends([TRAIN_STEPS.name, "weights"])
            match = r"train.steps\[0\]@\d+: expected a record of the ledger: .*TrainStep.v1.*got '.*v2'"
            with pytest.raises(TrainingError, match=match):
                await place.train(bus, place.until(3))
            assert await bus.ends([TRAIN_STEPS.name, "weights"]) == ends

    asyncio.run(scenario())


def test_a_clock_that_goes_back_in_mid_step(place: Place) -> None:
    """Each look at it shows an hour less: no step lasts less than nothing."""

    class Backwards(ManualClock):
        def now_ms(self) -> int:
            self.advance(-3_600_000)
            return super().now_ms()

    async def scenario() -> None:
        async with place.opened() as bus:
            await bus.produce(messages(place.groups(4)))
            await training.run(
                bus,
                place.until(2),
                CONFIG,
                Blobs.open(place.store),
                asyncio.Event(),
                seed=seed(),
                clock=Backwards(1_800_000_000_000),
            )
            steps = await place.ledger(bus)
            check_whole(steps, place.units(4))
            assert all(step.ended_ms >= step.started_ms for step in steps)
            assert steps[1].started_ms < steps[0].started_ms

    asyncio.run(scenario())
