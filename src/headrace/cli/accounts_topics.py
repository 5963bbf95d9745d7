"""What the topics alone say became of each unit: the second side of `headrace account`.

Reads prompts, closed groups up to what the trainer's consumer group committed, and of groups not yet closed
the steps and rewards since the oldest of them was written. Never the ledger. What it keeps: a few words for
every unit, all of those not yet closed.
"""

from dataclasses import dataclass, field

from headrace.bus.protocol import Bus, TopicPartition
from headrace.cli.accounts import (
    CLOSED,
    CLOSING,
    GIVEN_UP,
    JUDGING,
    ROLLING,
    UNKNOWN,
    WAITING,
    Answer,
    Origin,
    TopicsSide,
)
from headrace.cli.accounts_verdict import tokens_longest, verdict
from headrace.cli.reading import CLOSED_TOPICS, Progress, Told, partition
from headrace.errors import StoreError, StoreUnavailable, WireError
from headrace.store.blobs import Blobs
from headrace.store.claims import check_out
from headrace.wire import records as r
from headrace.wire.codec import at
from headrace.wire.topics import DEAD_LETTERS, PROMPTS, REWARDS, ROLLOUT_STEPS

ORPHAN_MS = 600_000
"""What has no Prompt is looked for so far back from the newest record: the join closes it by then."""
BY_TRAINER = "trainer"
"""Who writes the dead letters that count here."""


@dataclass(slots=True)
class _Open:
    """A unit not yet closed: its Prompt if there is one, and what came of its newest attempt."""

    prompt: r.Prompt | None
    since_ms: int
    region: str = ""
    source: str = "sim"
    attempt: int = 0
    started: bool = False
    failed: bool = False
    finished: set[int] = field(default_factory=set)
    judged: dict[int, set[str]] = field(default_factory=dict)

    def newest(self, attempt: int) -> bool:
        """Whether a record of `attempt` counts; a newer attempt begins anew."""
        if attempt > self.attempt:
            self.attempt, self.failed = attempt, False
            self.finished, self.judged = set(), {}
        return attempt == self.attempt

    @property
    def stage(self) -> str:
        if self.failed:
            return GIVEN_UP
        if not self.started:
            return WAITING
        size = self.prompt.group_size if self.prompt else 1
        if len(self.finished) < size:
            return ROLLING
        wanted = set(self.prompt.components) if self.prompt else set()
        whole = all(wanted <= self.judged.get(member, set()) for member in self.finished)
        return CLOSING if wanted and whole else JUDGING

    @property
    def origin(self) -> Origin:
        env, region = (self.prompt.env, self.prompt.region) if self.prompt else ("", self.region)
        return Origin(self.source, env, region, 0)


async def by_topics(
    bus: Bus,
    run: str,
    *,
    committed: dict[TopicPartition, int],
    sequence_tokens_max: int,
    blobs: Blobs | None,
    progress: Progress | None = None,
) -> TopicsSide:
    """`committed`: next offsets of the trainer's group; what lies before them it has answered. `blobs` None:
    records by claim check can't be judged. Raises OffsetGone, BusUnavailable, StoreUnavailable."""
    side = TopicsSide()
    side.positions = {f"{tp.topic}/{tp.partition}": offset for tp, offset in sorted(committed.items())}
    topics = await bus.topics()
    letters = await _letters(bus) if DEAD_LETTERS.name in topics else set()
    # Groups first, prompts after them: a group that closed meanwhile has its Prompt already.
    judge = _Judge(side, run, sequence_tokens_max, blobs, letters)
    for tp, begin in sorted((await bus.begins([n for n in CLOSED_TOPICS if n in topics])).items()):
        side.begins[f"{tp.topic}/{tp.partition}"] = begin
        async for item in partition(bus, tp, progress=progress):
            await judge.read(item, answered=item.delivery.offset < committed.get(tp, 0))
    open_units = await _read_prompts(bus, side, run, judge, progress)
    since_ms = min([judge.newest_ms - ORPHAN_MS, *(unit.since_ms for unit in open_units.values())])
    for name in (ROLLOUT_STEPS.name, REWARDS.name):
        for tp in sorted(await bus.ends([name])) if name in topics else ():
            async for item in partition(bus, tp, since_ms=since_ms, progress=progress):
                _follow(item, run, open_units, judge.closed)
    for group_id, unit in open_units.items():
        side.in_flight[group_id] = (unit.stage, unit.origin)
    side.without_prompt = len(judge.closed | side.in_flight.keys()) - side.prompts
    return side


class _Judge:
    """Reads closed groups in their order and says what the trainer should have answered."""

    def __init__(
        self, side: TopicsSide, run: str, sequence_tokens_max: int, blobs: Blobs | None, letters: set[str]
    ) -> None:
        self._side = side
        self._run = run
        self._tokens_max = sequence_tokens_max
        self._blobs = blobs
        self._letters = letters
        self.closed: set[str] = set()
        self.newest_ms = 0
        """Broker time of the newest record read."""

    async def read(self, item: Told, *, answered: bool) -> None:
        record = item.record
        self.newest_ms = max(self.newest_ms, item.at_ms)
        if isinstance(record, WireError):
            if answered:
                key = (item.delivery.key or b"").decode(errors="replace")
                self._answer(key, Answer("malformed", Origin("sim", "", "", 0), item.place))
            return
        assert isinstance(record, r.Experience), "the only type of this topic"
        if record.run != self._run:
            return
        group_id = record.group_id
        self.closed.add(group_id)
        origin = Origin(record.source, record.env, record.region, tokens_longest(record))
        if not answered:
            if group_id not in self._side.answers:
                self._side.in_flight[group_id] = (CLOSED, origin)
            return
        before = self._side.answers.get(group_id)
        if before is not None and before.outcome != "malformed":
            self._side.duplicates += 1
            return
        self._answer(group_id, await self._judged(record, item.place))

    def _answer(self, group_id: str, answer: Answer) -> None:
        """The first that is for good stays; a unit that could not be read may be sent again."""
        self.closed.add(group_id)
        before = self._side.answers.get(group_id)
        if before is not None:
            self._side.malformed_again += 1
            if answer.outcome == "malformed":
                return
        self._side.answers[group_id] = answer

    async def _judged(self, record: r.Experience, place: str) -> Answer:
        if record.claim is not None:
            light = Origin(record.source, record.env, record.region, 0)
            if self._blobs is None:
                return Answer(UNKNOWN, light, place)
            try:
                record = await check_out(record, self._blobs)
            except StoreUnavailable:
                raise
            except StoreError:  # gone since, or never whole: only a dead letter could say which
                return Answer("malformed" if place in self._letters else UNKNOWN, light, place)
        outcome = verdict(record, sequence_tokens_max=self._tokens_max)
        if outcome != "malformed" and place in self._letters:
            self._side.malformed_by_letter += 1
            outcome = "malformed"
        return Answer(
            outcome, Origin(record.source, record.env, record.region, tokens_longest(record)), place
        )


async def _letters(bus: Bus) -> set[str]:
    """Places of closed groups that the trainer could not handle."""
    found = set()
    async for item in partition(bus, TopicPartition(DEAD_LETTERS.name, 0)):
        letter = item.record
        if isinstance(letter, r.DeadLetter) and letter.by == BY_TRAINER:
            found.add(at(letter.topic, letter.partition, letter.offset))
    return found


async def _read_prompts(
    bus: Bus, side: TopicsSide, run: str, judge: _Judge, progress: Progress | None
) -> dict[str, _Open]:
    """Counts the Prompts; those of units that have not closed."""
    known: set[str] = set()
    found: dict[str, _Open] = {}
    for tp in sorted(await bus.ends([PROMPTS.name])):
        async for item in partition(bus, tp, progress=progress):
            prompt = item.record
            judge.newest_ms = max(judge.newest_ms, item.at_ms)
            if isinstance(prompt, WireError):
                side.prompts_unreadable += 1
            elif isinstance(prompt, r.Prompt) and prompt.run == run and prompt.group_id not in known:
                known.add(prompt.group_id)
                if prompt.group_id not in judge.closed:
                    found[prompt.group_id] = _Open(prompt, item.at_ms)
    side.prompts = len(known)
    return found


def _follow(item: Told, run: str, units: dict[str, _Open], closed: set[str]) -> None:
    record = item.record
    if not isinstance(record, r.RolloutStep | r.Reward | r.GroupFailed) or record.run != run:
        return
    if record.group_id in closed:
        return
    unit = units.get(record.group_id)
    if unit is None:
        unit = units[record.group_id] = _Open(None, item.at_ms)
    if isinstance(record, r.RolloutStep):
        unit.region, unit.source = record.region, record.source
    if not unit.newest(record.attempt):
        return
    unit.started = True
    if isinstance(record, r.GroupFailed):
        unit.failed = True
    elif isinstance(record, r.RolloutStep):
        if record.last:
            unit.finished.add(record.member)
    else:
        judged = unit.judged.setdefault(record.member, set())
        wanted = unit.prompt.components if unit.prompt else ()
        judged.update(wanted if record.verdict == "quarantine" else (record.component,))
