"""The checker notices what it is for: a sound log passes, and each planted fault makes its own complaint."""

import hashlib
import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from checker import Log, audit, committed_wrongly, in_flight, unaccounted
from headrace.bus.protocol import Delivery, TopicPartition
from headrace.wire import records as r
from headrace.wire.codec import encode

RUN = "run"
LAG_VERSIONS_MAX = 1
STEPS = 3
Records = dict[str, list[r.Record]]
Fault = Callable[[Records], None]
CONFIG = json.dumps({"run": {"lag_versions_max": LAG_VERSIONS_MAX}})


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
    rollout = r.Rollout(
        member=0, attempt=1, steps=(turn(group, version),), components={"tests": 1.0}, reward=1.0
    )
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


def turn(group: str, version: int) -> r.RolloutStep:
    return r.RolloutStep(
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


def reward(group: str) -> r.Reward:
    return r.Reward(run=RUN, group_id=group, member=0, attempt=1, component="tests", value=1.0)


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
        config=CONFIG,
        config_sha256=hashlib.sha256(CONFIG.encode()).hexdigest(),
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


def sound() -> Records:
    """Three steps over six groups, and a seventh that is in flight."""
    groups = [name for number in range(1, STEPS + 1) for name in (f"a{number}", f"b{number}")]
    acks = [
        r.WeightsAck(run=RUN, region="x", replica="y", version=2, root="root2", outcome="serving", acked_ms=0)
    ]
    return {
        "prompts": [prompt(group) for group in [*groups, "late"]],
        "rollout.steps": [turn(group, version=index // 2) for index, group in enumerate(groups)],
        "rewards": [reward(group) for group in groups],
        "experience": [experience(group, version=index // 2) for index, group in enumerate(groups)],
        "train.steps": [step(number) for number in range(1, STEPS + 1)],
        "weights": [published(version) for version in range(STEPS + 1)],
        "weights.acks": list(acks),
    }


def as_log(records: Records) -> Log:
    def delivery(topic: str, offset: int, record: r.Record) -> Delivery:
        value, headers = encode(record, source="test", now_ms=0)
        return Delivery(topic, 0, offset, 0, b"k", value, headers)

    return {
        topic: [delivery(topic, offset, record) for offset, record in enumerate(found)]
        for topic, found in records.items()
    }


def changed(record: Any, **fields: Any) -> Any:
    return msgspec.structs.replace(record, **fields)


def edit(topic: str, index: int, **fields: Any) -> Fault:
    """A fault: other `fields` in one record."""

    def act(records: Records) -> None:
        records[topic][index] = changed(records[topic][index], **fields)

    return act


def drop(topic: str, index: int) -> Fault:
    return lambda records: records[topic].__delitem__(index)


def again(topic: str, index: int) -> Fault:
    return lambda records: records[topic].append(records[topic][index])


def both(*faults: Fault) -> Fault:
    def act(records: Records) -> None:
        for fault in faults:
            fault(records)

    return act


def also_closed(group: str, version: int = 0) -> Fault:
    """A group more, rolled out, judged and closed behind the others."""
    return both(
        lambda records: records["rollout.steps"].append(turn(group, version)),
        lambda records: records["rewards"].append(reward(group)),
        lambda records: records["experience"].append(experience(group, version)),
    )


def renumbered(records: Records) -> None:
    """The prompts get the feed's own ids, and one is left out."""
    for number in (0, 1, 3):
        records["prompts"].append(prompt(f"{RUN}-{number:07d}"))


def stale(group: str, index: int) -> Fault:
    """`group`, the one at `index`, was generated under the seed."""
    return both(
        edit("rollout.steps", index, spans=turn(group, 0).spans, weights_version=0),
        edit("experience", index, rollouts=experience(group, 0).rollouts),
    )


def rollouts(**fields: Any) -> tuple[r.Rollout, ...]:
    """Of group a1, with other `fields`."""
    return (changed(experience("a1", 0).rollouts[0], **fields),)


A1 = "('experience', 0, 0)"
TRAINED_AGAIN = edit(
    "train.steps",
    1,
    consumed=(*step(2).consumed, step(1).consumed[0]),
    admitted=(*step(2).admitted, "a1"),
)

FAULTS: dict[str, tuple[Fault, list[str]]] = {
    "a unit trained twice": (TRAINED_AGAIN, [f"{A1}: consumed 2 times", "a1: trained 2 times"]),
    "a skipped offset": (
        both(also_closed("late"), edit("train.steps", 2, positions={"experience/0": 7})),
        ["experience[0]@6: passed over by the trainer"],
    ),
    "an aborted transaction counted": (
        drop("experience", 5),
        ["step 3: ('experience', 0, 5): consumed, and the log has no such record"],
    ),
    "a changed reward": (
        edit("experience", 0, rollouts=rollouts(reward=0.5)),
        [f"{A1}: a1/0: reward 0.5, its parts make 1.0"],
    ),
    "a changed component": (
        edit("experience", 0, rollouts=rollouts(components={"tests": 0.0}, reward=0.0)),
        [f"{A1}: a1/0: tests 0.0, which nobody judged"],
    ),
    "a changed token": (
        edit("experience", 0, rollouts=rollouts(steps=(changed(turn("a1", 0), tokens_out=b"0000"),))),
        [f"{A1}: a1/0: holds a turn that no worker wrote"],
    ),
    "a prompt left out": (renumbered, ["prompts: number 2 was never issued"]),
    "a prompt issued twice": (again("prompts", 0), ["a1: issued 2 times"]),
    "a group closed twice": (again("experience", 0), ["a1: closed 2 times"]),
    "a group from nowhere": (
        also_closed("zzz"),
        [
            "('experience', 0, 6): zzz/0: reward 1.0, its parts make 0",
            "zzz: closed, and was never issued",
        ],
    ),
    "an admitted unit that nobody closed": (
        edit("train.steps", 0, admitted=("a1", "zzz")),
        ["step 1: zzz: 0 read, 1 answered"],
    ),
    "a unit without a fate": (edit("train.steps", 0, drops=()), ["step 1: b1: 1 read, 0 answered"]),
    "a drop without reason": (
        edit("train.steps", 0, drops=(r.Drop(group_id="b1", reason=""),)),
        ["step 1: b1: dropped without a reason"],
    ),
    "a dead letter that is missing": (
        edit("train.steps", 0, drops=(r.Drop(group_id="b1", reason="malformed"),)),
        ["step 1: ('experience', 0, 1): malformed, and no dead letter tells"],
    ),
    "another unit at the place": (
        edit("train.steps", 0, consumed=(changed(step(1).consumed[0], group_id="b9"), step(1).consumed[1])),
        [
            "step 1: b9: 1 read, 0 answered",
            "step 1: a1: 0 read, 1 answered",
            f"step 1: {A1}: consumed as b9, it is a1",
        ],
    ),
    "a hole in the ledger": (
        drop("train.steps", 1),
        [
            "train.steps: expected step 2, found 3",
            "step 3: begins with root root2, which no step left",
            "weights: expected versions 0..2 once each, found [0, 1, 2, 3]",
            "experience[0]@2: passed over by the trainer",
            "experience[0]@3: passed over by the trainer",
        ],
    ),
    "a step that leads to another version": (
        edit("train.steps", 1, version_to=7),
        ["step 2: goes from version 1 to 7"],
    ),
    "a broken root chain": (
        edit("train.steps", 1, root_before="other"),
        [
            "step 2: begins with root other, which no step left",
            "step 2: begins with another root than was announced",
        ],
    ),
    "another root announced": (
        edit("train.steps", 2, root_after="other"),
        ["step 3: leaves another root than was announced"],
    ),
    "a version announced twice": (
        again("weights", 3),
        ["weights: expected versions 0..3 once each, found [0, 1, 2, 3, 3]"],
    ),
    "a version never announced": (
        drop("weights", 1),
        ["weights: expected versions 0..3 once each, found [0, 2, 3]"],
    ),
    "another root served": (
        edit("weights.acks", 0, root="other"),
        ["weights.acks: y serves root other as version 2"],
    ),
    "settings changed afterwards": (
        edit("train.steps", 1, config=CONFIG + " "),
        ["step 2: its settings are not those of their hash"],
    ),
    "a position that goes back": (
        both(
            edit("train.steps", 0, positions={"experience/0": 2, "experience/1": 5}),
            edit("train.steps", 1, positions={"experience/0": 4, "experience/1": 3}),
        ),
        ["step 2: experience/1 goes back to 3"],
    ),
    "a unit consumed past the position": (
        edit("train.steps", 2, positions={"experience/0": 5}),
        ["step 3: consumes experience[0]@5, past itself"],
    ),
    "a stale unit trained": (stale("a3", 4), ["step 3: a3/0: trained at lag 2"]),
}


def test_a_sound_log_passes() -> None:
    """Three steps in order; only the prompt in flight is without a fate."""
    assert audit(as_log(sound()), RUN) == []
    assert unaccounted(as_log(sound()), RUN) == ["late"]
    assert audit(as_log(sound()), "other") == ["weights: expected versions 0..0 once each, found []"]


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_makes_its_own_complaint(name: str) -> None:
    """One record too few, too many, or with another field: told by what is said of it, and by nothing
    else."""
    fault, told = FAULTS[name]
    records = sound()
    fault(records)
    assert audit(as_log(records), RUN) == told


def test_every_fault_has_another_complaint() -> None:
    """What is said tells the faults apart."""
    assert len({tuple(told) for _, told in FAULTS.values()}) == len(FAULTS)


def test_a_prompt_in_flight_is_somewhere() -> None:
    """Issued and not taken, rolled out and not joined, closed and not read: each is known by its place; a
    prompt that a worker has committed and nobody has written about is lost."""
    place = TopicPartition("prompts", 0)
    taken = {place: 2 * STEPS + 1}
    records = sound()
    assert in_flight(as_log(records), RUN, {}) == ({"late": "issued, for a worker to roll out"}, [])
    lost = "late: lost: the workers are past ('prompts', 0, 6), and its records are not whole"
    assert in_flight(as_log(records), RUN, taken) == ({}, [lost])
    records["rollout.steps"].append(turn("late", 0))
    assert in_flight(as_log(records), RUN, taken) == ({}, [lost])
    records["rewards"].append(reward("late"))
    assert in_flight(as_log(records), RUN, taken) == ({"late": "rolled out, for the join to close"}, [])
    records["experience"].append(experience("late", 0))
    assert in_flight(as_log(records), RUN, taken) == ({"late": "closed, for the trainer to read"}, [])


def test_a_group_given_up_or_too_late_is_not_lost() -> None:
    """The join closes it without its records."""
    taken = {TopicPartition("prompts", 0): 2 * STEPS + 1}
    records = sound()
    edit("prompts", 6, deadline_ms=0)(records)
    found = {"late": "past its deadline, for the join to close"}
    assert in_flight(as_log(records), RUN, taken) == (found, [])
    records = sound()
    records["rollout.steps"].append(r.GroupFailed(run=RUN, group_id="late", attempt=1, reason="no sandbox"))
    found = {"late": "rolled out, for the join to close"}
    assert in_flight(as_log(records), RUN, taken) == (found, [])


def test_offsets_are_those_of_the_last_step() -> None:
    """Positions committed without their step, or a step without its positions, are told."""
    place, log = TopicPartition("experience", 0), as_log(sound())
    assert committed_wrongly(log, RUN, {place: 6}) == []
    for position in (4, 8, None):
        told = f"trainer-run: committed experience[0]@{position}, the ledger ends at 6"
        assert committed_wrongly(log, RUN, {} if position is None else {place: position}) == [told]


def test_a_withheld_member_is_not_trained_too_late() -> None:
    """A member over the bound that was withheld, with its reason, is as it should be."""
    records = sound()
    stale("a3", 4)(records)
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
