"""All that the log holds about one group: gathered once, told by `headrace trajectory` (the text) and
`headrace trace` (the way).

Reads the group's own partition of each topic, the dead letters, and of the ledger, the announcements and the
acks only what the broker took since. Not here: how it looks.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from headrace.bus.protocol import Bus, TopicPartition, partition_of
from headrace.cli.reading import Told, partition
from headrace.errors import ConfigError, WireError
from headrace.wire import records as r
from headrace.wire.codec import at
from headrace.wire.topics import (
    DEAD_LETTERS,
    TOPICS,
    TRAIN_STEPS,
    WEIGHTS,
    WEIGHTS_ACKS,
)

OWN = tuple(topic.name for topic in TOPICS.values() if topic.key == "group_id" and topic.records)
"""Topics keyed by the group, as the stream runs."""
RECORDS_MAX = 100_000
"""Of one group; a flood under one key is cut here, and the story says so."""


@dataclass(slots=True)
class Story:
    """All that the log holds about one group. `told` is its records, by broker time."""

    group_id: str
    told: list[Told] = field(default_factory=list)
    cut: bool = False

    def of(self, kind: type[r.Record]) -> list[Told]:
        return [item for item in self.told if isinstance(item.record, kind)]

    @property
    def prompt(self) -> r.Prompt | None:
        return next((item.record for item in self.told if isinstance(item.record, r.Prompt)), None)

    @property
    def steps(self) -> list[r.RolloutStep]:
        return [item.record for item in self.told if isinstance(item.record, r.RolloutStep)]

    @property
    def rewards(self) -> list[r.Reward]:
        return [item.record for item in self.told if isinstance(item.record, r.Reward)]

    @property
    def failures(self) -> list[r.GroupFailed]:
        return [item.record for item in self.told if isinstance(item.record, r.GroupFailed)]

    @property
    def live(self) -> bool:
        """It is a suggestion to an editor."""
        return any(step.source == "live" for step in self.steps)

    @property
    def experience(self) -> r.Experience | None:
        return next((item.record for item in self.told if isinstance(item.record, r.Experience)), None)

    @property
    def read_in(self) -> list[r.TrainStep]:
        """The ledger's steps that consumed a record of it; more than one where one came again."""
        return [item.record for item in self.told if isinstance(item.record, r.TrainStep)]

    @property
    def trained_in(self) -> r.TrainStep | None:
        """The step that trained it; else the first that gave it an answer for good."""
        steps = self.read_in
        trained = (step for step in steps if self.group_id in step.admitted)
        answered = (step for step in steps if self.reasons(step) - {"duplicate", "malformed"})
        return next(trained, None) or next(answered, None) or (steps[0] if steps else None)

    @property
    def undecodable(self) -> list[str]:
        return [f"{item.place}: {item.record}" for item in self.told if isinstance(item.record, WireError)]

    def reasons(self, step: r.TrainStep) -> set[str]:
        """Why `step` dropped the group as a whole; empty when it did not."""
        return {drop.reason for drop in step.drops if drop.group_id == self.group_id and drop.member is None}

    def withheld(self, step: r.TrainStep) -> dict[int, str]:
        """Members whose tokens `step` did not train, and why."""
        own = (drop for drop in step.drops if drop.group_id == self.group_id)
        return {drop.member: drop.reason for drop in own if drop.member is not None}

    def members(self) -> list[int]:
        known = {step.member for step in self.steps} | {reward.member for reward in self.rewards}
        return sorted(known | set(range(self.prompt.group_size if self.prompt else 0)))

    def latest(self, member: int) -> list[r.RolloutStep]:
        """The steps of a member's newest attempt, in order, each once."""
        own = [step for step in self.steps if step.member == member]
        attempt = max((step.attempt for step in own), default=0)
        ordered = sorted(own, key=lambda step: step.step)
        return list({step.step: step for step in ordered if step.attempt == attempt}.values())

    def rewards_of(self, member: int) -> list[r.Reward]:
        own = [reward for reward in self.rewards if reward.member == member]
        attempt = max((reward.attempt for reward in own), default=0)
        return list({reward.component: reward for reward in own if reward.attempt == attempt}.values())

    def fate(self, member: int | None = None) -> str:
        """What became of the group, or of one member of it."""
        step = self.trained_in
        if step is None:
            if self.experience is not None:
                why = f" ({self.experience.reason})" if self.experience.reason else ""
                return f"closed: {self.experience.closed}{why}; not yet read by the trainer"
            if self.failures:
                return f"given up by a worker ({self.failures[-1].reason}); not yet closed"
            return "in flight"
        if self.group_id in step.admitted:
            reason = self.withheld(step).get(member) if member is not None else None
            if reason:
                return f"read in step {step.step}; tokens withheld: {reason}"
            return f"trained in step {step.step} (weights v{step.version_to})"
        reasons = sorted(self.reasons(step))
        return f"dropped in step {step.step}: {', '.join(reasons) or 'no reason recorded'}"


async def gather(bus: Bus, group_id: str) -> Story:
    """Everything about `group_id`. Raises ConfigError when the log knows nothing of it."""
    story = await find(bus, group_id)
    if not story.told:
        raise ConfigError(f"group {group_id!r}: expected records of it on this bus, found none")
    return story


async def find(bus: Bus, group_id: str) -> Story:
    """As `gather`; without a record where the log knows nothing of the group."""
    story = Story(group_id)
    topics = await bus.topics()
    for name in OWN:
        if name in topics:
            tp = TopicPartition(name, partition_of(group_id.encode(), len(topics[name])))
            async for item in partition(bus, tp, key=group_id.encode()):
                _keep(story, item)
    if story.told:
        first_ms = min(item.at_ms for item in story.told)
        if TRAIN_STEPS.name in topics:
            await _read_ledger(bus, story, first_ms)
        if DEAD_LETTERS.name in topics:
            await _read_letters(bus, story, first_ms)
        await _read_weights(bus, story, topics)
    story.told.sort(key=lambda item: (item.at_ms, _order(item), item.delivery.offset))
    return story


def _keep(story: Story, item: Told) -> None:
    if len(story.told) < RECORDS_MAX:
        story.told.append(item)
    else:
        story.cut = True


def _order(item: Told) -> int:
    """Of records that the broker took in the same millisecond: as the stream runs."""
    order = (*OWN, TRAIN_STEPS.name, WEIGHTS.name, WEIGHTS_ACKS.name, DEAD_LETTERS.name)
    return order.index(item.delivery.topic) if item.delivery.topic in order else len(order)


async def _read_ledger(bus: Bus, story: Story, first_ms: int) -> None:
    for run in sorted({run for item in story.told if (run := getattr(item.record, "run", ""))}):
        tp = TopicPartition(TRAIN_STEPS.name, 0)
        async for item in partition(bus, tp, key=run.encode(), since_ms=first_ms):
            step = item.record
            consumed = step.consumed if isinstance(step, r.TrainStep) and step.run == run else ()
            if isinstance(step, WireError) or any(unit.group_id == story.group_id for unit in consumed):
                _keep(story, item)


async def _read_letters(bus: Bus, story: Story, first_ms: int) -> None:
    own = {item.place for item in story.told}
    async for item in partition(bus, TopicPartition(DEAD_LETTERS.name, 0), since_ms=first_ms):
        letter = item.record
        if isinstance(letter, r.DeadLetter) and (
            letter.key == story.group_id.encode() or at(letter.topic, letter.partition, letter.offset) in own
        ):
            _keep(story, item)


async def _read_weights(bus: Bus, story: Story, topics: Iterable[str]) -> None:
    """The announcement of the weights that it went into, what was said of that version, and each replica's
    first ack of it or of a later one."""
    trained = next((i for i in story.of(r.TrainStep) if story.group_id in i.record.admitted), None)  # type: ignore[union-attr]
    if trained is None:
        return
    assert isinstance(trained.record, r.TrainStep)
    run, version = trained.record.run, trained.record.version_to
    since_ms = trained.at_ms
    if WEIGHTS.name in topics:
        async for item in partition(
            bus, TopicPartition(WEIGHTS.name, 0), key=run.encode(), since_ms=since_ms
        ):
            if getattr(item.record, "version", None) == version and getattr(item.record, "run", "") == run:
                _keep(story, item)
    if WEIGHTS_ACKS.name not in topics:
        return
    serving: set[tuple[str, str]] = set()
    async for item in partition(bus, TopicPartition(WEIGHTS_ACKS.name, 0), since_ms=since_ms):
        ack = item.record
        if not isinstance(ack, r.WeightsAck) or ack.run != run or ack.version < version:
            continue
        replica = (ack.region, ack.replica)
        if ack.outcome == "serving" and replica not in serving:
            serving.add(replica)
            _keep(story, item)
        elif ack.outcome == "refused" and ack.version == version:
            _keep(story, item)
