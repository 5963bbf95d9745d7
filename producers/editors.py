"""Simulated editors: people who type real functions, ask for completions through the live lane, and report
what became of them.

For the laptop and for tests: what the trainer learns from them it learns from events, as it would from real
ones. Deterministic but for timing: who asks where, and what each does with which text, follow from the seed.
Not here: the people (`producers.people`), the files (`producers.open_files`), what events are worth
(`streams.feedback`).
"""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from headrace import log
from headrace.clock import Clock, SystemClock
from headrace.config import RunConfig
from headrace.errors import InferenceError
from headrace.policy import dialogue
from headrace.policy.dialogue import Call, Silent, TokenCodec
from headrace.producers import open_files
from headrace.producers.config import EditorsConfig
from headrace.producers.open_files import Cursor, OpenFunction
from headrace.producers.people import Happening, Person, people, react
from headrace.rpc.generation import Completion, Generation, Generator
from headrace.rpc.generation import Sequence as Member
from headrace.wire.records import Feedback

_logger = logging.getLogger(__name__)

Publish = Callable[[list[Feedback]], Awaitable[None]]
Pseudonym = Callable[[str], str]

CLIENT = "simulated-editor"
AFTERWARDS = ("undone", "persisted")
"""Kinds that come while the user is somewhere else already."""


@dataclass(slots=True)
class Counts:
    """What the editors saw. `unanswered`: inference refused, failed or was too slow."""

    asked: int = 0
    shown: int = 0
    silent: int = 0
    malformed: int = 0
    unanswered: int = 0
    accepted: int = 0
    """Wholly, and perhaps undone later."""


async def run(
    generator: Generator,
    publish: Publish,
    run: RunConfig,
    config: EditorsConfig,
    stop: asyncio.Event,
    *,
    codec: TokenCodec,
    session: str,
    pseudonym: Pseudonym = str,
    clock: Clock | None = None,
) -> Counts:
    """Lets all users type until `stop` is set or `suggestions_max` is reached; then what still waits to be
    reported is forgotten.

    `session` makes the ids of suggestions differ from those of an earlier call. `pseudonym`: from a user's
    name to what stands in requests and events. Raises what `publish` raises.
    """
    opened = open_files.functions(
        config.distributions,
        codec,
        tokens_min=config.function_tokens_min,
        tokens_max=config.function_tokens_max,
    )
    office = _Office(generator, publish, run, config, stop, codec, session, pseudonym, clock or SystemClock())
    log.event(_logger, "editors", users=config.users, functions=len(opened), session=session)
    typing = [
        asyncio.ensure_future(office.types(person, opened))
        for person in people(config.habits, config.users, config.regions, run.seed)
    ]
    try:
        await asyncio.gather(*typing)
    finally:
        await _cancelled([*typing, *office.later])
    if office.failed is not None:
        raise office.failed
    return office.counts


def request(
    cursor: Cursor,
    config: EditorsConfig,
    codec: TokenCodec,
    *,
    run: str,
    suggestion_id: str,
    user: str,
    seed: int,
    version: int | None = None,
) -> Generation:
    """What an editor asks of inference at `cursor`; `version`: only to measure one that is held still."""
    return Generation(
        run=run,
        group_id=suggestion_id,
        lane="live",
        prefix_tokens=tuple(dialogue.suggestion_prompt_tokens(codec, cursor.prefix, cursor.suffix)),
        sequences=(Member(member=0),),
        temperature=config.temperature,
        tokens_max=config.suggestion_tokens_max,
        stop_tokens=tuple(dialogue.suggestion_stop_tokens(codec)),
        seed=seed,
        user=user,
        version=version,
    )


def feedback(
    happening: Happening,
    number: int,
    *,
    suggestion_id: str,
    next_id: str,
    person: Person,
    user: str,
    run: str,
    shown_ms: int,
) -> Feedback:
    """The event of something that happened to a suggestion shown at `shown_ms`, by the person's clock."""
    rest_id = f"{suggestion_id}.rest"
    superseded_by = None
    if happening.typed_over or happening.typed_through:
        superseded_by = rest_id if happening.typed_through else next_id
    return Feedback(
        run=run,
        event_id=f"{suggestion_id}.{number}",
        suggestion_id=rest_id if happening.rest else suggestion_id,
        kind=happening.kind,
        editor_ms=shown_ms + happening.after_ms,
        view_id=f"{suggestion_id}.view",
        user=user,
        client=CLIENT,
        accepted_length=happening.accepted_length,
        superseded_by=superseded_by,
        continues=suggestion_id if happening.rest else None,
        region=person.region,
        persisted_s=happening.persisted_s,
        difference=happening.difference,
    )


@dataclass
class _Office:
    """All users of one call."""

    generator: Generator
    publish: Publish
    run: RunConfig
    config: EditorsConfig
    stop: asyncio.Event
    codec: TokenCodec
    session: str
    pseudonym: Pseudonym
    clock: Clock
    later: set[asyncio.Task[None]] = field(default_factory=set)
    counts: Counts = field(default_factory=Counts)
    failed: BaseException | None = None

    def __post_init__(self) -> None:
        self._room = asyncio.Semaphore(self.config.later_max)

    async def types(self, person: Person, opened: Sequence[OpenFunction]) -> None:
        draw = random.Random(f"editor {self.run.seed} {person.number}")
        places = open_files.cursors(opened, self.config.kinds, draw)
        number = 0
        await self._rest(draw.uniform(0, self.config.pause_ms))
        while self._open():
            self.counts.asked += 1
            name = f"{self.run.name}-{self.session}-{person.number}"
            await self._at(person, next(places), f"{name}-{number}", f"{name}-{number + 1}", draw)
            number += 1
            await self._rest(self.config.pause_ms * draw.uniform(0.5, 1.5))

    def _open(self) -> bool:
        left = not self.config.suggestions_max or self.counts.asked < self.config.suggestions_max
        return left and not self.stop.is_set() and self.failed is None

    async def _at(
        self, person: Person, cursor: Cursor, suggestion_id: str, next_id: str, draw: random.Random
    ) -> None:
        """One question, and what the person does with the answer."""
        seed = draw.getrandbits(64)
        reacting = random.Random(draw.getrandbits(64))
        user = self.pseudonym(f"user-{person.number}")
        completion = await self._ask(cursor, suggestion_id, user, seed)
        if completion is None:
            return
        told = dialogue.parse_suggestion(self.codec, list(completion.tokens))
        if not isinstance(told, Call):
            self.counts.silent += isinstance(told, Silent)
            self.counts.malformed += not isinstance(told, Silent)
            return
        self.counts.shown += 1
        shown_ms = self.clock.now_ms() + person.clock_ms
        at_ms = 0
        happenings = react(self.config.habits, person, told.fill, cursor.wanted, reacting)
        for number, happening in enumerate(happenings):
            event = feedback(
                happening,
                number,
                suggestion_id=suggestion_id,
                next_id=next_id,
                person=person,
                user=user,
                run=self.run.name,
                shown_ms=shown_ms,
            )
            if happening.kind in AFTERWARDS:
                await self._afterwards(event, happening.after_ms - at_ms)
                continue
            if not await self._rest(happening.after_ms - at_ms):
                return
            at_ms = happening.after_ms
            self.counts.accepted += happening.kind == "accepted"
            await self.publish([event])

    async def _ask(self, cursor: Cursor, suggestion_id: str, user: str, seed: int) -> Completion | None:
        question = request(
            cursor,
            self.config,
            self.codec,
            run=self.run.name,
            suggestion_id=suggestion_id,
            user=user,
            seed=seed,
        )
        try:
            return (await self.generator.generate(question, timeout_s=self.config.wait_ms_max / 1000))[0]
        except InferenceError as error:
            self.counts.unanswered += 1
            log.event(_logger, "unanswered", suggestion=suggestion_id, error=str(error))
            return None

    async def _afterwards(self, event: Feedback, after_ms: int) -> None:
        """Reports `event` in a while; waits when too many events wait already."""
        await self._room.acquire()
        task = asyncio.ensure_future(self._report_later(event, after_ms))
        self.later.add(task)
        task.add_done_callback(self.later.discard)

    async def _report_later(self, event: Feedback, after_ms: int) -> None:
        try:
            if await self._rest(after_ms):
                await self.publish([event])
        except Exception as error:  # raised by `run`, which owns this task
            self.failed = error
            self.stop.set()
        finally:
            self._room.release()

    async def _rest(self, human_ms: float) -> bool:
        """Sleeps, but not beyond the stop; whether the time has passed."""
        try:
            await asyncio.wait_for(self.stop.wait(), human_ms / 1000 / self.config.pace)
        except TimeoutError:
            return True
        return False


async def _cancelled(tasks: Sequence[asyncio.Future[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
