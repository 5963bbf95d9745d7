"""The record of what inference suggested: true, in order, bounded, and never in the way of the answer."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import msgspec
import pytest

from headrace.bus import open_bus
from headrace.bus.protocol import Bus, Message
from headrace.clock import ManualClock
from headrace.config import RunConfig
from headrace.errors import BusUnavailable, WireError
from headrace.policy import checkpoint, dialogue
from headrace.producers import suggestions as producer
from headrace.producers.config import SuggestionsConfig
from headrace.producers.suggestions import Answer, SuggestionLog, step_of, why_not
from headrace.rpc.generation import Completion, Generation
from headrace.rpc.generation import Sequence as Member
from headrace.wire.codec import decode
from headrace.wire.packed import pack_u32, unpack_f32
from headrace.wire.records import RolloutStep, Span
from headrace.wire.topics import ROLLOUT_STEPS, TOPICS

CODEC = checkpoint.load_seed()[2]
RUN = RunConfig(name="demo", region="eu")
WAIT_S = 20.0


def answer(
    name: str = "demo-live-3-0", tokens: Sequence[int] | None = None, **changes: Any
) -> tuple[Generation, Completion, int]:
    written = tuple(dialogue.suggestion_tokens(CODEC, "x😀") if tokens is None else tokens)
    request = Generation(
        run="demo",
        group_id=name,
        lane="live",
        prefix_tokens=(1, 2, 3),
        sequences=(Member(member=0),),
        temperature=0.5,
        tokens_max=14,
        seed=7,
        user="ada",
    )
    completion = Completion(
        member=0,
        tokens=written,
        logp=tuple(-0.5 * n for n in range(len(written))),
        finish="stop",
        spans=(Span(start=0, end=len(written), weights_version=4),),
        weights_version=4,
        routes=bytes(range(2 + len(written))),
        routes_shape=(2 + len(written), 1, 1),
        started_ms=1_004,
        ended_ms=1_030,
        cohort="canary",
    )
    of_request = {k: v for k, v in changes.items() if k in Generation.__struct_fields__}
    of_completion = {k: v for k, v in changes.items() if k in ("finish", "member")}
    return (
        msgspec.structs.replace(request, **of_request),
        msgspec.structs.replace(completion, **of_completion),
        1_000,
    )


MAKE = partial(step_of, codec=CODEC, run=RUN, worker="inference-0", pseudonym=lambda user: f"r1-{user}")


def test_step_says_what_inference_knows() -> None:
    """Tokens, numbers, cohort and times are those of the answer; the text counts as editors count it."""
    step = MAKE(Answer(*answer()))
    assert (step.source, step.member, step.attempt, step.step, step.last) == ("live", 0, 0, 0, True)
    assert (step.user, step.cohort, step.region, step.worker) == ("r1-ada", "canary", "eu", "inference-0")
    assert step.tokens_in == pack_u32([1, 2, 3]) and step.prefix_length == 3 and step.base_length == 0
    assert len(step.tokens_out) == 4 * len(step.loss_mask) and set(step.loss_mask) == {1}
    assert unpack_f32(step.logp)[:3] == [0.0, -0.5, -1.0]
    assert (step.finish, step.text_length, step.temperature) == ("stop", 3, 0.5)  # x and two of the emoji
    assert (step.started_ms, step.ended_ms, step.weights_version) == (1_000, 1_030, 4)


def test_silence_has_a_finish_of_its_own() -> None:
    """A first token of silence is the choice to show nothing; a broken call shows nothing too."""
    silent = MAKE(Answer(*answer(tokens=[CODEC.special["<|silent|>"]])))
    broken = MAKE(Answer(*answer(tokens=[CODEC.special["<|end|>"]])))
    assert (silent.finish, silent.text_length) == ("silent", 0)
    assert (broken.finish, broken.text_length) == ("stop", 0)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"run": "other"}, "other_run"),
        ({"group_id": "demo-0000012"}, "id_of_a_prompt"),
        ({"group_id": ""}, "no_id"),
        ({"group_id": "x" * 100_000}, "no_id"),
        ({"group_id": "demo-live 1"}, "no_id"),
        ({"user": "u" * 257}, "no_id"),
        ({"version": 4}, "not_sampled"),
        ({"greedy": True}, "not_sampled"),
        ({"temperature": 0.0}, "not_sampled"),
        ({"finish": "cancelled"}, "cancelled"),
        ({"sequences": (Member(member=0), Member(member=1))}, "not_alone"),
        ({"sequences": (Member(member=0, own_tokens=(9,)),)}, "not_alone"),
    ],
)
def test_what_is_no_suggestion(changes: dict[str, Any], reason: str) -> None:
    """An editor can't speak for another run or a simulated group; a measurement is not trained."""
    assert why_not(Answer(*answer(**changes)), "demo") == reason


class Faulty:
    """A bus whose `produce` fails while `away`; and counts the batches."""

    def __init__(self, bus: Bus, *, away: bool) -> None:
        self._bus = bus
        self.away = asyncio.Event()
        self.back = asyncio.Event()
        if not away:
            self.back.set()
        self.batches: list[int] = []
        self.stuck = False
        self.tries = 0

    async def produce(self, messages: Sequence[Message]) -> list[int]:
        if self.stuck:
            self.away.set()
            await asyncio.Event().wait()
        if not self.back.is_set():
            self.away.set()
            self.tries += 1
            raise BusUnavailable("log: away")
        self.batches.append(len(messages))
        return await self._bus.produce(messages)


async def written(bus: Bus) -> list[RolloutStep]:
    begins, ends = await bus.begins([ROLLOUT_STEPS.name]), await bus.ends([ROLLOUT_STEPS.name])
    found = []
    for tp, end in ends.items():
        async for delivery in bus.read_range(tp, begins[tp], end):
            record = decode(tp.topic, delivery.value or b"", delivery.headers)
            assert isinstance(record, RolloutStep)
            found.append(record)
    return found


@asynccontextmanager
async def logging_to(
    *, away: bool = False, make: Callable[[Answer], RolloutStep] = MAKE, **settings: int
) -> AsyncIterator[tuple[SuggestionLog, Faulty, Bus]]:
    """A running log on a new embedded bus; at the end it stops, drained."""
    async with open_bus("sqlite::memory:") as bus:
        await bus.create_topics(list(TOPICS.values()))
        faulty = Faulty(bus, away=away)

        @asynccontextmanager
        async def opened() -> AsyncIterator[Any]:
            yield faulty

        suggestions = SuggestionLog(SuggestionsConfig(**settings), "demo", make, ManualClock(5_000))
        stop = asyncio.Event()
        running = asyncio.create_task(suggestions.run(opened, stop))
        try:
            yield suggestions, faulty, bus
        finally:
            stop.set()
            await asyncio.wait_for(running, WAIT_S)


async def until(true: Any) -> None:
    async with asyncio.timeout(WAIT_S):
        while not true():  # noqa: ASYNC110 - a count, not an event
            await asyncio.sleep(0.005)


def test_batches_keep_the_order() -> None:
    """What comes together is written together, each partition in the order of the answers."""

    async def act() -> None:
        async with logging_to(batch_max=40) as (suggestions, faulty, bus):
            for number in range(100):
                suggestions.offer(*answer(f"demo-live-{number}"))
            await until(lambda: suggestions.counts["written"] == 100)
            steps = await written(bus)
        assert faulty.batches == [40, 40, 20]
        numbers = [int(step.group_id.rpartition("-")[2]) for step in steps]
        assert sorted(numbers) == list(range(100))
        falls = sum(later < earlier for earlier, later in pairwise(numbers))
        assert falls <= 3  # four partitions, one after the other

    asyncio.run(act())


def test_log_that_is_away_delays_nothing() -> None:
    """`offer` returns while the log is away; what waited is written when it is back, once."""

    async def act() -> None:
        async with logging_to(away=True) as (suggestions, faulty, bus):
            suggestions.offer(*answer("demo-live-1"))
            await asyncio.wait_for(faulty.away.wait(), WAIT_S)
            suggestions.offer(*answer("demo-live-2"))
            faulty.back.set()
            await until(lambda: suggestions.counts["written"] == 2)
            assert sorted(step.group_id for step in await written(bus)) == ["demo-live-1", "demo-live-2"]

    asyncio.run(act())


def test_loss_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    """A full buffer loses the newest, a deadline the oldest; both are counted and alarmed."""

    async def act() -> None:
        async with logging_to(away=True, waiting_max=2, write_ms_max=300, drain_ms=1) as (
            suggestions,
            _,
            bus,
        ):
            for number in range(3):
                suggestions.offer(*answer(f"demo-live-{number}"))
            assert suggestions.counts["lost.full"] == 1
            await until(lambda: suggestions.counts["lost.late"] == 2)
            assert await written(bus) == []

    asyncio.run(act())
    assert sum("kind=suggestions_lost" in line for line in caplog.messages) == 2


def test_what_is_no_record_is_lost_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often the log was tried meanwhile; those beside it are written."""
    monkeypatch.setattr(producer, "RETRY_S", 0.001)

    def make(given: Answer) -> RolloutStep:
        if given.request.group_id == "demo-live-1":
            raise WireError("tokens_out: expected less")
        return MAKE(given)

    async def act() -> None:
        async with logging_to(away=True, make=make) as (suggestions, faulty, bus):
            for number in range(3):
                suggestions.offer(*answer(f"demo-live-{number}"))
            await until(lambda: faulty.tries >= 3)
            faulty.back.set()
            await until(lambda: suggestions.counts["written"] == 2)
            assert suggestions.counts["lost.unfit"] == 1
            assert sorted(step.group_id for step in await written(bus)) == ["demo-live-0", "demo-live-2"]

    asyncio.run(act())


def test_a_log_that_hangs_does_not_hold_the_stop() -> None:
    """What can't be written within `drain_ms` is lost, and counted."""

    async def act() -> None:
        async with logging_to(gather_ms=200, drain_ms=50) as (suggestions, faulty, _):
            faulty.stuck = True
            suggestions.offer(*answer("demo-live-1"))
        assert suggestions.counts["lost.stopped"] == 1

    asyncio.run(act())


def test_an_id_that_no_log_takes_stops_nothing() -> None:
    """Of an editor that asks under an id of 100 kB no suggestion is written; those beside it are, and the
    replica goes on."""

    async def act() -> None:
        async with logging_to() as (suggestions, _, bus):
            for name in ("demo-live-1", "x" * 100_000, "demo-live-2"):
                suggestions.offer(*answer(name))
            await until(lambda: suggestions.counts["written"] == 2)
            assert sorted(step.group_id for step in await written(bus)) == ["demo-live-1", "demo-live-2"]
            assert suggestions.counts["passed.no_id"] == 1

    asyncio.run(act())


def test_stop_drains() -> None:
    """What was answered before the stop is on the log after it."""

    async def act() -> None:
        async with logging_to(gather_ms=200) as (suggestions, faulty, _):
            suggestions.offer(*answer("demo-live-1"))
        assert faulty.batches == [1]

    asyncio.run(act())
