"""What the trainer's process promises on either log. Inherited by the runs on the embedded log and on
Kafka."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from trainer_records import rollout
from training_place import CONFIG, Place, all_of, check_whole, messages
from training_process import Fuse, FusedBlobs, FusedBus

from headrace import failpoints
from headrace.bus.protocol import Message
from headrace.consumers.batches import positions_by_name
from headrace.consumers.kept import live
from headrace.consumers.ledger import read_ledger
from headrace.consumers.names import announced
from headrace.errors import BusUnavailable, Fenced
from headrace.policy.checkpoint import from_bytes, weights_root
from headrace.store.blobs import Blobs
from headrace.trainer.config import StepSettings
from headrace.wire.records import TrainStep
from headrace.wire.topics import DEAD_LETTERS, EXPERIENCE

SCRIPT = Path(__file__).with_name("training_process.py")


class TrainingCases:
    def test_a_run_from_seed_to_end(self, place: Place) -> None:
        """Six groups, two a step: three steps, four announced versions, offsets at the end of what was
        read."""

        async def scenario() -> None:
            async with place.opened() as bus:
                await bus.produce(messages(place.groups(6)))
                steps = await place.train(bus)
                check_whole(steps, place.units(6))
                ledger = await read_ledger(bus, place.run.name)
                assert sorted(ledger.published) == [0, 1, 2, 3]
                kinds = {v: [e.kind for e in r.encodings] for v, r in ledger.published.items()}
                assert kinds == {0: ["full"], 1: ["delta"], 2: ["full", "delta"], 3: ["delta"]}
                committed = await bus.committed(f"trainer-{place.run.name}", [EXPERIENCE.name])
                assert positions_by_name(committed) == steps[-1].positions
                named = [step.checkpoint and step.checkpoint.step for step in steps]
                assert named == [None, None, 3]  # the last step waits for its own
                full = ledger.published[2].encodings[0]
                data = await Blobs.open(place.store).get(full.uri, full.sha256)
                assert (
                    weights_root(from_bytes(data, "full")) == steps[1].root_after == ledger.published[2].root
                )
                assert steps[0].root_before == ledger.published[0].root
                assert 0.0 <= steps[0].metrics["idle_share"] <= 1.0

        asyncio.run(scenario())

    def test_going_on_is_the_same_as_never_having_stopped(self, place: Place, other: Place) -> None:
        """One run in one process, the other started anew for each step: the same roots."""

        async def scenario() -> None:
            async with place.opened() as bus, other.opened() as second:
                await bus.produce(messages(place.groups(6), partition=0))
                await second.produce(messages(other.groups(6), partition=0))
                whole = await place.train(bus)
                for last in (1, 2, 3):
                    parts = await other.train(second, other.until(last))
                assert [s.root_after for s in parts] == [s.root_after for s in whole]

        asyncio.run(scenario())

    def test_killed_again_and_again(self, place: Place, other: Place) -> None:
        """Killed between blobs, before and after transactions, of the seed and of steps: the ledger is that
        of a run that nobody disturbed."""

        async def prepare() -> list[TrainStep]:
            async with place.opened() as bus, other.opened() as second:
                await bus.produce(messages(place.groups(6), partition=0))
                await second.produce(messages(other.groups(6), partition=0))
                return await other.train(second)

        async def ledger() -> list[TrainStep]:
            blobs = Blobs.open(place.store)
            async with place.opened() as bus:
                found = await read_ledger(bus, place.run.name)
            for encoding in (e for record in found.published.values() for e in record.encodings):
                await blobs.get(encoding.uri, encoding.sha256)  # what is announced is there
            return found.steps

        undisturbed = asyncio.run(prepare())
        fuses = ["put:1", "before:1", "after:1", "put:2", "before:1", "after:1", "put:3", "before:1", "never"]
        settings = msgspec.json.encode(StepSettings(run=place.run, trainer=CONFIG)).decode()
        done = subprocess.run(
            [sys.executable, str(SCRIPT), place.bus, place.store, settings, *fuses],
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert done.stdout.split() == ["-9"] * (len(fuses) - 1) + ["0"], done.stderr
        steps = asyncio.run(ledger())
        check_whole(steps, place.units(6))
        assert [step.root_after for step in steps] == [step.root_after for step in undisturbed]

    def test_duplicates_take_no_place_in_a_step(self, place: Place) -> None:
        """A group sent three times, in two steps, is trained once; each step still has its two groups."""

        async def scenario() -> None:
            async with place.opened() as bus:
                first, second, *rest = place.groups(6)
                await bus.produce(messages([first, first, second, first, *rest], partition=0))
                steps = await place.train(bus)
                admitted = [unit for step in steps for unit in step.admitted]
                assert sorted(admitted) == place.units(6)
                drops = [(d.group_id, d.reason) for step in steps for d in step.drops]
                assert drops.count((first.group_id, "duplicate")) == 2
                # Replayed from the seed, duplicates included, the ledger gives the same weights.
                for step in steps:
                    if step.checkpoint:
                        await Blobs.open(place.store).delete(step.checkpoint.uri)
                await bus.produce(messages(place.groups(8)[6:]))
                assert len(await place.train(bus, place.until(4))) == 4

        asyncio.run(scenario())

    def test_bad_records_are_dead_lettered_in_the_same_transaction(self, place: Place) -> None:
        """Undecodable bytes and contradictory counts: dropped, kept with their bytes, and the run goes on."""

        async def scenario() -> None:
            async with place.opened() as bus:
                good = messages(place.groups(4))
                junk_id, bad_id = f"{place.run.name}-junk", f"{place.run.name}-bad"
                junk = Message(EXPERIENCE.name, junk_id.encode(), b"\xc1\xc1", good[0].headers)
                broken = rollout(0, 1.0)
                broken = msgspec.structs.replace(
                    broken, steps=(msgspec.structs.replace(broken.steps[0], logp=b""),)
                )
                [bad] = messages([place.group(bad_id, [broken, rollout(1, 0.0)])])
                await bus.produce([junk, bad, *good])
                steps = await place.train(bus)
                check_whole(steps, [*place.units(4), junk_id, bad_id])
                letters = [
                    (letter.key, letter.value, letter.by)
                    for letter in await all_of(bus, DEAD_LETTERS.name)
                    if letter.key in (junk.key, bad.key)
                ]
                assert sorted(letters) == [
                    (bad.key, bad.value, "trainer"),
                    (junk.key, junk.value, "trainer"),
                ]

        asyncio.run(scenario())

    def test_a_second_trainer_fences_the_first(self, place: Place, caplog: pytest.LogCaptureFixture) -> None:
        """The first has learned and is about to commit when the second starts: it stops and says why."""

        async def scenario() -> None:
            async with place.opened() as bus:
                await bus.produce(messages(place.groups(6)))
                reached, go_on = asyncio.Event(), asyncio.Event()

                class Held(FusedBlobs):
                    async def put(self, data: bytes, **kwargs: Any) -> Any:
                        if reached.is_set():
                            await go_on.wait()
                        blob = await super().put(data, **kwargs)
                        if (await read_ledger(bus, place.run.name)).published:  # version 0 is out: step 1
                            reached.set()
                        return blob

                held = Held(Blobs.open(place.store), Fuse("never", 1))
                first = asyncio.create_task(place.train(bus, blobs=held))
                await asyncio.wait_for(reached.wait(), 60)
                steps = await place.train(bus)
                go_on.set()
                with pytest.raises(Fenced):
                    await first
                check_whole(steps, place.units(6))
                assert await place.ledger(bus) == steps

        asyncio.run(scenario())
        assert f"fenced run={place.run.name}" in caplog.text

    def test_a_trainer_that_wakes_in_mid_step_is_fenced(self, place: Place, asleep_at: str) -> None:
        """Stopped in its second step, and woken when another process has brought the run to its end: it says
        that it is fenced, last, and leaves nothing behind but blobs that nobody names."""
        settings = msgspec.json.encode(StepSettings(run=place.run, trainer=CONFIG)).decode()

        async def prepare() -> None:
            async with place.opened() as bus:
                await bus.produce(messages(place.groups(6), partition=0))

        async def check() -> None:
            async with place.opened() as bus:
                ledger = await read_ledger(bus, place.run.name)
            check_whole(ledger.steps, place.units(6))
            named = {saved.uri for saved in live(ledger.steps).values()}.union(
                *map(announced, ledger.published.values())
            )
            assert named <= {blob.uri async for blob in Blobs.open(place.store).listing()}

        asyncio.run(prepare())
        done = subprocess.run(
            [sys.executable, str(SCRIPT), place.bus, place.store, settings, "never", "never"],
            env={**os.environ, failpoints.VARIABLE: f"{asleep_at}=SIGSTOP:{place.directory}/asleep"},
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert done.stdout.split() == ["asleep", "0", str(Fenced.exit_code)], done.stderr
        assert f"fenced run={place.run.name}" in done.stderr
        assert done.stderr.splitlines()[-1].startswith("Fenced: ")
        asyncio.run(check())

    @pytest.mark.parametrize("lost", ["before", "after"])
    def test_an_unknown_outcome_is_looked_up(self, place: Place, lost: str) -> None:
        """The log goes away before, or right after, it took a transaction: never a second step 2, never
        none."""

        class Losing(Fuse):
            def burn(self, point: str) -> None:
                raise BusUnavailable("broker: expected an answer, got none")

        async def scenario() -> None:
            async with place.opened() as bus:
                await bus.produce(messages(place.groups(6)))
                fused = FusedBus(bus, Losing(lost, 3))  # version 0, step 1, step 2
                check_whole(await place.train(fused), place.units(6))

        asyncio.run(scenario())
