"""Units that rolled-back weights generated: marked in the ledger, not trained, and computed again as they
were."""

import asyncio
from pathlib import Path

import msgspec
from trainer_records import MODEL, consumed, pair
from training_place import Place, messages

from headrace.bus.protocol import Bus, Message
from headrace.consumers.batches import entries_of
from headrace.store.blobs import Blobs
from headrace.trainer.admission import Entry, admit
from headrace.wire.codec import encode
from headrace.wire.records import Record, WeightsPromoted, WeightsRevoked
from headrace.wire.topics import WEIGHTS


async def say(bus: Bus, record: Record) -> None:
    value, headers = encode(record, source="hand", now_ms=0)
    await bus.produce([Message(WEIGHTS.name, b"test", value, headers)])


def test_the_mark_decides_and_policy_may_overrule() -> None:
    """Of two good units the marked one is dropped as revoked; with `train_revoked` both are trained."""
    marked = msgspec.structs.replace(consumed("b", 1), revoked=True)
    entries = [Entry(consumed("a"), pair("a")), Entry(marked, pair("b"))]
    trained = {}
    for policy in (False, True):
        answer = admit(
            entries,
            version=0,
            seen=(),
            model=MODEL,
            lag_versions_max=2,
            sequence_tokens_max=16,
            scale_std=False,
            train_revoked=policy,
        )
        trained[policy] = [unit.group_id for unit in answer.units]
        assert [(drop.group_id, drop.reason) for drop in answer.drops] == [("b", "revoked")] * (not policy)
        assert answer.read == ["a", "b"]
    assert trained == {False: ["a"], True: ["a", "b"]}


def test_the_ledger_alone_says_what_was_revoked(tmp_path: Path) -> None:
    """Version 0 is revoked before step 1, another run's is no matter, and a person takes it back before step
    2. Whoever reads the records of step 1 again finds them marked, though nothing is revoked any more."""

    async def scenario() -> None:
        place = Place(tmp_path / "here")
        async with place.opened() as bus:
            await bus.produce(messages(place.groups(6), partition=0))
            await say(bus, WeightsRevoked(run="another", version=1))
            await say(bus, WeightsRevoked(run="test", version=0, by="hand"))
            [first] = await place.train(bus, place.until(1))
            assert {(drop.group_id, drop.reason) for drop in first.drops} == {
                (unit, "revoked") for unit in place.units(2)
            }
            assert [unit.revoked for unit in first.consumed] == [True, True]
            assert first.root_after == first.root_before
            await say(bus, WeightsPromoted(run="test", version=0, share=1.0, by="hand"))
            steps = await place.train(bus, place.until(3))
            assert [len(step.admitted) for step in steps] == [0, 2, 2]
            assert not any(unit.revoked for step in steps[1:] for unit in step.consumed)
            assert steps[1].root_after != steps[1].root_before
            for step, marked in zip(steps, (True, False, False), strict=True):
                entries = await entries_of(bus, Blobs.open(place.store), step)
                assert [entry.consumed.revoked for entry in entries] == [marked] * 2

    asyncio.run(scenario())
