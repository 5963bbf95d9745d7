"""The trainer's process against faults of its store, its ledger and its input, on the embedded log."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from trainer_records import consumed, pair
from training_place import CONFIG, Place, all_of, check_whole, messages
from training_process import Delegate, seed

from headrace.bus import outage
from headrace.bus.protocol import Message, TopicPartition
from headrace.consumers import training
from headrace.consumers.ledger import read_ledger
from headrace.errors import BusUnavailable, OffsetGone, StoreUnavailable, TrainingError
from headrace.store.blobs import Blobs
from headrace.trainer.step import run_step
from headrace.wire.codec import encode


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_groups_of_other_runs_are_passed_over(place: Place) -> None:
    """One log, two runs: each trains its own."""

    async def scenario() -> None:
        async with place.opened() as bus:
            strange = Place(place.directory, name="other").groups(3)
            await bus.produce(messages([*strange, *place.groups(6)]))
            check_whole(await place.train(bus), place.units(6))

    asyncio.run(scenario())


def test_junk_of_nobody_takes_no_place_in_a_step(place: Place) -> None:
    """Bytes that can't be read, under a key of another run: dead-lettered; the step has its two groups."""

    async def scenario() -> None:
        async with place.opened() as bus:
            [junk, *good] = messages(place.groups(7))
            await bus.produce([Message(junk.topic, b"else-0", b"\xc1", junk.headers), *good])
            steps = await place.train(bus)
            check_whole(steps, place.units(7)[1:])
            assert [d.group_id for step in steps for d in step.drops] == ["else-0"]
            assert len(await all_of(bus, "dead.letters")) == 1

    asyncio.run(scenario())


def test_stale_groups_at_the_head_and_restarts_among_them(place: Place) -> None:
    """With no lag allowed, groups of version 0 fill steps 1 to 3, the last two only with drops; a trainer
    started anew for each step goes on at the right record, and trains the fresh pair behind them."""

    async def scenario() -> None:
        async with place.opened() as bus:
            fresh = [msgspec.structs.replace(pair(f"test-new{i}", version=3), run="test") for i in range(2)]
            await bus.produce(messages([*place.groups(6), *fresh], partition=0))
            for last in range(1, 5):
                run = msgspec.structs.replace(place.run, steps_max=last, lag_versions_max=0)
                steps = await place.train(bus, run)
            assert [len(step.admitted) for step in steps] == [2, 0, 0, 2]
            assert {drop.reason for step in steps for drop in step.drops} == {"stale"}
            check_whole(steps, [*place.units(6), "test-new0", "test-new1"])
            committed = await bus.committed("trainer-test", ["experience"])
            ends = await bus.ends(["experience"])
            assert committed[TopicPartition("experience", 0)] == ends[TopicPartition("experience", 0)] == 8

    asyncio.run(scenario())


def test_the_oldest_groups_first_whatever_their_partition(place: Place) -> None:
    """A backlog in four partitions, written in turns: steps of two take it in the order of its writing, not
    partition by partition."""

    async def scenario() -> None:
        async with place.opened() as bus:
            for number, group in enumerate(place.groups(8)):
                await bus.produce(messages([group], partition=3 - number % 4))
                await asyncio.sleep(0.002)  # the log stamps in milliseconds
            steps = await place.train(bus, place.until(4))
            assert [u.group_id for step in steps for u in step.consumed] == place.units(8)

    asyncio.run(scenario())


@pytest.mark.parametrize("damage", [b"", b"not a checkpoint"])
def test_a_corrupt_checkpoint_is_refused_and_the_one_before_used(
    place: Place, damage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """The newest is damaged: its hash says so, the older one and the records bring the run to its head."""
    caplog.set_level(logging.INFO)

    async def scenario() -> None:
        async with place.opened() as bus:
            await bus.produce(messages(place.groups(8)))
            config = msgspec.structs.replace(CONFIG, checkpoint_every=1)
            steps = await place.train(bus, place.until(2), config)
            steps = await place.train(bus, place.until(3), config)
            newest = steps[-1].checkpoint
            assert newest is not None
            (place.directory / "store" / newest.uri).write_bytes(damage)
            steps = await place.train(bus, place.until(4))
            check_whole(steps, place.units(8))

    asyncio.run(scenario())
    assert "alarm kind=checkpoint_refused step=3" in caplog.text
    assert "checkpoint_read step=2" in caplog.text
    assert "replayed step=3" in caplog.text


def test_a_step_that_is_not_the_same_again_stops_the_trainer(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other arithmetic than then: recovery names the step and what changed."""

    async def scenario() -> None:
        async with place.opened() as bus:
            await bus.produce(messages(place.groups(8)))
            steps = await place.train(bus, config=msgspec.structs.replace(CONFIG, checkpoint_every=99))
            assert steps[-1].checkpoint is not None
            await Blobs.open(place.store).delete(steps[-1].checkpoint.uri)
            real = run_step

            def other(*args: Any, **kwargs: Any) -> Any:
                settings = kwargs.pop("settings")
                trainer = msgspec.structs.replace(settings.trainer, lr=0.5)
                return real(*args, settings=msgspec.structs.replace(settings, trainer=trainer), **kwargs)

            monkeypatch.setattr("headrace.consumers.ranks.run_step", other)
            with pytest.raises(TrainingError, match=r"step 1 computed again: expected root .*same code"):
                await place.train(bus, place.until(4))

    asyncio.run(scenario())


def test_another_seed_is_refused(place: Place) -> None:
    """A run does not go on from a model that it did not begin with."""

    async def scenario() -> None:
        async with place.opened() as bus:
            await bus.produce(messages(place.groups(2)))
            model, weights = seed()
            weights["embed"] = weights["embed"] + 1.0
            one = place.until(0)
            await place.train(bus, one)
            with pytest.raises(TrainingError, match="the run began with another model"):
                await training.run(
                    bus, place.run, CONFIG, Blobs.open(place.store), asyncio.Event(), seed=(model, weights)
                )

    asyncio.run(scenario())


def test_a_log_that_stays_away_ends_the_trainer(place: Place) -> None:
    """After `outage_ms_max`, with the reason of the log."""

    class Gone(Delegate):
        def transactor(self, transactional_id: str) -> Any:
            raise BusUnavailable("broker host:1: expected an answer, got none")

    async def scenario() -> None:
        async with place.opened() as bus:
            config = msgspec.structs.replace(CONFIG, outage_ms_max=0)
            with pytest.raises(BusUnavailable, match="broker host:1"):
                await place.train(Gone(bus), config=config)

    asyncio.run(scenario())


def test_store_that_takes_nothing_ends_the_trainer(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that still answers what it holds is away all the same, as long as no step can be stored."""
    monkeypatch.setattr(outage, "RETRY_S", 0.01)

    class Full(Delegate):
        async def put(self, data: bytes, **_: Any) -> Any:
            raise StoreUnavailable("store: no space left")

    async def scenario() -> None:
        async with place.opened() as bus:
            await bus.produce(messages(place.groups(2)))
            full: Any = Full(Blobs.open(place.store))
            config = msgspec.structs.replace(CONFIG, outage_ms_max=30)
            with pytest.raises(StoreUnavailable, match="no space left"):
                await place.train(bus, place.until(1), config, full)

    asyncio.run(scenario())


def test_experience_that_left_the_log_is_an_error(place: Place) -> None:
    """A position below the oldest record kept: OffsetGone, not silence."""

    class Trimmed(Delegate):
        @asynccontextmanager
        async def reader(self, positions: Any) -> AsyncIterator[Any]:
            class Reader:
                async def read(self, **_: Any) -> Any:
                    raise OffsetGone("experience[0]@0: expected a position from 5 on")

            yield Reader()

    async def scenario() -> None:
        async with place.opened() as bus:
            with pytest.raises(OffsetGone, match="experience"):
                await place.train(Trimmed(bus))

    asyncio.run(scenario())


def test_waiting_for_data_raises_an_alarm_and_ends_on_stop(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    """All producers are dead: an alarm each `alarm_ms`; a stop ends the wait."""
    caplog.set_level(logging.INFO)

    async def scenario() -> None:
        async with place.opened() as bus:
            await bus.produce(messages(place.groups(1)))
            stop = asyncio.Event()
            config = msgspec.structs.replace(CONFIG, alarm_ms=1)
            task = asyncio.create_task(
                training.run(bus, place.run, config, Blobs.open(place.store), stop, seed=seed())
            )
            async with asyncio.timeout(60):
                while caplog.text.count("alarm kind=no_experience") < 2:  # noqa: ASYNC110 - a log has no event
                    await asyncio.sleep(0.01)
                stop.set()
                await task
            assert await place.ledger(bus) == []

    asyncio.run(scenario())
    assert "groups_waiting=1 groups_wanted=2" in caplog.text


def test_a_stop_in_mid_step_abandons_it(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the step stays; the next start does it."""

    async def scenario() -> None:
        async with place.opened() as bus:
            await bus.produce(messages(place.groups(6)))
            stop = asyncio.Event()
            loop = asyncio.get_running_loop()
            real = run_step

            def stopping(*args: Any, **kwargs: Any) -> Any:
                asyncio.run_coroutine_threadsafe(_set(stop), loop).result(60)
                return real(*args, **kwargs)

            monkeypatch.setattr("headrace.consumers.ranks.run_step", stopping)
            async with asyncio.timeout(60):
                await training.run(bus, place.run, CONFIG, Blobs.open(place.store), stop, seed=seed())
            assert await place.ledger(bus) == []
            monkeypatch.setattr("headrace.consumers.ranks.run_step", real)
            check_whole(await place.train(bus), place.units(6))

    asyncio.run(scenario())


async def _set(event: asyncio.Event) -> None:
    event.set()


def test_a_ledger_with_a_hole_is_refused(place: Place) -> None:
    """Step 3 after step 1: going on would train on a guess."""

    async def scenario() -> None:
        async with place.opened() as bus:
            await bus.produce(messages(place.groups(2)))
            [step] = await place.train(bus, place.until(1))
            late = msgspec.structs.replace(step, step=3, consumed=(consumed("x"),))
            value, headers = encode(late, source="t", now_ms=0)
            await bus.produce([Message("train.steps", b"test", value, headers)])
            with pytest.raises(TrainingError, match=r"train.steps\[0\]@\d+: .*expected step 2, got 3"):
                await read_ledger(bus, place.run.name)

    asyncio.run(scenario())


def test_what_lies_under_another_key_is_not_of_the_ledger(place: Place) -> None:
    """Bytes that are no record, of nobody, among steps and announcements: the run is read past them; under
    the run's own key they are refused, for they may have been a step."""

    async def scenario() -> None:
        async with place.opened() as bus:
            await bus.produce([Message(topic, b"junk", b"\xc1") for topic in ("train.steps", "weights")])
            await bus.produce(messages(place.groups(2)))
            await place.train(bus, place.until(1))
            assert len((await read_ledger(bus, place.run.name)).steps) == 1
            await bus.produce([Message("train.steps", place.run.name.encode(), b"\xc1")])
            with pytest.raises(TrainingError, match=r"train.steps\[0\]@\d+: expected a record of the ledger"):
                await read_ledger(bus, place.run.name)

    asyncio.run(scenario())
