"""Units that rolled-back weights generated: marked in the ledger, not trained, and computed again as they
were."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
from trainer_records import MODEL, consumed, experience, pair, rollout
from training_place import Place, messages

from headrace.bus.protocol import Bus, Message
from headrace.cli.accounts import TRAINABLE
from headrace.cli.accounts_verdict import verdict
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


@pytest.mark.parametrize(
    ("turns", "expected"),
    [
        ([], "malformed"),
        ([((), range(9, 25))], "over_long"),
        ([((), ())], "empty"),
        ([((), (9, 10))], "revoked"),
    ],
)
def test_what_the_records_say_comes_before_the_mark(turns: list[Any], expected: str) -> None:
    """The mark hangs on the step that read the unit, so `headrace account` could not know it from the topics:
    a unit that is wrong by itself is dropped for that, marked or not."""
    record = experience("a", [rollout(0, 1.0, turns), rollout(1, 0.0, turns)])
    answer = admit(
        [Entry(msgspec.structs.replace(consumed("a"), revoked=True), record)],
        version=0,
        seen=(),
        model=MODEL,
        lag_versions_max=2,
        sequence_tokens_max=16,
        scale_std=False,
    )
    assert [drop.reason for drop in answer.drops] == [expected]
    by_topics = verdict(record, sequence_tokens_max=16)
    assert by_topics == (TRAINABLE if expected == "revoked" else expected)


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
