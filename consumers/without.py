"""The run as if some records had never been: the exact counterfactual.

From the newest state before their first use, each step's recorded records minus those, with the step's own
settings, to the end: the same walk as `consumers.replay`. A step keeps its number, and the others keep their
steps, as if nothing had come in the place of what is left out. What is left out is then nowhere in the state:
not in weights or moments, nor among the ids seen. Positions are places in the log and stay.

What can't be known: later rollouts were sampled from weights that had seen what is left out. Their tokens and
log-probabilities stay as recorded; how many groups that concerns is counted. Not here: how it looks
(`cli.without`).
"""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Final, Literal, get_args

from headrace.consumers.replay import Replayed, Source, replay
from headrace.errors import ConfigError
from headrace.trainer.admission import Entry
from headrace.trainer.state import State
from headrace.wire.records import Consumed, Experience, TrainStep

Kind = Literal["group", "user", "source", "env"]
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)


@dataclass(frozen=True, slots=True)
class Criterion:
    """`user:4f2a`: which records are left out."""

    kind: Kind
    value: str

    def __str__(self) -> str:
        return f"{self.kind}:{self.value}"

    def matches(self, entry: Entry) -> bool:
        return value_of(self.kind, entry) == self.value


def criterion(text: str) -> Criterion:
    """Of `KIND:VALUE`. Raises ConfigError."""
    kind, colon, value = text.partition(":")
    if kind not in KINDS or not colon or not value:
        expected = ", ".join(f"{name}:{'live' if name == 'source' else name.upper()}" for name in KINDS)
        raise ConfigError(f"--without {text}: expected one of {expected}")
    return Criterion(kind, value)


def value_of(kind: Kind, entry: Entry) -> str:
    """What a record is by; empty where it can't be known: bytes that could not be read have no user."""
    if kind == "group":
        return entry.consumed.group_id
    experience = entry.experience
    return getattr(experience, kind) if isinstance(experience, Experience) else ""


@dataclass(slots=True)
class Uses:
    """Where the matching records were used. `known`: what there is of each kind asked for."""

    by_step: dict[int, list[Consumed]] = field(default_factory=dict)
    counts: dict[Criterion, int] = field(default_factory=dict)
    known: dict[Kind, set[str]] = field(default_factory=dict)

    @property
    def first(self) -> int:
        return min(self.by_step)


async def uses(
    source: Source,
    criteria: Sequence[Criterion],
    first: int,
    last: int,
    *,
    looked: Callable[[int], None] = lambda step: None,
) -> Uses:
    """The records of steps `first` to `last` that match any of `criteria`. `looked` is told of each step.
    Raises StoreError (records gone)."""
    found = Uses(counts=dict.fromkeys(criteria, 0), known={c.kind: set() for c in criteria})
    for number in range(first, last + 1):
        step = source.recorded(number)
        for consumed, values in await _values(source, step, [*found.known]):
            for kind, value in values.items():
                found.known[kind].add(value)
            matching = [c for c in criteria if values[c.kind] == c.value]
            for one in matching:
                found.counts[one] += 1
            if matching:
                found.by_step.setdefault(number, []).append(consumed)
        looked(number)
    return found


async def _values(
    source: Source, step: TrainStep, kinds: Sequence[Kind]
) -> list[tuple[Consumed, dict[Kind, str]]]:
    """Of each record, from the ledger where it says them: it knows no users, and old ones group ids only."""
    told = all(consumed.env for consumed in step.consumed)
    if all(kind == "group" or (told and kind != "user") for kind in kinds):
        return [
            (c, {kind: c.group_id if kind == "group" else getattr(c, kind) for kind in kinds})
            for c in step.consumed
        ]
    entries = await source.entries(step)
    return [(entry.consumed, {kind: value_of(kind, entry) for kind in kinds}) for entry in entries]


@dataclass(frozen=True, slots=True)
class Without:
    """One step without what is left out, beside its record. `tainted`: groups left whose tokens were sampled,
    wholly or in part, from weights that the counterfactual no longer has."""

    done: Replayed
    left_out: tuple[Consumed, ...]
    tainted: tuple[str, ...]

    @property
    def same_weights(self) -> bool:
        return self.done.result.state.root == self.done.recorded.root_after


async def without(
    source: Source,
    start: State,
    criteria: Sequence[Criterion],
    last: int,
    *,
    cancelled: Callable[[], bool] = lambda: False,
) -> AsyncIterator[Without]:
    """Steps `start.step + 1` to `last` without the records that match; `start` must be before their first
    use. Raises what `replay` raises."""

    def left(entries: Sequence[Entry]) -> list[Entry]:
        return [entry for entry in entries if not any(c.matches(entry) for c in criteria)]

    parted_at: int | None = None
    """The first version whose weights are others than recorded."""
    async with aclosing(replay(source, start, last, select=left, cancelled=cancelled)) as walk:
        async for done in walk:
            stayed = {entry.place for entry in done.entries}
            left_out = tuple(c for c in done.recorded.consumed if _place(c) not in stayed)
            tainted = () if parted_at is None else tuple(_sampled_from(done.entries, parted_at))
            now = Without(done, left_out, tainted)
            if parted_at is None and not now.same_weights:
                parted_at = done.recorded.version_to
            yield now


def _sampled_from(entries: Sequence[Entry], version: int) -> list[str]:
    """Group ids of those with a token of `version` or later."""
    return [
        entry.consumed.group_id
        for entry in entries
        if isinstance(entry.experience, Experience)
        and any(
            span.weights_version >= version
            for rollout in entry.experience.rollouts
            for step in rollout.steps
            for span in step.spans
        )
    ]


def _place(consumed: Consumed) -> str:
    return f"{consumed.topic}[{consumed.partition}]@{consumed.offset}"
