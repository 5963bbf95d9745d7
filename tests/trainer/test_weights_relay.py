"""The relay against replicas that answer over real gRPC, and do as the test says."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc.aio
import msgspec
import pytest
import torch
from trainer_records import MODEL
from training_place import Place

from headrace.bus.protocol import Bus, Message, TopicPartition
from headrace.config import RunConfig
from headrace.consumers import publishing, weights
from headrace.consumers.config import RelayConfig
from headrace.consumers.versions import Versions
from headrace.errors import StoreError
from headrace.policy import checkpoint
from headrace.policy.checkpoint import weights_root
from headrace.policy.model import initial_weights
from headrace.rpc import inference_pb2 as pb
from headrace.rpc.inference_pb2_grpc import InferenceServicer, add_InferenceServicer_to_server
from headrace.store.blobs import Blobs
from headrace.trainer.state import State, fresh, published
from headrace.wire.codec import decode_as, encode
from headrace.wire.records import WeightsAck, WeightsPublished
from headrace.wire.topics import WEIGHTS, WEIGHTS_ACKS

RUN = RunConfig(name="test")
WAIT_S = 60.0


class Replica(InferenceServicer):
    """Reads what it is told to load, and checks the root."""

    def __init__(self, name: str = "r0") -> None:
        self.name = name
        self.version, self.root = 0, ""
        self.asked: list[int] = []
        self.looked = 0
        self.started_s = time.monotonic()
        self.refuse = ""
        self.pause: Callable[[], Any] | None = None
        """Awaited in the middle of a load."""

    async def LoadWeights(self, request: pb.LoadWeightsRequest, context: Any) -> pb.LoadWeightsReply:
        self.asked.append(request.version)
        if self.pause is not None:
            await asyncio.shield(self.pause())
        if self.refuse:
            return pb.LoadWeightsReply(
                serving=False, version=self.version, root=self.root, detail=self.refuse
            )
        assert weights_root(checkpoint.load(Path(request.path))) == request.root
        self.version, self.root = request.version, request.root
        return pb.LoadWeightsReply(serving=True, version=self.version, root=self.root, pause_ms=1.5)

    async def Status(self, request: pb.StatusRequest, context: Any) -> pb.StatusReply:
        self.looked += 1
        up_s = time.monotonic() - self.started_s
        return pb.StatusReply(replica=self.name, version=self.version, root=self.root, up_s=up_s)


@asynccontextmanager
async def serving(replica: Replica, address: str = "127.0.0.1:0") -> AsyncIterator[str]:
    server = grpc.aio.server()
    add_InferenceServicer_to_server(replica, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port(address)
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def states(count: int) -> list[State]:
    """Versions 0, 1, ...: each moves a few weights of the one before."""
    found = [fresh(initial_weights(MODEL, 1), {})]
    for step in range(1, count):
        masters = {name: weight.clone() for name, weight in found[-1].masters.items()}
        masters["embed"][step] += 0.5
        found.append(replace(found[-1], step=step, masters=masters, root=weights_root(published(masters))))
    return found


async def publish(blobs: Blobs, versions: list[State], *, full_every: int = 99) -> list[WeightsPublished]:
    records = []
    for previous, state in zip([None, *versions], versions, strict=False):
        packed = publishing.pack(state, previous, full_every=full_every)
        records.append(await publishing.store(blobs, packed, run_name="test", now_ms=0))
    return records


async def announce(bus: Bus, *records: WeightsPublished) -> None:
    for record in records:
        value, headers = encode(record, source="trainer", now_ms=0)
        await bus.produce([Message(WEIGHTS.name, b"test", value, headers)])


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110 - what the relay does in its own time
            await asyncio.sleep(0.005)


@asynccontextmanager
async def relaying(place: Place, bus: Bus, *addresses: str, **changes: Any) -> AsyncIterator[None]:
    settings: dict[str, Any] = {"poll_ms": 20, "retry_ms": 20, **changes}
    settings["stage_dir"] = str(place.directory / "replicas")
    stop = asyncio.Event()
    task = asyncio.create_task(
        weights.run(bus, RUN, RelayConfig(**settings), Blobs.open(place.store), addresses, stop)
    )
    try:
        yield
    finally:
        stop.set()
        await asyncio.wait_for(task, WAIT_S)


async def acks(bus: Bus, count: int) -> list[WeightsAck]:
    """All of them, once `count` different ones are there: a replica that was away for a moment is
    acknowledged anew."""
    found: list[WeightsAck] = []
    async with asyncio.timeout(WAIT_S), bus.reader({TopicPartition(WEIGHTS_ACKS.name, 0): 0}) as reader:
        while len({(ack.replica, ack.role, ack.version, ack.outcome) for ack in found}) < count:
            for delivery in await reader.read():
                found.append(decode_as(WeightsAck, delivery.value or b""))
    return found


def test_replicas_come_to_the_newest_version(place: Place) -> None:
    """Three versions were announced before the start: both replicas are asked for the last one, once; then
    they follow each new one. What they serve is acknowledged."""

    async def scenario() -> None:
        async with place.opened() as bus:
            records = await publish(Blobs.open(place.store), states(4))
            await announce(bus, *records[:3])
            a, b = Replica("a"), Replica("b")
            async with serving(a) as first, serving(b) as second, relaying(place, bus, first, second):
                await until(lambda: a.root == b.root == records[2].root)
                await announce(bus, records[3])
                await until(lambda: a.root == b.root == records[3].root)
                found = await acks(bus, 4)
            assert a.asked == b.asked == [2, 3]
            assert {(k.replica, k.version, k.outcome, k.root) for k in found} == {
                (name, version, "serving", records[version].root) for name in "ab" for version in (2, 3)
            }
            assert {k.pause_ms for k in found} == {1.5}
            staged = sorted((place.directory / "replicas" / "a").iterdir())
            assert [path.name[:9] for path in staged] == ["v00000002", "v00000003"]

    asyncio.run(scenario())


def test_staged_files_are_bounded(place: Place) -> None:
    """Five versions, two files kept."""

    async def scenario() -> None:
        async with place.opened() as bus:
            records = await publish(Blobs.open(place.store), states(5))
            replica = Replica()
            async with serving(replica) as address, relaying(place, bus, address):
                for record in records:
                    await announce(bus, record)
                    await until(lambda: replica.root == record.root)  # noqa: B023 - awaited here
            names = sorted(path.name[:9] for path in (place.directory / "replicas" / "r0").iterdir())
            assert names == ["v00000003", "v00000004"]

    asyncio.run(scenario())


def test_a_restarted_replica_is_brought_back(place: Place) -> None:
    """It comes back with nothing: the newest version is loaded and acknowledged anew."""

    async def scenario() -> None:
        async with place.opened() as bus:
            records = await publish(Blobs.open(place.store), states(2))
            await announce(bus, *records)
            first, again = Replica(), Replica()
            async with serving(first) as address, relaying(place, bus, address):
                await until(lambda: first.version == 1)
                first.version, first.root = 0, ""  # a restart too quick to be seen
                first.started_s = time.monotonic()
                await until(lambda: first.version == 1)
            assert first.asked == [1, 1]
            async with serving(again, address), relaying(place, bus, address):
                await until(lambda: again.root == records[1].root)

    asyncio.run(scenario())


def test_a_load_that_takes_too_long_is_not_sent_again(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer stays out, the replica is in the middle of it: one request, and the run goes on."""
    monkeypatch.setattr(weights, "LOADING_FACTOR", 60)
    monkeypatch.setattr(weights, "RESTART_S", 60.0)  # a stall between its clock and ours is no restart

    async def scenario() -> None:
        async with place.opened() as bus:
            records = await publish(Blobs.open(place.store), states(2))
            replica, go_on = Replica(), asyncio.Event()
            replica.pause = go_on.wait
            async with serving(replica) as address, relaying(place, bus, address, load_ms_max=1_000):
                await announce(bus, records[0])
                await until(lambda: replica.asked)
                looked = replica.looked
                await until(lambda: replica.looked > looked + 10)  # the answer stayed out, the relay looks
                assert replica.asked == [0]
                # The load ends in the replica, though its caller has long given up.
                replica.version, replica.root = 0, records[0].root
                replica.pause = None
                await announce(bus, records[1])
                await until(lambda: replica.version == 1)
                go_on.set()
            assert replica.asked == [0, 1]

    asyncio.run(scenario())


def test_a_refusal_is_said_once_and_tried_again(place: Place) -> None:
    """The replica keeps its version; the refusal is on the log with its reason; when it agrees, it serves."""

    async def scenario() -> None:
        async with place.opened() as bus:
            records = await publish(Blobs.open(place.store), states(1))
            replica = Replica()
            replica.refuse = "expected root x, got y"
            async with serving(replica) as address, relaying(place, bus, address):
                await announce(bus, *records)
                await until(lambda: len(replica.asked) >= 3)
                assert replica.root == ""
                replica.refuse = ""
                await until(lambda: replica.root)
                found = await acks(bus, 2)
            assert [(k.outcome, k.detail) for k in found] == [
                ("refused", "expected root x, got y"),
                ("serving", ""),
            ]

    asyncio.run(scenario())


def test_a_way_is_chosen_by_what_is_held(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """From nothing: the nearest snapshot and the deltas after it; then one delta; two deltas when behind."""
    fetched: list[str] = []

    async def scenario() -> None:
        blobs = Blobs.open(place.store)
        records = await publish(blobs, states(7), full_every=3)
        names = {e.uri: f"{e.kind}{r.version}" for r in records for e in r.encodings}
        real = blobs.get

        async def counting(uri: str, sha256: str) -> bytes:
            fetched.append(names[uri])
            return await real(uri, sha256)

        monkeypatch.setattr(blobs, "get", counting)
        versions = Versions(blobs, 99)
        for last, expected in (
            (4, ["full3", "delta4"]),
            (5, ["delta5"]),
            (6, ["delta6"]),  # a snapshot of 6 exists: a healthy holder does not need it
        ):
            for record in records[: last + 1]:
                versions.announce(record)
            held = await versions.obtain()
            assert (held.version, held.root) == (last, records[last].root)
            assert fetched == expected
            fetched.clear()
        behind = Versions(blobs, 99)
        behind.announce(records[0])
        await behind.obtain()
        for record in records[:3]:
            behind.announce(record)
        fetched.clear()
        await behind.obtain()
        assert fetched == ["delta1", "delta2"]

    asyncio.run(scenario())


def test_a_corrupt_delta_is_refetched_then_walked_around(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    """Delta 3 of 4 is damaged in the store: refused twice, then the snapshot of 3 and delta 4 lead there."""
    caplog.set_level(logging.INFO)

    async def scenario() -> None:
        blobs = Blobs.open(place.store)
        records = await publish(blobs, states(5), full_every=3)
        versions = Versions(blobs, 99)
        for record in records[:3]:
            versions.announce(record)
        assert (await versions.obtain()).version == 2
        damaged = place.directory / "store" / records[3].encodings[1].uri
        damaged.write_bytes(b"\0" + damaged.read_bytes()[1:])
        for record in records[3:]:
            versions.announce(record)
        held = await versions.obtain()
        assert (held.version, held.root) == (4, records[4].root)

    asyncio.run(scenario())
    assert caplog.text.count("refetch ") == 1
    assert "way_refused version=4 first=delta@3" in caplog.text


def test_no_way_keeps_the_old_version(place: Place) -> None:
    """Delta and snapshot gone: an error that names each way, and what was held is still held."""

    async def scenario() -> None:
        blobs = Blobs.open(place.store)
        records = await publish(blobs, states(2))
        versions = Versions(blobs, 99)
        versions.announce(records[0])
        before = await versions.obtain()
        for encoding in (*records[0].encodings, *records[1].encodings):
            await blobs.delete(encoding.uri)
        versions.announce(records[1])
        with pytest.raises(StoreError, match=r"weights 1: expected a way to root .* 2 that do not"):
            await versions.obtain()
        versions._announced.pop(1)
        assert await versions.obtain() == before

    asyncio.run(scenario())


def test_a_wrong_root_is_never_served(place: Place) -> None:
    """The blobs are what their hashes say, the announced root is another: refused."""

    async def scenario() -> None:
        blobs = Blobs.open(place.store)
        [record] = await publish(blobs, states(1))
        versions = Versions(blobs, 99)
        versions.announce(_with_root(record, "0" * 64))
        with pytest.raises(StoreError, match="expected root 0000"):
            await versions.obtain()

    asyncio.run(scenario())


def _with_root(record: WeightsPublished, root: str) -> WeightsPublished:
    return msgspec.structs.replace(record, root=root)


def test_a_delta_on_itself_is_no_way(place: Place) -> None:
    """An announcement whose base is its own version, or a newer one, ends the search instead of looping."""

    async def scenario() -> None:
        blobs = Blobs.open(place.store)
        records = await publish(blobs, states(3))
        [delta] = records[2].encodings
        for base in (2, 3):
            versions = Versions(blobs, 99)
            encoding = msgspec.structs.replace(delta, base_version=base)
            versions.announce(msgspec.structs.replace(records[2], encodings=(encoding,)))
            versions.announce(msgspec.structs.replace(records[2], version=3, encodings=(encoding,)))
            with pytest.raises(StoreError, match="no snapshot is announced"):
                await versions.obtain()

    asyncio.run(scenario())


def test_announcements_are_bounded(place: Place) -> None:
    """Three are remembered: the way from the snapshot of 0 to 4 is lost, the one from 3 is not."""

    async def scenario() -> None:
        blobs = Blobs.open(place.store)
        records = await publish(blobs, states(5), full_every=3)
        versions = Versions(blobs, 3)
        for record in records:
            versions.announce(record)
        held = await versions.obtain()
        assert held.version == 4
        assert torch.equal(held.weights["embed"][4], published(states(5)[4].masters)["embed"][4].bfloat16())

    asyncio.run(scenario())
