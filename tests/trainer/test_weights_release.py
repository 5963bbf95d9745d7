"""From records on `weights` to what live users are served: the relay and a real replica over gRPC."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch
from test_weights_relay import acks, announce, publish, states
from trainer_records import MODEL
from training_place import Place

from headrace.bus.protocol import Bus, Message
from headrace.config import RunConfig
from headrace.consumers import weights
from headrace.consumers.config import RelayConfig
from headrace.consumers.versions import Versions
from headrace.inference import server
from headrace.inference.config import InferenceConfig
from headrace.policy import checkpoint
from headrace.policy.model import initial_weights
from headrace.rpc.client import InferenceClient
from headrace.rpc.generation import Completion, Generation, ReplicaStatus
from headrace.rpc.generation import Sequence as Member
from headrace.store.blobs import Blobs
from headrace.wire.codec import encode
from headrace.wire.records import Record, WeightsPromoted, WeightsRevoked
from headrace.wire.release import Mode, ReleaseConfig, in_cohort
from headrace.wire.topics import WEIGHTS

RUN = RunConfig(name="test")
INFERENCE = InferenceConfig(slots=4, live_slots=1, own_tokens_max=32, replica="r0")
WAIT_S = 60.0


@asynccontextmanager
async def replica(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[InferenceClient]:
    monkeypatch.setattr(checkpoint, "load_seed", lambda: (MODEL, initial_weights(MODEL, 1), None))
    stop = asyncio.Event()
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(server.run(INFERENCE, stop, ready.set_result))
    try:
        async with InferenceClient(await asyncio.wait_for(ready, WAIT_S)) as client:
            yield client
    finally:
        stop.set()
        await asyncio.wait_for(task, WAIT_S)


@asynccontextmanager
async def relaying(place: Place, bus: Bus, client: InferenceClient, mode: Mode) -> AsyncIterator[None]:
    config = RelayConfig(poll_ms=20, retry_ms=50, stage_dir=str(place.directory / "replicas"))
    stop = asyncio.Event()
    blobs = Blobs.open(place.store)
    task = asyncio.create_task(
        weights.run(bus, RUN, config, blobs, [client.address], stop, release=ReleaseConfig(mode=mode))
    )
    try:
        yield
    finally:
        stop.set()
        await asyncio.wait_for(task, WAIT_S)


async def say(bus: Bus, *records: Record) -> None:
    for record in records:
        value, headers = encode(record, source="test", now_ms=0)
        await bus.produce([Message(WEIGHTS.name, b"test", value, headers)])


async def until(
    client: InferenceClient, newest: int, stable: int | None, canary: int | None
) -> ReplicaStatus:
    """The status, once the replica serves these."""
    async with asyncio.timeout(WAIT_S):
        while True:
            status = await client.status(timeout_s=WAIT_S)
            if (status.version, status.stable, status.canary) == (newest, stable, canary) and status.root:
                return status
            await asyncio.sleep(0.01)


async def answer(client: InferenceClient, user: str) -> Completion:
    request = Generation(
        run="test",
        group_id=f"s-{user}",
        lane="live",
        prefix_tokens=(5, 6, 7),
        sequences=(Member(member=0),),
        tokens_max=2,
        seed=1,
        user=user,
    )
    [completion] = await client.generate(request, timeout_s=WAIT_S)
    return completion


def users(version: int, share: float) -> tuple[str, str]:
    """One of the cohort and one who isn't."""
    names = [f"u{number}" for number in range(100)]
    inside = [name for name in names if in_cohort("test", version, name, share)]
    return inside[0], next(name for name in names if name not in inside)


def by_hand(version: int, *, pinned: bool = False) -> WeightsPromoted:
    return WeightsPromoted(run="test", version=version, share=1.0, pinned=pinned, by="hand")


def test_a_release_and_its_end(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Version 0 is stable, 1 the canary for half of the users, 2 the newest: each user has their side.
    Version 1 is revoked: at once nobody has it. A replica never holds more than three sets, and acknowledges
    each side."""

    async def scenario() -> None:
        place = Place(tmp_path)
        async with place.opened() as bus, replica(monkeypatch) as client:
            records = await publish(Blobs.open(place.store), states(3))
            await announce(bus, records[0], records[1])
            await say(bus, WeightsPromoted(run="test", version=0, share=1.0))
            await say(bus, WeightsPromoted(run="test", version=1, share=0.5))
            async with relaying(place, bus, client, "gradual"):
                await until(client, 1, 0, 1)
                await announce(bus, records[2])
                status = await until(client, 2, 0, 1)
                assert (sorted(v for v, _ in status.hosted), status.share) == ([0, 1, 2], 0.5)
                inside, outside = users(1, 0.5)
                first, second = await answer(client, inside), await answer(client, outside)
                assert (first.cohort, first.weights_version) == ("canary", 1)
                assert (second.cohort, second.weights_version) == ("stable", 0)
                await say(bus, WeightsRevoked(run="test", version=1))
                status = await until(client, 2, 0, None)
                assert sorted(version for version, _ in status.hosted) == [0, 2]
                assert (await answer(client, inside)).weights_version == 0
                await say(bus, WeightsPromoted(run="test", version=2, share=1.0))
                await until(client, 2, 2, None)
            found = {(ack.role, ack.version) for ack in await acks(bus, 5)}
            assert found == {("", 1), ("", 2), ("stable", 0), ("canary", 1), ("stable", 2)}

    asyncio.run(scenario())


def test_a_restarted_relay_builds_what_serves(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Relay and replica start with nothing while version 1 is stable and 4 the newest: live users wait for
    the stable version, and never see the newest."""

    async def scenario() -> None:
        place = Place(tmp_path)
        async with place.opened() as bus, replica(monkeypatch) as client:
            records = await publish(Blobs.open(place.store), states(5))
            await announce(bus, *records)
            await say(bus, WeightsPromoted(run="test", version=1, share=1.0))
            async with relaying(place, bus, client, "gradual"):
                await until(client, 4, 1, None)
                assert (await answer(client, "u1")).weights_version == 1

    asyncio.run(scenario())


def test_immediate_release_knows_pins_and_revocations(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Without a canary every version serves all, whatever a canary once said; a pin holds live users, not
    rollouts; unpin and the revocation of the newest do what they say."""

    async def scenario() -> None:
        place = Place(tmp_path)
        async with place.opened() as bus, replica(monkeypatch) as client:
            records = await publish(Blobs.open(place.store), states(3))
            await announce(bus, *records[:2])
            await say(bus, WeightsPromoted(run="test", version=0, share=1.0))
            async with relaying(place, bus, client, "immediate"):
                await until(client, 1, None, None)
                await say(bus, by_hand(0, pinned=True))
                await announce(bus, records[2])
                await until(client, 2, 0, None)
                assert (await answer(client, "u1")).weights_version == 0
                await say(bus, by_hand(0))
                await until(client, 2, None, None)
                await say(bus, WeightsRevoked(run="test", version=2, by="hand"))
                await until(client, 2, 1, None)

    asyncio.run(scenario())


def test_weights_that_are_not_finite_are_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A NaN gets through store and delta with the right root: the replica refuses it, and the acknowledgement
    says that no replica could serve it."""

    async def scenario() -> None:
        place = Place(tmp_path)
        versions = states(2)
        versions[1].masters["embed"][3] = torch.nan
        broken = checkpoint.weights_root({k: v.bfloat16() for k, v in versions[1].masters.items()})
        object.__setattr__(versions[1], "root", broken)
        async with place.opened() as bus, replica(monkeypatch) as client:
            records = await publish(Blobs.open(place.store), versions)
            await announce(bus, *records)
            await say(bus, WeightsPromoted(run="test", version=0, share=1.0))
            await say(bus, WeightsPromoted(run="test", version=1, share=0.5))
            async with relaying(place, bus, client, "gradual"):
                found = await acks(bus, 1)
            first = next(ack for ack in found if ack.version == 1)  # as the newest it is refused right after
            assert (first.role, first.outcome, first.unfit) == ("canary", "refused", True)
            assert "expected finite numbers" in first.detail

    asyncio.run(scenario())


def test_what_serves_is_not_forgotten(tmp_path: Path) -> None:
    """Of ten announcements three are remembered; version 4, which users have, stays with the delta and the
    snapshot that lead to it."""

    async def scenario() -> None:
        blobs = Blobs.open(Place(tmp_path).store)
        records = await publish(blobs, states(10), full_every=3)
        versions = Versions(blobs, versions_max=3)
        for record in records:
            versions.announce(record)
            versions.need([4] if record.version >= 4 else [])
        assert (await versions.obtain(4)).root == records[4].root
        assert (await versions.obtain()).root == records[9].root
        remembered: Sequence[int] = [r.version for r in records if versions.root_of(r.version)]
        assert remembered == [3, 4, 9]

    asyncio.run(scenario())
