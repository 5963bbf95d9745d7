"""An independent reader of a run's log: does what stands there keep the promises?

It knows the records and the bus, and nothing of the code that wrote them: not the trainer's, not the join's,
not the feed's. `audit` is a pure function of the deliveries, and answers with one sentence for each broken
promise, its place first. Not here: blobs, and computing a step again (`chaos.verdict`). Not tests.
"""

import hashlib
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from headrace.bus.protocol import Bus, Delivery, Positions, TopicPartition
from headrace.errors import WireError
from headrace.wire.codec import decode
from headrace.wire.records import (
    DeadLetter,
    Experience,
    GroupFailed,
    Prompt,
    Record,
    Reward,
    Rollout,
    RolloutStep,
    TrainStep,
    WeightsAck,
    WeightsPublished,
)

READ = (
    *("prompts", "rollout.steps", "rewards", "experience"),
    *("train.steps", "weights", "weights.acks", "dead.letters"),
)

Log = Mapping[str, Sequence[Delivery]]
"""Deliveries by topic."""
Place = tuple[str, int, int]
"""Topic, partition, offset."""


async def read_log(bus: Bus) -> dict[str, list[Delivery]]:
    """All that is committed of the topics that an audit needs."""
    log: dict[str, list[Delivery]] = {name: [] for name in READ}
    begins, ends = await bus.begins(list(READ)), await bus.ends(list(READ))
    for tp, end in ends.items():
        log[tp.topic] += [delivery async for delivery in bus.read_range(tp, begins[tp], end)]
    return log


def audit(log: Log, run: str) -> list[str]:
    """What is wrong with the run, in sentences; [] when nothing is."""
    view = _View.of(log, run)
    return [
        *_issued_in_order(view),
        *_joined(view),
        *_ledger(view),
        *_weights(view),
        *_once(view),
        *_answered(view),
        *_read_in_full(view),
        *_lag(view),
    ]


def unaccounted(log: Log, run: str) -> list[str]:
    """Prompts of the run that no step has trained or dropped, oldest first: [] once a run has come to its
    end."""
    view = _View.of(log, run)
    return list(_open(view))


def in_flight(log: Log, run: str, workers: Positions) -> tuple[dict[str, str], list[str]]:
    """Where each unaccounted prompt is, by its group, and what is wrong: a prompt that nothing will bring on.

    `workers`: what the consumer group of the run's workers has committed. A stopped run is meant: on one that
    goes on, the positions are older than the log.
    """
    view = _View.of(log, run)
    reached_ms = max((delivery.timestamp_ms for found in log.values() for delivery in found), default=0)
    read = _reached(view.steps[-1]) if view.steps else {}
    closed = {record.group_id: place for place, record in view.experience.items() if record is not None}
    found, lost = {}, []
    for group_id, (place, prompt) in _open(view).items():
        topic, partition, offset = place
        if group_id in closed:
            if closed[group_id][2] >= read.get(closed[group_id][:2], 0):  # if not, `audit` tells
                found[group_id] = "closed, for the trainer to read"
        elif offset >= workers.get(TopicPartition(topic, partition), 0):
            found[group_id] = "issued, for a worker to roll out"
        elif view.written_in_full(prompt):
            found[group_id] = "rolled out, for the join to close"
        elif prompt.deadline_ms <= reached_ms:
            found[group_id] = "past its deadline, for the join to close"
        else:
            lost.append(f"{group_id}: lost: the workers are past {place}, and its records are not whole")
    return found, lost


def committed_wrongly(log: Log, run: str, trainer: Positions) -> list[str]:
    """Positions of the trainer's consumer group that are not those of the ledger's last step: an offset that
    was counted without its step, or a step without its offsets."""
    view = _View.of(log, run)
    return [
        f"trainer-{run}: committed {TopicPartition(*tp)}@{trainer.get(TopicPartition(*tp))}, the ledger ends"
        f" at {position}"
        for tp, position in (_reached(view.steps[-1]) if view.steps else {}).items()
        if trainer.get(TopicPartition(*tp)) != position
    ]


@dataclass(frozen=True, slots=True)
class _View:
    """The records of one run, in the order of the log."""

    run: str
    prompts: list[tuple[Place, Prompt]] = field(default_factory=list)
    turns: dict[tuple[str, int, int], list[RolloutStep]] = field(default_factory=lambda: defaultdict(list))
    """By group, member and attempt; a worker that was killed may have written one twice."""
    rewards: dict[tuple[str, int, int], list[Reward]] = field(default_factory=lambda: defaultdict(list))
    given_up: set[str] = field(default_factory=set)
    steps: list[TrainStep] = field(default_factory=list)
    published: list[WeightsPublished] = field(default_factory=list)
    acks: list[WeightsAck] = field(default_factory=list)
    experience: dict[Place, Experience | None] = field(default_factory=dict)
    """None: bytes that are no record; they are the run's as much as anybody's."""
    letters: set[Place] = field(default_factory=set)

    @classmethod
    def of(cls, log: Log, run: str) -> "_View":
        view = cls(run)
        for topic in READ:
            for delivery in log.get(topic, ()):
                record = _record(delivery)
                if isinstance(record, DeadLetter):
                    view.letters.add((record.topic, record.partition, record.offset))
                elif record is None and topic == "experience":
                    view.experience[_place(delivery)] = None
                elif getattr(record, "run", None) == run:
                    view._take(delivery, record)
        return view

    def _take(self, delivery: Delivery, record: Record | None) -> None:
        match record:
            case Prompt():
                self.prompts.append((_place(delivery), record))
            case RolloutStep():
                self.turns[record.group_id, record.member, record.attempt].append(record)
            case Reward():
                self.rewards[record.group_id, record.member, record.attempt].append(record)
            case GroupFailed():
                self.given_up.add(record.group_id)
            case TrainStep():
                self.steps.append(record)
            case WeightsPublished():
                self.published.append(record)
            case WeightsAck():
                self.acks.append(record)
            case Experience():
                self.experience[_place(delivery)] = record

    def written_in_full(self, prompt: Prompt) -> bool:
        """A worker gave the group up, or wrote all that its closing needs."""
        return prompt.group_id in self.given_up or all(
            any(
                any(turn.last for turn in turns)
                and set(prompt.components) <= {reward.component for reward in self.rewards[key]}
                for key, turns in list(self.turns.items())
                if key[:2] == (prompt.group_id, member)
            )
            for member in range(prompt.group_size)
        )


def _open(view: _View) -> dict[str, tuple[Place, Prompt]]:
    """Prompts that no step has trained or dropped."""
    fates = {unit.group_id for step in view.steps for unit in step.consumed}
    return {p.group_id: (place, p) for place, p in view.prompts if p.group_id not in fates}


def _reached(step: TrainStep) -> dict[tuple[str, int], int]:
    split = ((name.rpartition("/"), position) for name, position in step.positions.items())
    return {(topic, int(partition)): position for (topic, _, partition), position in split}


def _issued_in_order(view: _View) -> Iterator[str]:
    """The feed's ids are numbered, and none is left out."""
    ids = (re.fullmatch(re.escape(view.run) + r"-(\d{7,})", prompt.group_id) for _, prompt in view.prompts)
    numbers = {int(match[1]) for match in ids if match}
    for number in sorted(set(range(max(numbers, default=-1) + 1)) - numbers):
        yield f"prompts: number {number} was never issued"


def _joined(view: _View) -> Iterator[str]:
    """A closed group holds what workers and judges wrote, and its rewards are what their parts make."""
    weights = {prompt.group_id: prompt.components for _, prompt in view.prompts}
    for place, record in view.experience.items():
        for rollout in record.rollouts if record is not None else ():
            assert record is not None
            key = (record.group_id, rollout.member, rollout.attempt)
            where = f"{place}: {record.group_id}/{rollout.member}"
            if any(turn not in view.turns[key] for turn in rollout.steps):
                yield f"{where}: holds a turn that no worker wrote"
            scores = {(reward.component, reward.value) for reward in view.rewards[key]}
            for score in rollout.components.items():
                if score not in scores:
                    yield f"{where}: {score[0]} {score[1]}, which nobody judged"
            parts = [
                weight * rollout.components.get(name, math.nan)
                for name, weight in weights.get(record.group_id, {}).items()
            ]
            if rollout.reward is not None and not math.isclose(rollout.reward, sum(parts), abs_tol=1e-9):
                yield f"{where}: reward {rollout.reward}, its parts make {sum(parts)}"


def _ledger(view: _View) -> Iterator[str]:
    """Steps 1..N, each from the weights that the one before left."""
    for index, step in enumerate(view.steps):
        if step.step != index + 1:
            yield f"train.steps: expected step {index + 1}, found {step.step}"
        if (step.version_from, step.version_to) != (step.step - 1, step.step):
            yield f"step {step.step}: goes from version {step.version_from} to {step.version_to}"
        if index and step.root_before != view.steps[index - 1].root_after:
            yield f"step {step.step}: begins with root {step.root_before}, which no step left"
        if hashlib.sha256(step.config.encode()).hexdigest() != step.config_sha256:
            yield f"step {step.step}: its settings are not those of their hash"


def _weights(view: _View) -> Iterator[str]:
    """Versions 0..N announced once each, in order, with the ledger's roots, and served with no other."""
    versions = [announced.version for announced in view.published]
    if versions != list(range(len(view.steps) + 1)):
        yield f"weights: expected versions 0..{len(view.steps)} once each, found {versions}"
    roots = {announced.version: announced.root for announced in view.published}
    for step in view.steps:
        if roots.get(step.version_from, step.root_before) != step.root_before:
            yield f"step {step.step}: begins with another root than was announced"
        if roots.get(step.version_to, step.root_after) != step.root_after:
            yield f"step {step.step}: leaves another root than was announced"
    for ack in view.acks:
        if ack.outcome == "serving" and roots.get(ack.version) != ack.root:
            yield f"weights.acks: {ack.replica} serves root {ack.root} as version {ack.version}"


def _once(view: _View) -> Iterator[str]:
    """Nothing is issued, closed, consumed or trained twice."""
    consumed = Counter((u.topic, u.partition, u.offset) for step in view.steps for u in step.consumed)
    trained = Counter(group_id for step in view.steps for group_id in step.admitted)
    closed = Counter(record.group_id for record in view.experience.values() if record is not None)
    for what, counts in (
        ("issued", Counter(prompt.group_id for _, prompt in view.prompts)),
        ("closed", closed),
        ("consumed", consumed),
        ("trained", trained),
    ):
        for name, count in counts.items():
            if count > 1:
                yield f"{name}: {what} {count} times"
    for group_id in closed.keys() - {prompt.group_id for _, prompt in view.prompts}:
        yield f"{group_id}: closed, and was never issued"


def _answered(view: _View) -> Iterator[str]:
    """Every record that a step read is trained or dropped with a reason; malformed ones left a letter."""
    for step in view.steps:
        drops = [drop for drop in step.drops if drop.member is None]
        read = Counter(unit.group_id for unit in step.consumed)
        answers = Counter([*step.admitted, *(drop.group_id for drop in drops)])
        for group_id in read | answers:
            if read[group_id] != answers[group_id]:
                yield f"step {step.step}: {group_id}: {read[group_id]} read, {answers[group_id]} answered"
        malformed = {drop.group_id for drop in drops if drop.reason == "malformed"}
        for drop in step.drops:
            if not drop.reason:
                yield f"step {step.step}: {drop.group_id}: dropped without a reason"
        for unit in step.consumed:
            place = (unit.topic, unit.partition, unit.offset)
            if place not in view.experience:
                yield f"step {step.step}: {place}: consumed, and the log has no such record"
                continue
            record = view.experience[place]
            if record is not None and record.group_id != unit.group_id:
                yield f"step {step.step}: {place}: consumed as {unit.group_id}, it is {record.group_id}"
            if unit.group_id in malformed and place not in view.letters:
                yield f"step {step.step}: {place}: malformed, and no dead letter tells"


def _read_in_full(view: _View) -> Iterator[str]:
    """Positions never go back, and all that lies before them was consumed."""
    positions: dict[tuple[str, int], int] = defaultdict(int)
    for step in view.steps:
        for name, position in step.positions.items():
            topic, _, partition = name.rpartition("/")
            if position < positions[topic, int(partition)]:
                yield f"step {step.step}: {name} goes back to {position}"
            positions[topic, int(partition)] = position
        for unit in step.consumed:
            if unit.offset >= positions[unit.topic, unit.partition]:
                yield f"step {step.step}: consumes {unit.topic}[{unit.partition}]@{unit.offset}, past itself"
    consumed = {(u.topic, u.partition, u.offset) for step in view.steps for u in step.consumed}
    for place in view.experience:
        if place[2] < positions[place[:2]] and place not in consumed:
            yield f"{place[0]}[{place[1]}]@{place[2]}: passed over by the trainer"


def _lag(view: _View) -> Iterator[str]:
    """No token older than the bound is trained: such a member is withheld, with its reason."""
    by_group = {record.group_id: record for record in view.experience.values() if record is not None}
    for step in view.steps:
        bound = msgspec.json.decode(step.config)["run"]["lag_versions_max"]
        withheld = {(drop.group_id, drop.member) for drop in step.drops}
        for group_id in step.admitted:
            for rollout in by_group[group_id].rollouts if group_id in by_group else ():
                lag = step.version_from - _oldest(rollout, step.version_from)
                if lag > bound and (group_id, rollout.member) not in withheld:
                    yield f"step {step.step}: {group_id}/{rollout.member}: trained at lag {lag}"


def _oldest(rollout: Rollout, otherwise: int) -> int:
    return min(
        (span.weights_version for turn in rollout.steps for span in turn.spans),
        default=otherwise,
    )


def _record(delivery: Delivery) -> Record | None:
    try:
        return decode(delivery.topic, delivery.value or b"", delivery.headers)
    except WireError:
        return None


def _place(delivery: Delivery) -> Place:
    return delivery.topic, delivery.partition, delivery.offset
