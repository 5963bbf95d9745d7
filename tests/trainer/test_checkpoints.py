"""Checkpoints beside the steps: when they are named, what is given up for them, and a store that refuses."""

import asyncio
import logging
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from trainer_records import MODEL
from training_place import CONFIG, Place, check_whole, messages
from training_process import Delegate

from headrace.consumers import kept
from headrace.consumers.checkpoints import Checkpoints, Naming
from headrace.consumers.ledger import read_ledger
from headrace.errors import StoreError
from headrace.policy.model import initial_weights
from headrace.store.blobs import Blobs
from headrace.trainer.config import TrainerConfig
from headrace.trainer.state import State, fresh
from headrace.wire.records import Checkpoint, TrainStep

FIRST = fresh(initial_weights(MODEL, 1), {"experience/0": 0})


def at(step: int) -> State:
    """The state of a step that learned nothing."""
    return State(
        step=step,
        masters=FIRST.masters,
        moment1=FIRST.moment1,
        moment2=FIRST.moment2,
        updates=0,
        positions=FIRST.positions,
        seen={},
        root=FIRST.root,
    )


class Gated(Delegate):
    """A store that keeps each upload until it is let through, and remembers what was deleted."""

    def __init__(self) -> None:
        super().__init__(Blobs.open("memory:///"))
        self.gate = asyncio.Event()
        self.gate.set()
        self.deleted: list[str] = []

    async def put(self, data: bytes, **kwargs: Any) -> Any:
        await self.gate.wait()
        return await self._other.put(data, **kwargs)

    async def delete(self, uri: str) -> None:
        self.deleted.append(uri)
        await self._other.delete(uri)


def opened(blobs: Any, *, named_within_s: float = 60.0, **settings: Any) -> Checkpoints:
    return Checkpoints(blobs, TrainerConfig(**settings), "run", [], named_within_s=named_within_s)


async def settled(checkpoints: Checkpoints) -> None:
    """Until nothing is being written."""
    if checkpoints._writing is not None:
        await asyncio.wait({checkpoints._writing}, timeout=20)


async def step(checkpoints: Checkpoints, number: int, *, last: bool = False) -> Naming:
    naming = await checkpoints.to_name(at(number), last=last)
    checkpoints.committed(at(number), naming)
    return naming


@pytest.mark.parametrize(
    ("steps", "newest", "forever_every", "gone"),
    [
        ([10], 2, 0, ()),
        ([10, 20, 30], 2, 0, (10,)),
        ([10, 20, 30, 40], 1, 0, (10, 20, 30)),
        ([10, 20, 30, 40, 50], 1, 20, (10, 30)),  # 20 and 40 are the first from 20 and 40 on
        ([8, 19, 27, 35, 43], 1, 20, (8, 19, 35)),  # late ones: 27 is the first from 20 on, 43 from 40 on
    ],
)
def test_what_is_given_up(steps: list[int], newest: int, forever_every: int, gone: tuple[int, ...]) -> None:
    """All but the newest, and the first from each multiple on."""
    assert kept.given_up(steps, newest=newest, forever_every=forever_every) == gone


def test_the_next_record_names_it_and_what_it_gives_up() -> None:
    """Due after step 2, written beside step 3, named by it; its predecessor goes when the record that gives
    it up is in the ledger, not before."""

    async def scenario() -> None:
        blobs = Gated()
        async with opened(blobs, checkpoint_every=2, checkpoints_kept=1) as checkpoints:
            named: dict[int, Naming] = {}
            for number in range(1, 6):
                naming = await checkpoints.to_name(at(number), last=False)
                assert blobs.deleted == []
                checkpoints.committed(at(number), naming)
                await settled(checkpoints)
                named[number] = naming
            saved = {number: naming.checkpoint.step for number, naming in named.items() if naming.checkpoint}
            assert saved == {3: 2, 5: 4}
            assert {number: naming.pruned for number, naming in named.items() if naming.pruned} == {5: (2,)}
            assert named[3].checkpoint is not None
            assert blobs.deleted == [named[3].checkpoint.uri]

    asyncio.run(scenario())


def test_one_that_is_due_waits_for_its_turn() -> None:
    """While the store is slow no step waits, and no second upload begins; the one due meanwhile is then of
    the newest state."""

    async def scenario() -> None:
        blobs = Gated()
        async with opened(blobs, checkpoint_every=2) as checkpoints:
            blobs.gate.clear()
            for number in range(1, 6):
                assert (await step(checkpoints, number)).checkpoint is None
            assert checkpoints.beside_s(0.0) > 0.0
            blobs.gate.set()
            await settled(checkpoints)
            named = []
            for number in (6, 7, 8):
                naming = await step(checkpoints, number)
                await settled(checkpoints)
                named.append(naming.checkpoint and naming.checkpoint.step)
            assert named == [2, 6, None]

    asyncio.run(scenario())


def test_one_stored_in_mid_commit_is_named_before_the_next_begins() -> None:
    """Durable between a step's record and its commit, at which the next is due: named first, not lost."""

    async def scenario() -> None:
        blobs = Gated()
        async with opened(blobs, checkpoint_every=2) as checkpoints:
            blobs.gate.clear()
            for number in (1, 2, 3):
                await step(checkpoints, number)
            naming = await checkpoints.to_name(at(4), last=False)
            blobs.gate.set()
            await settled(checkpoints)
            checkpoints.committed(at(4), naming)
            await settled(checkpoints)
            saved = (await step(checkpoints, 5)).checkpoint
            assert saved is not None and saved.step == 2
            await settled(checkpoints)
            saved = (await step(checkpoints, 6)).checkpoint
            assert saved is not None and saved.step == 5

    asyncio.run(scenario())


def test_the_last_step_has_its_own() -> None:
    """A finished run ends with a checkpoint of its end, whatever was under way."""

    async def scenario() -> None:
        blobs = Gated()
        async with opened(blobs, checkpoint_every=2) as checkpoints:
            await step(checkpoints, 1)
            await step(checkpoints, 2)
            naming = await checkpoints.to_name(at(3), last=True)
            assert naming.checkpoint is not None and naming.checkpoint.step == 3
            assert naming.checkpoint.bytes > 0 and naming.seconds > 0.0

    asyncio.run(scenario())


def test_what_waited_too_long_is_written_anew() -> None:
    """No experience came for longer than a sweep may be patient: the old blob is not named any more."""

    async def scenario() -> None:
        async with opened(Gated(), checkpoint_every=2, named_within_s=-1.0) as checkpoints:
            for number in (1, 2, 3):
                assert (await step(checkpoints, number)).checkpoint is None
                await settled(checkpoints)
            assert checkpoints._stored is not None and checkpoints._stored.step == 3

    asyncio.run(scenario())


def test_what_waited_while_the_machine_slept_is_written_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """The monotonic clock stands still in sleep and a sweep goes by the store's wall clock: after a night,
    with a grace period of two minutes, the stored checkpoint is not named."""

    async def scenario() -> None:
        async with opened(Gated(), checkpoint_every=2, named_within_s=60.0) as checkpoints:
            for number in (1, 2):
                await step(checkpoints, number)
            await settled(checkpoints)
            awake = time.time
            monkeypatch.setattr(time, "time", lambda: awake() + 8 * 3600)
            assert (await step(checkpoints, 3)).checkpoint is None
            await settled(checkpoints)
            assert (await step(checkpoints, 4)).checkpoint is not None, "the one written anew, after step 3"

    asyncio.run(scenario())


def test_records_from_before_pruning_was_told() -> None:
    """A checkpoint without a step is of the record that names it; all are live, and given up at once."""

    def record(number: int, saved: Checkpoint | None, pruned: tuple[int, ...] = ()) -> TrainStep:
        return msgspec.convert(
            {
                "run": "run",
                "step": number,
                "version_from": number - 1,
                "version_to": number,
                "consumed": [],
                "positions": {},
                "admitted": [],
                "drops": [],
                "config": "",
                "config_sha256": "",
                "seed": 0,
                "code": "",
                "libraries": {},
                "threads": 1,
                "kernel_probe": "",
                "metrics": {},
                "root_before": "",
                "root_after": "",
                "checkpoint": saved and msgspec.to_builtins(saved),
                "checkpoints_pruned": pruned,
                "started_ms": 0,
                "ended_ms": 0,
            },
            TrainStep,
        )

    old = [record(number, Checkpoint(uri=f"u{number}", sha256="")) for number in (1, 2, 3)]
    assert {step: saved.uri for step, saved in kept.live(old).items()} == {1: "u1", 2: "u2", 3: "u3"}
    later = record(5, Checkpoint(uri="u4", sha256="", step=4), (1, 2))
    assert sorted(kept.live([*old, later])) == [3, 4]


def test_a_run_keeps_what_its_ledger_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight steps, one checkpoint each, two kept and every fourth for ever: the store holds the live ones and
    no other, and a restart begins with the newest."""
    monkeypatch.setattr("headrace.consumers.checkpoints.DELETE_S", 60.0)
    place = Place(tmp_path)
    config = msgspec.structs.replace(
        CONFIG, checkpoint_every=1, checkpoints_kept=2, checkpoints_forever_every=4
    )

    async def scenario() -> None:
        async with place.opened() as bus:
            await bus.produce(messages(place.groups(16), partition=0))
            for last in range(1, 9):  # started anew for each, so that each step's is its own
                steps = await place.train(bus, place.until(last), config)
            check_whole(steps, place.units(16))
            live = kept.live(steps)
            assert sorted(live) == [4, 7, 8]
            ledger = await read_ledger(bus, place.run.name)
            weights = {e.uri for record in ledger.published.values() for e in record.encodings}
            manifests = {record.manifest_uri for record in ledger.published.values()}
            stored = {blob.uri async for blob in Blobs.open(place.store).listing()}
            assert stored == weights | manifests | {saved.uri for saved in live.values()}

    asyncio.run(scenario())


class Refusing(Delegate):
    """A store that takes everything but checkpoints."""

    async def put(self, data: bytes, **kwargs: Any) -> Any:
        if "halfway" in kwargs:
            raise StoreError("store: no space left")
        return await self._other.put(data, **kwargs)


def test_a_store_that_refuses_a_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Training goes on with an alarm, to the end; the checkpoint that there is stays, and is the one to go on
    from."""
    caplog.set_level(logging.INFO)
    place = Place(tmp_path)
    config = msgspec.structs.replace(CONFIG, checkpoint_every=1, checkpoints_kept=1)

    async def scenario() -> None:
        async with place.opened() as bus:
            await bus.produce(messages(place.groups(10), partition=0))
            [first] = await place.train(bus, place.until(1), config)
            refusing = Refusing(Blobs.open(place.store))
            steps = await place.train(bus, place.until(4), config, refusing)
            check_whole(steps, place.units(8))
            assert sorted(kept.live(steps)) == [1]
            assert first.checkpoint is not None
            await Blobs.open(place.store).get(first.checkpoint.uri, first.checkpoint.sha256)
            caplog.clear()
            check_whole(await place.train(bus, place.until(5), config), place.units(10))

    asyncio.run(scenario())
    assert "checkpoint_read step=1" in caplog.text
    assert "replayed step=4" in caplog.text


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 700 KiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=700k", "tmpfs", str(disk)], capture_output=True, timeout=10
    )
    if done.returncode:
        pytest.skip(f"no small file system: {done.stderr.decode().strip()}")
    yield disk
    subprocess.run(["umount", str(disk)], check=True, timeout=10)


def test_a_disk_that_fills_during_a_checkpoint(
    tmp_path: Path, small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """There is room for the deltas of the weights, and for half a checkpoint: an alarm, the run goes on, the
    older one stays, nothing half-written is named or left lying about."""
    place = Place(tmp_path / "run")
    place.store = f"file://{small_disk}"
    config = msgspec.structs.replace(CONFIG, checkpoint_every=1, full_every=99, checkpoints_kept=1)

    async def scenario() -> None:
        async with place.opened() as bus:
            await bus.produce(messages(place.groups(8), partition=0))
            steps = await place.train(bus, place.until(1), config)
            [first] = kept.live(steps).values()
            free = os.statvfs(small_disk)
            room = free.f_bavail * free.f_frsize - first.bytes // 2 - 150_000
            (small_disk / "others").write_bytes(bytes(room))
            blobs = Blobs.open(place.store, backoff_s=0.0)
            steps = await place.train(bus, place.until(4), config, blobs)
            check_whole(steps, place.units(8))
            assert list(kept.live(steps).values()) == [first]
            await blobs.get(first.uri, first.sha256)
            assert blobs.unfinished(1 << 60) == []

    asyncio.run(scenario())
    assert "alarm kind=checkpoint_failed step=" in caplog.text
