"""An independent reader of a run's log: does what stands there keep the promises?

It knows the records and the bus, and nothing of the code that wrote them. `audit` is a pure function of the
deliveries, and answers with one sentence for each broken promise, its place first. Not tests.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from headrace.bus.protocol import Bus, Delivery
from headrace.errors import WireError
from headrace.wire.codec import decode
from headrace.wire.records import (
    DeadLetter,
    Experience,
    Prompt,
    Record,
    Rollout,
    TrainStep,
    WeightsAck,
    WeightsPublished,
)

READ = ("prompts", "experience", "train.steps", "weights", "weights.acks", "dead.letters")

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
    fates = {unit.group_id for step in view.steps for unit in step.consumed}
    return [group_id for group_id in view.prompts if group_id not in fates]


@dataclass(frozen=True, slots=True)
class _View:
    """The records of one run, in the order of the log."""

    run: str
    prompts: list[str]
    steps: list[TrainStep]
    published: list[WeightsPublished]
    acks: list[WeightsAck]
    experience: dict[Place, Experience | None]
    """None: bytes that are no record; they are the run's as much as anybody's."""
    letters: set[Place]

    @classmethod
    def of(cls, log: Log, run: str) -> "_View":
        view = cls(run, [], [], [], [], {}, set())
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
                self.prompts.append(record.group_id)
            case TrainStep():
                self.steps.append(record)
            case WeightsPublished():
                self.published.append(record)
            case WeightsAck():
                self.acks.append(record)
            case Experience():
                self.experience[_place(delivery)] = record


def _ledger(view: _View) -> Iterator[str]:
    """Steps 1..N, each from the weights that the one before left."""
    for index, step in enumerate(view.steps):
        if step.step != index + 1:
            yield f"train.steps: expected step {index + 1}, found {step.step}"
        if (step.version_from, step.version_to) != (step.step - 1, step.step):
            yield f"step {step.step}: goes from version {step.version_from} to {step.version_to}"
        if index and step.root_before != view.steps[index - 1].root_after:
            yield f"step {step.step}: begins with root {step.root_before}, which no step left"


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
        ("issued", Counter(view.prompts)),
        ("closed", closed),
        ("consumed", consumed),
        ("trained", trained),
    ):
        for name, count in counts.items():
            if count > 1:
                yield f"{name}: {what} {count} times"
    for group_id in closed:
        if group_id not in view.prompts:
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
