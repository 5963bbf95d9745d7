"""Simulated people: what somebody does with one suggestion, as a list of things that happen after it shows.

An acceptance model with noise: right suggestions are mostly accepted and wrong ones mostly not, by people who
differ, misread, undo, accept in parts, type through, and leave. Its parameters are unknown to the trainer,
which sees events only. Pure: what happens is a function of the person, the texts and the random generator.
Not here: asking and publishing (`producers.editors`).
"""

import random
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec

from headrace.config import AtLeastOne
from headrace.rpc.feedback import utf16_length

Share = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]
Kind = Literal["shown", "accepted", "partially_accepted", "rejected", "ignored", "undone", "persisted"]


class Habits(msgspec.Struct, frozen=True, kw_only=True):
    """Shares of suggestions, of people on average. What is rare stays rare for everybody."""

    accept_right: Share = 0.95
    """Suggestions that say what the person was about to write."""
    accept_wrong: Share = 0.02
    """The others: misread, or good enough."""
    differ: Share = 0.04
    """How far people's `accept_right` scatters around it."""
    part_of_wrong: Share = 0.25
    """Wrong suggestions whose beginning is right, at least half of it: this share of them is accepted that
    far."""
    in_parts: Share = 0.08
    """Accepts that come word by word."""
    undo: Share = 0.02
    """Accepts that are taken back."""
    edit: Share = 0.05
    """Accepts of which a part is edited away while they are watched."""
    typed_through: Share = 0.04
    """Right suggestions whose start is typed; the rest is shown again under a new id."""
    typed_over: Share = 0.03
    """Suggestions gone before anybody could read them."""
    ignored: Share = 0.01
    """Wrong ones that are neither accepted nor rejected."""
    leave: Share = 0.01
    """Suggestions after which nothing is heard."""
    read_ms: AtLeastOne = 900
    """Median time until a decision."""


@dataclass(frozen=True, slots=True)
class Person:
    """One user. `clock_ms`: by how much the clock of their machine is wrong."""

    number: int
    region: str
    clock_ms: int
    accept_right: float
    accept_wrong: float
    pace: float


@dataclass(frozen=True, slots=True)
class Happening:
    """Something an editor reports, `after_ms` after the suggestion was shown (human time)."""

    kind: Kind
    after_ms: int
    accepted_length: int | None = None
    typed_over: bool = False
    """The person has typed on: another suggestion takes this one's place."""
    typed_through: bool = False
    """The person has typed its start: the rest is shown again."""
    rest: bool = False
    """Said of the rest of the suggestion, under its own id."""
    persisted_s: int | None = None
    difference: float | None = None


CLOCKS_DAYS = (0.0, 0.0, 0.0, 0.0, 0.001, -0.02, 2.0, -3.0)
"""By how many days the clocks of machines are wrong: most are right, some far off."""


def people(habits: Habits, count: int, regions: tuple[str, ...], seed: int) -> list[Person]:
    """The same `count` people for the same seed."""
    draw = random.Random(f"people {seed}")
    return [
        Person(
            number,
            regions[number % len(regions)],
            int(86_400_000 * draw.choice(CLOCKS_DAYS)),
            min(1.0, max(0.0, habits.accept_right + habits.differ * draw.uniform(-1, 1))),
            habits.accept_wrong * draw.uniform(0.5, 1.5),
            draw.uniform(0.6, 1.8),
        )
        for number in range(count)
    ]


def react(habits: Habits, person: Person, shown: str, wanted: str, draw: random.Random) -> list[Happening]:
    """What happens with the text `shown` to a person about to write `wanted`, in order of time; begins with
    `shown`."""
    told = [Happening("shown", 0)]
    if draw.random() < habits.typed_over:
        return [*told, Happening("ignored", draw.randint(15, 90), typed_over=True)]
    if draw.random() < habits.leave:
        return told
    read_ms = max(150, int(habits.read_ms * person.pace * draw.lognormvariate(0.0, 0.5)))
    right = shown == wanted
    if draw.random() < (person.accept_right if right else person.accept_wrong):
        return told + _accepts(habits, shown, read_ms, draw)
    start = _common(shown, wanted)
    if not right and start * 2 >= len(shown) and draw.random() < habits.part_of_wrong:
        return [*told, Happening("partially_accepted", read_ms, utf16_length(shown[:start]))]
    if draw.random() < habits.ignored:
        return [*told, Happening("ignored", read_ms)]
    return [*told, Happening("rejected", read_ms)]


def _accepts(habits: Habits, shown: str, at_ms: int, draw: random.Random) -> list[Happening]:
    way = draw.random()
    if way < habits.in_parts:
        words = shown.split(" ")
        ends = [len(" ".join(words[: count + 1])) for count in range(len(words))]
        told = [
            Happening("partially_accepted", at_ms + 200 * index, utf16_length(shown[:end]))
            for index, end in enumerate(end for end in ends if end)
        ]
    elif way < habits.in_parts + habits.typed_through:
        told = [
            Happening("ignored", at_ms, typed_through=True),
            Happening("shown", at_ms + 30, rest=True),
            Happening("accepted", at_ms + 400, rest=True),
        ]
    else:
        told = [Happening("accepted", at_ms)]
    if draw.random() < habits.undo:
        return [*told, Happening("undone", at_ms + 2_000)]
    edited = draw.random() < habits.edit
    for seconds in (30, 120):
        difference = round(draw.uniform(0.1, 0.8), 3) if edited else 0.0
        told.append(
            Happening("persisted", at_ms + 1000 * seconds, persisted_s=seconds, difference=difference)
        )
    return told


def _common(left: str, right: str) -> int:
    """Characters that both begin with."""
    count = 0
    for one, other in zip(left, right, strict=False):
        if one != other:
            break
        count += 1
    return count
