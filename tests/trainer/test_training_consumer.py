"""The trainer's process on the embedded log: one transaction a step, and the same steps after any fault."""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from trainer_records import consumed, experience, pair, rollout
from training_process import Delegate, Fuse, FusedBlobs, FusedBus, seed

from headrace.bus import open_bus
from headrace.bus.protocol import Bus, Message
from headrace.config import RunConfig
from headrace.consumers import training
from headrace.consumers.batches import positions_by_name
from headrace.consumers.ledger import read_ledger
from headrace.errors import BusUnavailable, Fenced, OffsetGone, TrainingError
from headrace.policy.checkpoint import from_bytes, weights_root
from headrace.store.blobs import Blobs
from headrace.trainer.config import TrainerConfig
from headrace.trainer.step import run_step
from headrace.wire.codec import decode, encode
from headrace.wire.records import DeadLetter, Experience, TrainStep
from headrace.wire.topics import DEAD_LETTERS, EXPERIENCE, TOPICS

RUN = RunConfig(name="test", steps_max=3, groups_per_step=2, lag_versions_max=99)
CONFIG = TrainerConfig(lr=1e-2, checkpoint_every=2, full_every=2, outage_ms_max=3_000)


def groups(count: int) -> list[Experience]:
    return [pair(f"g{index}", first=9 + 3 * index) for index in range(count)]


def messages(records: Sequence[Experience]) -> list[Message]:
    found = []
    for record in records:
        value, headers = encode(record, source="join", now_ms=0, event_id=record.group_id)
        found.append(Message(EXPERIENCE.name, record.group_id.encode(), value, headers))
    return found


class Place:
    """A log and a store in a directory."""

    def __init__(self, directory: Path) -> None:
        self.bus = f"sqlite:{directory}/bus.sqlite"
        self.store = f"file://{directory}/store"
        self.directory = directory

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[Bus]:
        async with open_bus(self.bus) as bus:
            await bus.create_topics(list(TOPICS.values()))
            yield bus

    async def train(
        self, bus: Any, run: RunConfig = RUN, config: TrainerConfig = CONFIG, blobs: Any = None
    ) -> list[TrainStep]:
        """Trains to `steps_max` and gives the ledger."""
        async with asyncio.timeout(30):
            await training.run(
                bus, run, config, blobs or Blobs.open(self.store), asyncio.Event(), seed=seed()
            )
            return (await read_ledger(bus, run.name)).steps


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


async def all_of(bus: Bus, topic: str) -> list[Any]:
    begins, ends = await bus.begins([topic]), await bus.ends([topic])
    return [
        decode(d.topic, d.value or b"", d.headers)
        for tp, end in ends.items()
        async for d in bus.read_range(tp, begins[tp], end)
    ]


def check_whole(steps: Sequence[TrainStep], units: set[str]) -> None:
    """Steps without a hole, roots in a chain, each unit exactly once."""
    assert [step.step for step in steps] == list(range(1, len(steps) + 1))
    assert [step.root_before for step in steps[1:]] == [step.root_after for step in steps[:-1]]
    answered = [u for step in steps for u in (*step.admitted, *(d.group_id for d in step.drops))]
    assert sorted(answered) == sorted(units)


def test_a_run_from_seed_to_end(place: Place) -> None:
    """Six groups, two a step: three steps, four announced versions, offsets at the end of what was read."""

    async def scenario() -> None:
        async with place.opened() as bus:
            await bus.produce(messages(groups(6)))
            steps = await place.train(bus)
            check_whole(steps, {f"g{index}" for index in range(6)})
            ledger = await read_ledger(bus, "test")
            assert sorted(ledger.published) == [0, 1, 2, 3]
            kinds = {v: [e.kind for e in r.encodings] for v, r in ledger.published.items()}
            assert kinds == {0: ["full"], 1: ["delta"], 2: ["full", "delta"], 3: ["delta"]}
            committed = positions_by_name(await bus.committed("trainer-test", [EXPERIENCE.name]))
            assert committed == steps[-1].positions == positions_by_name(await bus.ends([EXPERIENCE.name]))
            assert [step.checkpoint is not None for step in steps] == [False, True, True]
            full = ledger.published[2].encodings[0]
            data = await Blobs.open(place.store).get(full.uri, full.sha256)
            assert weights_root(from_bytes(data, "full")) == steps[1].root_after == ledger.published[2].root
            assert steps[0].root_before == ledger.published[0].root
            assert 0.0 <= steps[0].metrics["idle_share"] <= 1.0

    asyncio.run(scenario())


def test_going_on_is_the_same_as_never_having_stopped(place: Place, tmp_path: Path) -> None:
    """One run in one process, the other restarted after each step: the same roots."""
    other = Place(tmp_path / "other")
    other.directory.mkdir()

    async def scenario() -> None:
        async with place.opened() as bus, other.opened() as second:
            for each in (bus, second):
                await each.produce(messages(groups(6)))
            whole = await place.train(bus)
            for last in (1, 2, 3):
                parts = await other.train(second, msgspec.structs.replace(RUN, steps_max=last))
            assert [s.root_after for s in parts] == [s.root_after for s in whole]

    asyncio.run(scenario())


def test_duplicates_take_no_place_in_a_step(place: Place) -> None:
    """A group sent three times is trained once, and the step still has its two groups."""

    async def scenario() -> None:
        async with place.opened() as bus:
            first, second, *rest = groups(6)
            await bus.produce(messages([first, first, second, first, *rest]))
            steps = await place.train(bus)
            admitted = [unit for step in steps for unit in step.admitted]
            assert sorted(admitted) == [f"g{index}" for index in range(6)]
            drops = [(d.group_id, d.reason) for step in steps for d in step.drops]
            assert drops == [("g0", "duplicate")] * 2
            # Replayed from the seed, duplicates included, the ledger gives the same weights.
            for step in steps:
                if step.checkpoint:
                    await Blobs.open(place.store).delete(step.checkpoint.uri)
            longer = msgspec.structs.replace(RUN, steps_max=4)
            await bus.produce(messages([pair("g6"), pair("g7")]))
            assert len(await place.train(bus, longer)) == 4

    asyncio.run(scenario())


def test_bad_records_are_dead_lettered_in_the_same_transaction(place: Place) -> None:
    """Undecodable bytes and contradictory counts: dropped, kept with their bytes, and the run goes on."""

    async def scenario() -> None:
        async with place.opened() as bus:
            good = messages(groups(4))
            junk = Message(EXPERIENCE.name, b"junk", b"\xc1\xc1", good[0].headers)
            broken = rollout(0, 1.0)
            broken = msgspec.structs.replace(
                broken, steps=(msgspec.structs.replace(broken.steps[0], logp=b""),)
            )
            [bad] = messages([experience("bad", [broken, rollout(1, 0.0)])])
            await bus.produce([junk, bad, *good])
            steps = await place.train(bus)
            check_whole(steps, {"g0", "g1", "g2", "g3", "junk", "bad"})
            letters = await all_of(bus, DEAD_LETTERS.name)
            assert sorted((d.key, d.by) for d in letters if isinstance(d, DeadLetter)) == [
                (b"bad", "trainer"),
                (b"junk", "trainer"),
            ]
            assert {d.value for d in letters} == {junk.value, bad.value}

    asyncio.run(scenario())


def test_groups_of_other_runs_are_passed_over(place: Place) -> None:
    """One log, two runs: each trains its own."""

    async def scenario() -> None:
        async with place.opened() as bus:
            strange = [msgspec.structs.replace(g, run="other", group_id="o" + g.group_id) for g in groups(3)]
            await bus.produce(messages([*strange, *groups(6)]))
            check_whole(await place.train(bus), {f"g{index}" for index in range(6)})

    asyncio.run(scenario())


@pytest.mark.parametrize("damage", [b"", b"not a checkpoint"])
def test_a_corrupt_checkpoint_is_refused_and_the_one_before_used(
    place: Place, damage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """The newest is damaged: its hash says so, the older one and the records bring the run to its head."""
    caplog.set_level(logging.INFO)

    async def scenario() -> None:
        async with place.opened() as bus:
            await bus.produce(messages(groups(8)))
            steps = await place.train(bus)
            newest = steps[-1].checkpoint
            assert newest is not None
            (place.directory / "store" / newest.uri).write_bytes(damage)
            steps = await place.train(bus, msgspec.structs.replace(RUN, steps_max=4))
            check_whole(steps, {f"g{index}" for index in range(8)})

    asyncio.run(scenario())
    assert "checkpoint_refused step=3" in caplog.text
    assert "checkpoint_read step=2" in caplog.text
    assert "replayed step=3" in caplog.text


def test_a_step_that_is_not_the_same_again_stops_the_trainer(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other arithmetic than then: recovery names the step and what changed."""

    async def scenario() -> None:
        async with place.opened() as bus:
            await bus.produce(messages(groups(8)))
            steps = await place.train(bus, config=msgspec.structs.replace(CONFIG, checkpoint_every=99))
            assert steps[-1].checkpoint is not None
            await Blobs.open(place.store).delete(steps[-1].checkpoint.uri)
            real = run_step

            def other(*args: Any, **kwargs: Any) -> Any:
                settings = kwargs.pop("settings")
                trainer = msgspec.structs.replace(settings.trainer, lr=0.5)
                return real(*args, settings=msgspec.structs.replace(settings, trainer=trainer), **kwargs)

            monkeypatch.setattr("headrace.consumers.recovery.run_step", other)
            with pytest.raises(TrainingError, match=r"step 1 computed again: expected root .*same code"):
                await place.train(bus, msgspec.structs.replace(RUN, steps_max=4))

    asyncio.run(scenario())


def test_another_seed_is_refused(place: Place) -> None:
    """A run does not go on from a model that it did not begin with."""

    async def scenario() -> None:
        async with place.opened() as bus:
            await bus.produce(messages(groups(2)))
            model, weights = seed()
            weights["embed"] = weights["embed"] + 1.0
            one = msgspec.structs.replace(RUN, steps_max=0)
            await place.train(bus, one)
            with pytest.raises(TrainingError, match="the run began with another model"):
                await training.run(
                    bus, RUN, CONFIG, Blobs.open(place.store), asyncio.Event(), seed=(model, weights)
                )

    asyncio.run(scenario())


def test_a_second_trainer_fences_the_first(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    """The first has learned and is about to commit when the second starts: it stops and says why."""

    async def scenario() -> None:
        async with place.opened() as bus:
            await bus.produce(messages(groups(6)))
            reached, go_on = asyncio.Event(), asyncio.Event()

            class Held(FusedBlobs):
                async def put(self, data: bytes) -> Any:
                    if reached.is_set():
                        await go_on.wait()
                    blob = await super().put(data)
                    if len(await all_of(bus, "weights")) == 1:  # version 0 is out: this is step 1
                        reached.set()
                    return blob

            held = Held(Blobs.open(place.store), Fuse("never", 1))
            first = asyncio.create_task(place.train(bus, blobs=held))
            await asyncio.wait_for(reached.wait(), 20)
            steps = await place.train(bus)
            go_on.set()
            with pytest.raises(Fenced):
                await first
            check_whole(steps, {f"g{index}" for index in range(6)})
            assert (await read_ledger(bus, "test")).steps == steps

    asyncio.run(scenario())
    assert "fenced run=test" in caplog.text


@pytest.mark.parametrize("lost", ["before", "after"])
def test_an_unknown_outcome_is_looked_up(place: Place, lost: str) -> None:
    """The log goes away before, or right after, it took a transaction: never a second step 2, never none."""

    class Losing(Fuse):
        def burn(self, point: str) -> None:
            raise BusUnavailable("broker: expected an answer, got none")

    async def scenario() -> None:
        async with place.opened() as bus:
            await bus.produce(messages(groups(6)))
            fused = FusedBus(bus, Losing(lost, 3))  # version 0, step 1, step 2
            check_whole(await place.train(fused), {f"g{index}" for index in range(6)})

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
            await bus.produce(messages(groups(1)))
            stop = asyncio.Event()
            config = msgspec.structs.replace(CONFIG, alarm_ms=1)
            task = asyncio.create_task(
                training.run(bus, RUN, config, Blobs.open(place.store), stop, seed=seed())
            )
            async with asyncio.timeout(20):
                while caplog.text.count("alarm kind=no_experience") < 2:  # noqa: ASYNC110 - a log has no event
                    await asyncio.sleep(0.01)
                stop.set()
                await task
            assert (await read_ledger(bus, "test")).steps == []

    asyncio.run(scenario())
    assert "groups_waiting=1 groups_wanted=2" in caplog.text


def test_a_stop_in_mid_step_abandons_it(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the step stays; the next start does it."""

    async def scenario() -> None:
        async with place.opened() as bus:
            await bus.produce(messages(groups(6)))
            stop = asyncio.Event()
            loop = asyncio.get_running_loop()
            real = run_step

            def stopping(*args: Any, **kwargs: Any) -> Any:
                asyncio.run_coroutine_threadsafe(_set(stop), loop).result(10)
                return real(*args, **kwargs)

            monkeypatch.setattr(training, "run_step", stopping)
            async with asyncio.timeout(20):
                await training.run(bus, RUN, CONFIG, Blobs.open(place.store), stop, seed=seed())
            assert (await read_ledger(bus, "test")).steps == []
            monkeypatch.setattr(training, "run_step", real)
            check_whole(await place.train(bus), {f"g{index}" for index in range(6)})

    asyncio.run(scenario())


async def _set(event: asyncio.Event) -> None:
    event.set()


def test_a_ledger_with_a_hole_is_refused(place: Place) -> None:
    """Step 3 after step 1: going on would train on a guess."""

    async def scenario() -> None:
        async with place.opened() as bus:
            await bus.produce(messages(groups(2)))
            [step] = await place.train(bus, msgspec.structs.replace(RUN, steps_max=1))
            late = msgspec.structs.replace(step, step=3, consumed=(consumed("x"),))
            value, headers = encode(late, source="t", now_ms=0)
            await bus.produce([Message("train.steps", b"test", value, headers)])
            with pytest.raises(TrainingError, match=r"train.steps\[0\]@\d+: .*expected step 2, got 3"):
                await read_ledger(bus, "test")

    asyncio.run(scenario())
