"""The checker notices what it is for: a sound log passes, and each planted fault is named."""

import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from checker import Log, audit, unaccounted

from headrace.bus.protocol import Delivery
from headrace.wire import records as r
from headrace.wire.codec import encode

RUN = "run"
LAG_VERSIONS_MAX = 1
STEPS = 3


def prompt(group: str) -> r.Prompt:
    return r.Prompt(
        run=RUN,
        group_id=group,
        env="e",
        task_id="t",
        seed=0,
        group_size=1,
        sampling=r.Sampling(),
        components={"tests": 1.0},
        weights_version=0,
        admitted_ms=0,
        deadline_ms=1,
    )


def experience(group: str, version: int) -> r.Experience:
    """A closed group of one member, whose turn was generated under `version`."""
    turn = r.RolloutStep(
        run=RUN,
        group_id=group,
        member=0,
        attempt=1,
        step=0,
        last=True,
        source="sim",
        base_length=0,
        prefix_length=1,
        tokens_in=b"",
        tokens_out=b"",
        logp=b"",
        loss_mask=b"",
        spans=(r.Span(start=0, end=1, weights_version=version),),
        weights_version=version,
        finish="stop",
        temperature=1.0,
        started_ms=0,
        ended_ms=0,
    )
    rollout = r.Rollout(member=0, attempt=1, steps=(turn,), components={}, reward=1.0)
    return r.Experience(
        run=RUN,
        group_id=group,
        source="sim",
        env="e",
        task_id="t",
        group_size=1,
        rollouts=(rollout,),
        closed="complete",
        admitted_version=0,
        opened_ms=0,
        closed_ms=0,
    )


def step(number: int) -> r.TrainStep:
    """Step N reads groups aN (trained) and bN (dropped), of partition 0, at offsets 2N - 2 and 2N - 1."""
    first = 2 * number - 2
    groups = (f"a{number}", f"b{number}")
    return r.TrainStep(
        run=RUN,
        step=number,
        version_from=number - 1,
        version_to=number,
        consumed=tuple(
            r.Consumed(topic="experience", partition=0, offset=first + i, group_id=group)
            for i, group in enumerate(groups)
        ),
        positions={"experience/0": first + 2},
        admitted=groups[:1],
        drops=(r.Drop(group_id=groups[1], reason="zero_advantage"),),
        config=json.dumps({"run": {"lag_versions_max": LAG_VERSIONS_MAX}}),
        config_sha256="",
        seed=0,
        code="",
        libraries={},
        threads=1,
        kernel_probe="",
        metrics={},
        root_before=f"root{number - 1}",
        root_after=f"root{number}",
        started_ms=0,
        ended_ms=0,
    )


def published(version: int) -> r.WeightsPublished:
    return r.WeightsPublished(
        run=RUN,
        version=version,
        root=f"root{version}",
        step=version,
        manifest_uri="",
        manifest_sha256="",
        encodings=(),
        published_ms=0,
    )


def sound() -> dict[str, list[r.Record]]:
    """Three steps over six groups, and a seventh that is in flight."""
    groups = [name for number in range(1, STEPS + 1) for name in (f"a{number}", f"b{number}")]
    acks = [
        r.WeightsAck(run=RUN, region="x", replica="y", version=2, root="root2", outcome="serving", acked_ms=0)
    ]
    return {
        "prompts": [prompt(group) for group in [*groups, "late"]],
        "experience": [experience(group, version=index // 2) for index, group in enumerate(groups)],
        "train.steps": [step(number) for number in range(1, STEPS + 1)],
        "weights": [published(version) for version in range(STEPS + 1)],
        "weights.acks": list(acks),
    }


def as_log(records: dict[str, list[r.Record]]) -> Log:
    def delivery(topic: str, offset: int, record: r.Record) -> Delivery:
        value, headers = encode(record, source="test", now_ms=0)
        return Delivery(topic, 0, offset, 0, b"k", value, headers)

    return {
        topic: [delivery(topic, offset, record) for offset, record in enumerate(found)]
        for topic, found in records.items()
    }


def changed(record: Any, **fields: Any) -> Any:
    return msgspec.structs.replace(record, **fields)


def edit(topic: str, index: int, **fields: Any) -> Callable[[dict[str, list[r.Record]]], None]:
    """A fault: other `fields` in one record."""

    def act(records: dict[str, list[r.Record]]) -> None:
        records[topic][index] = changed(records[topic][index], **fields)

    return act


def drop(topic: str, index: int) -> Callable[[dict[str, list[r.Record]]], None]:
    return lambda records: records[topic].__delitem__(index)


def again(topic: str, index: int) -> Callable[[dict[str, list[r.Record]]], None]:
    return lambda records: records[topic].append(records[topic][index])


def passed_over(records: dict[str, list[r.Record]]) -> None:
    """A seventh group lies before the last position, and no step consumed it."""
    records["experience"].append(experience("late", 0))
    edit("train.steps", 2, positions={"experience/0": 7})(records)


FAULTS = {
    "train.steps: expected step 2, found 3": drop("train.steps", 1),
    "train.steps: expected step 4, found 3": again("train.steps", 2),
    "step 2: goes from version 0 to 2": edit("train.steps", 1, version_from=0),
    "step 2: begins with root other, which no step left": edit("train.steps", 1, root_before="other"),
    "step 3: leaves another root than was announced": edit("train.steps", 2, root_after="other"),
    "weights: expected versions 0..3 once each, found [0, 1, 2, 3, 3]": again("weights", 3),
    "weights: expected versions 0..3 once each, found [0, 2, 3]": drop("weights", 1),
    "weights.acks: y serves root other as version 2": edit("weights.acks", 0, root="other"),
    "a1: issued 2 times": again("prompts", 0),
    "a1: closed 2 times": again("experience", 0),
    "a2: closed, and was never issued": drop("prompts", 2),
    "('experience', 0, 0): consumed 2 times": edit(
        "train.steps", 1, consumed=step(1).consumed, admitted=("a1",)
    ),
    "a1: trained 2 times": edit("train.steps", 1, admitted=("a1",)),
    "step 1: b1: 1 read, 0 answered": edit("train.steps", 0, drops=()),
    "step 1: zzz: 0 read, 1 answered": edit("train.steps", 0, admitted=("a1", "zzz")),
    "step 1: b1: dropped without a reason": edit("train.steps", 0, drops=(r.Drop(group_id="b1", reason=""),)),
    "step 1: ('experience', 0, 1): malformed, and no dead letter tells": edit(
        "train.steps", 0, drops=(r.Drop(group_id="b1", reason="malformed"),)
    ),
    "step 3: ('experience', 0, 5): consumed, and the log has no such record": drop("experience", 5),
    "step 1: ('experience', 0, 0): consumed as a1, it is other": edit("experience", 0, group_id="other"),
    "step 3: experience/0 goes back to 3": edit("train.steps", 2, positions={"experience/0": 3}),
    "step 3: consumes experience[0]@5, past itself": edit("train.steps", 2, positions={"experience/0": 5}),
    "experience[0]@6: passed over by the trainer": passed_over,
    "step 3: a3/0: trained at lag 2": edit("experience", 4, rollouts=experience("a3", version=0).rollouts),
}


def test_a_sound_log_passes() -> None:
    """Three steps in order; only the prompt in flight is without a fate."""
    assert audit(as_log(sound()), RUN) == []
    assert unaccounted(as_log(sound()), RUN) == ["late"]
    assert audit(as_log(sound()), "other") == ["weights: expected versions 0..0 once each, found []"]


@pytest.mark.parametrize("told", FAULTS)
def test_a_planted_fault_is_named(told: str) -> None:
    """One record too few, too many, or with another field: the sentence about it is among those told."""
    records = sound()
    FAULTS[told](records)
    assert told in audit(as_log(records), RUN)


def test_a_withheld_member_is_not_trained_too_late() -> None:
    """A member over the bound that was withheld, with its reason, is as it should be."""
    records = sound()
    edit("experience", 4, rollouts=experience("a3", version=0).rollouts)(records)
    drops = (*step(3).drops, r.Drop(group_id="a3", member=0, reason="stale"))
    edit("train.steps", 2, drops=drops)(records)
    assert audit(as_log(records), RUN) == []


def test_bytes_that_are_no_record_have_to_be_answered_too() -> None:
    """Junk before the trainer's position, which no step consumed, was passed over in silence."""
    records = sound()
    edit("train.steps", 2, positions={"experience/0": 7})(records)
    log = {topic: list(found) for topic, found in as_log(records).items()}
    log["experience"].append(Delivery("experience", 0, 6, 0, b"junk", b"\xc1", ()))
    assert audit(log, RUN) == ["experience[0]@6: passed over by the trainer"]
