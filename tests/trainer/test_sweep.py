"""The sweep: what is named stays, what is young stays, the rest goes; on a store that the log has alone."""

import asyncio
import json
import os
import time
from pathlib import Path

import msgspec
import pytest
from training_place import CONFIG, Place, messages

from headrace.bus.dead_letters import dead_letter
from headrace.bus.protocol import Bus, Delivery, Message
from headrace.cli import main
from headrace.consumers import kept, sweep
from headrace.consumers.names import Names
from headrace.errors import StoreError, WireError
from headrace.store.blobs import Blob, Blobs
from headrace.wire.codec import encode
from headrace.wire.records import Claim
from headrace.wire.topics import DEAD_LETTERS, EXPERIENCE, TRAIN_STEPS

GRACE_MS = 3_600_000


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def aged(place: Place, uri: str, *, hours: float) -> None:
    """As if it had been written so long ago."""
    then_s = time.time() - hours * 3600
    os.utime(place.directory / "store" / uri, (then_s, then_s))


async def swept(bus: Bus, blobs: Blobs) -> list[str]:
    found = await sweep.sweep(bus, blobs, Names(bus), grace_ms=GRACE_MS)
    return [blob.uri for blob in found.removed]


def claiming(place: Place, group_id: str, blob: Blob) -> Message:
    """An experience whose rollouts lie in `blob`."""
    claim = Claim(uri=blob.uri, sha256=blob.sha256, bytes=blob.bytes)
    record = msgspec.structs.replace(place.group(group_id, []), claim=claim)
    value, headers = encode(record, source="t", now_ms=0)
    return Message(EXPERIENCE.name, group_id.encode(), value, headers)


def test_what_is_no_blob_is_left_alone(place: Place) -> None:
    """A file of somebody else beside the blobs, one in a folder linked there, and a blob's name in a wrong
    folder, all older than the grace period: none is listed and none removed."""

    async def scenario() -> None:
        blobs = Blobs.open(place.store)
        async with place.opened() as bus:
            await bus.produce(messages(place.groups(6), partition=0))
            await place.train(bus)
            elsewhere = place.directory / "elsewhere"
            elsewhere.mkdir()
            (place.directory / "store" / "blobs" / "zz").symlink_to(elsewhere)
            uris = ["blobs/notes.txt", "blobs/zz/report", f"blobs/{'ab' * 32}"]
            for uri in uris:
                (place.directory / "store" / uri).write_text("theirs")
                aged(place, uri, hours=2)
            assert await swept(bus, blobs) == []
            assert all((place.directory / "store" / uri).read_text() == "theirs" for uri in uris)

    asyncio.run(scenario())


def test_only_what_nobody_names_and_is_old_goes(place: Place) -> None:
    """Weights, manifests, live checkpoints and claims, also one in a dead letter, are named however old they
    are; of two orphans the young one stays, and one that is put again is young again."""

    async def scenario() -> None:
        blobs = Blobs.open(place.store)
        async with place.opened() as bus:
            await bus.produce(messages(place.groups(6), partition=0))
            steps = await place.train(bus)
            [claimed, lettered, old, young, again] = [
                await blobs.put(name) for name in (b"claimed", b"lettered", b"old", b"young", b"again")
            ]
            await bus.produce([claiming(place, "test-claim", claimed)])
            strange = claiming(place, "test-letter", lettered)
            delivery = Delivery(EXPERIENCE.name, 0, 99, 0, strange.key, strange.value, strange.headers)
            await bus.produce([dead_letter(delivery, WireError("t"), by="trainer", now_ms=0)])
            stored = [blob.uri async for blob in blobs.listing()]
            for uri in stored:
                aged(place, uri, hours=2)
            aged(place, young.uri, hours=0.9)
            await blobs.put(b"again")
            assert await swept(bus, blobs) == [old.uri]
            assert {blob.uri async for blob in blobs.listing()} == {*stored} - {old.uri}
            assert again.uri in stored
            for saved in kept.live(steps).values():
                await blobs.get(saved.uri, saved.sha256)

    asyncio.run(scenario())


def test_names_follow_the_log(place: Place) -> None:
    """What is named since the last look is seen; a claim whose record retention took is named no more."""

    async def scenario() -> None:
        blobs = Blobs.open(place.store)
        async with place.opened() as bus:
            names = Names(bus)
            assert await names.refresh() == set()
            blob = await blobs.put(b"claimed")
            await bus.produce([claiming(place, "test-claim", blob)])
            assert await names.refresh() == {blob.uri} == await names.refresh()
            names._claims[next(iter(names._claims))].appendleft((-1, "blobs/gone"))
            assert await names.refresh() == {blob.uri}

    asyncio.run(scenario())


def test_a_clock_that_was_set_back_deletes_nothing(place: Place) -> None:
    """An orphan that seems to come from tomorrow is not old."""

    async def scenario() -> None:
        blobs = Blobs.open(place.store)
        async with place.opened() as bus:
            await place.train(bus, place.until(0))
            orphan = await blobs.put(b"orphan")
            aged(place, orphan.uri, hours=-24)
            assert await swept(bus, blobs) == []
            aged(place, orphan.uri, hours=24)
            assert await swept(bus, blobs) == [orphan.uri]

    asyncio.run(scenario())


def test_files_of_killed_writers_go(place: Place) -> None:
    """What obstore had not yet renamed: no blob, and removed when it is old."""

    async def scenario() -> None:
        blobs = Blobs.open(place.store)
        async with place.opened() as bus:
            await place.train(bus, place.until(0))
            folder = place.directory / "store/blobs/ab"
            folder.mkdir(exist_ok=True)
            old, young = (folder / f"{64 * 'a'}#{number}" for number in (1, 2))
            old.write_bytes(b"half"), young.write_bytes(b"half")
            aged(place, f"blobs/ab/{old.name}", hours=2)
            found = await sweep.sweep(bus, blobs, Names(bus), grace_ms=GRACE_MS)
            assert (found.unfinished, old.exists(), young.exists()) == (1, False, True)

    asyncio.run(scenario())


def test_a_record_of_an_unknown_kind_stops_the_sweep(place: Place) -> None:
    """A newer version may name a blob in a way that this one can't read: nothing is removed, and the place is
    named. Bytes that nobody calls a record name nothing."""

    async def scenario() -> None:
        blobs = Blobs.open(place.store)
        async with place.opened() as bus:
            await place.train(bus, place.until(0))
            orphan = await blobs.put(b"orphan")
            aged(place, orphan.uri, hours=2)
            await bus.produce([Message(TRAIN_STEPS.name, b"junk", b"\xc1")])
            await bus.produce(
                [Message(DEAD_LETTERS.name, b"junk", b"\xc1", (("ce_type", b"headrace.DeadLetter.v1"),))]
            )
            newer = (("ce_type", b"headrace.TrainStep.v2"),)
            await bus.produce([Message(TRAIN_STEPS.name, b"other", b"\x80", newer)])
            with pytest.raises(
                WireError, match=r"train.steps\[0\]@1: expected one of .*got 'headrace.TrainStep.v2'"
            ):
                await swept(bus, blobs)
            await blobs.get(orphan.uri, orphan.sha256)

    asyncio.run(scenario())


def test_a_store_of_two_logs_is_not_swept(tmp_path: Path) -> None:
    """Each log names its own blobs only: neither may sweep, until a person says that one has it alone."""
    first, second = Place(tmp_path / "a"), Place(tmp_path / "b", name="other")
    second.store = first.store

    async def scenario() -> None:
        blobs = Blobs.open(first.store)
        async with first.opened() as bus, second.opened() as strange:
            with pytest.raises(StoreError, match="no trainer of this log has noted"):
                await swept(bus, blobs)
            await first.train(bus, first.until(0))
            orphan = await blobs.put(b"orphan")
            aged(first, orphan.uri, hours=2)
            await second.train(strange, second.until(0))
            for log in (bus, strange):
                with pytest.raises(StoreError, match=r"alone: 1 other log\(s\) use it too .*--adopt"):
                    await swept(log, blobs)
            await sweep.adopt(bus, blobs)
            assert await swept(bus, blobs) == [orphan.uri]
            with pytest.raises(StoreError, match="1 other log"):
                await swept(strange, blobs)

    asyncio.run(scenario())


def test_a_store_in_use_before_is_not_swept(place: Place) -> None:
    """What lay there before the log's first version may be anybody's."""

    async def scenario() -> None:
        blobs = Blobs.open(place.store)
        await blobs.put(b"somebody's")
        async with place.opened() as bus:
            await place.train(bus, place.until(0))
            with pytest.raises(StoreError, match="in use before this log was"):
                await swept(bus, blobs)

    asyncio.run(scenario())


def test_the_trainer_sweeps_and_the_command_shows(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    """In its low rhythm the trainer removes an orphan while it waits for groups; `headrace sweep --dry-run`
    says what would go, and leaves it."""
    blobs = Blobs.open(place.store)

    async def scenario() -> None:
        async with place.opened() as bus:
            await place.train(bus, place.until(0))
            orphan = await blobs.put(b"orphan")
            aged(place, orphan.uri, hours=2)
            config = msgspec.structs.replace(CONFIG, sweep_every_ms=1)
            task = asyncio.create_task(place.train(bus, place.until(1), config))
            async with asyncio.timeout(60):
                while (place.directory / "store" / orphan.uri).exists():  # noqa: ASYNC110 - a file has no event
                    await asyncio.sleep(0.01)
                await bus.produce(messages(place.groups(2)))
                await task

    asyncio.run(scenario())
    orphan = asyncio.run(blobs.put(b"orphan"))
    aged(place, orphan.uri, hours=2)
    at = ["sweep", "--dry-run", "--bus", place.bus, "--store.uri", place.store]
    assert main([*at, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["removed"], document["missing"]) == ([orphan.uri], [])
    assert main(at) == 0
    assert "1 named by nobody, 6 B: would be removed" in capsys.readouterr().out
    assert (place.directory / "store" / orphan.uri).exists()
