"""The same users at the same places, asked under weights that stand still: what a version is worth to them.

A trial is a person at a cursor, with the seeds of what is sampled and of how they react. Two versions tried
on the same trials are compared pair by pair (`producers.figures`). Nothing is published, and nobody's pace is
waited for. What events are worth is given in (`Judge`): that is the feedback join's business.
"""

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headrace.policy import dialogue
from headrace.policy.dialogue import Call, Silent, TokenCodec
from headrace.policy.source import HoleKind
from headrace.producers import open_files
from headrace.producers.config import EditorsConfig
from headrace.producers.editors import feedback, request
from headrace.producers.open_files import Cursor, OpenFunction
from headrace.producers.people import Person, people, react
from headrace.rpc.feedback import utf16_length
from headrace.rpc.generation import Completion, Generator
from headrace.wire.records import Feedback

Judge = Callable[["Answer"], tuple[float, float | None]]
"""From the events of one suggestion and its length in UTF-16 units to the share of it that was accepted and
still stood, and the reward; None: no judgement."""

ASKING = 96  # requests under way: what fills a replica's batch
WAIT_S = 120.0


@dataclass(frozen=True, slots=True)
class Trial:
    name: str
    person: Person
    cursor: Cursor
    seed: int


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back. `text` is None when nothing was shown: by choice (`silent`), or malformed."""

    trial: Trial
    prompt: tuple[int, ...]
    completion: Completion
    silent: bool
    text: str | None
    events: list[Feedback]

    @property
    def text_length(self) -> int:
        """UTF-16 code units."""
        return utf16_length(self.text or "")


@dataclass(frozen=True, slots=True)
class Result:
    """`shown`: somebody had the time to look at it. `reward`: 0 too where there is none."""

    kind: HoleKind
    shown: bool
    silent: bool
    accepted: float
    reward: float


def trials(
    opened: Sequence[OpenFunction], config: EditorsConfig, *, count: int, seed: int, name: str
) -> list[Trial]:
    """The same for the same arguments: `count` of them, over all users in turn."""
    draw = random.Random(f"trials {seed}")
    users = people(config.habits, config.users, config.regions, seed)
    places = open_files.cursors(opened, config.kinds, draw)
    return [
        Trial(f"{name}-{number}", users[number % len(users)], next(places), draw.getrandbits(62))
        for number in range(count)
    ]


async def ask(
    generator: Generator,
    asked: Sequence[Trial],
    config: EditorsConfig,
    codec: TokenCodec,
    *,
    run: str,
    version: int | None = None,
) -> list[Answer]:
    """In the order of `asked`. Raises InferenceError."""
    room = asyncio.Semaphore(ASKING)

    async def one(trial: Trial) -> Answer:
        question = request(
            trial.cursor,
            config,
            codec,
            run=run,
            suggestion_id=trial.name,
            user=f"user-{trial.person.number}",
            seed=trial.seed,
            version=version,
        )
        async with room:
            completion = (await generator.generate(question, timeout_s=WAIT_S))[0]
        return _answer(trial, question.prefix_tokens, completion, config, codec, run)

    return list(await asyncio.gather(*(one(trial) for trial in asked)))


def result(answer: Answer, judge: Judge) -> Result:
    """What the answer was worth."""
    accepted, reward = judge(answer)
    shown = answer.text is not None and reward is not None
    return Result(answer.trial.cursor.kind, shown, answer.silent, accepted, reward or 0.0)


def _answer(
    trial: Trial,
    prompt: tuple[int, ...],
    completion: Completion,
    config: EditorsConfig,
    codec: TokenCodec,
    run: str,
) -> Answer:
    told = dialogue.parse_suggestion(codec, list(completion.tokens))
    if not isinstance(told, Call):
        return Answer(trial, prompt, completion, isinstance(told, Silent), None, [])
    draw = random.Random(f"react {trial.seed}")
    happenings = react(config.habits, trial.person, told.fill, trial.cursor.wanted, draw)
    events = [
        feedback(
            happening,
            number,
            suggestion_id=trial.name,
            next_id=f"{trial.name}/next",
            person=trial.person,
            user=f"user-{trial.person.number}",
            run=run,
            shown_ms=trial.person.clock_ms,
        )
        for number, happening in enumerate(happenings)
    ]
    return Answer(trial, prompt, completion, False, told.fill, events)
