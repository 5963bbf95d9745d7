"""Is each step of a range still what its record says? The walk behind `headrace replay`.

Every step is computed from the state that the one before left. After one that is not equal nothing can be
said until a later checkpoint gives a state that the ledger vouches for: the walk goes on from there. Not
here: the computation (`consumers.replay`), why it differs (`consumers.causes`).
"""

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Literal

from headrace.consumers import causes
from headrace.consumers.causes import FAULTS, Cause, TensorsDiffer
from headrace.consumers.replay import Change, Replayed, Source, live_checkpoints, replay
from headrace.errors import OffsetGone, PolicyError, StoreError, StoreUnavailable
from headrace.trainer.provenance import Provenance
from headrace.trainer.state import State
from headrace.wire.records import TrainStep

Outcome = Literal[
    "equal",
    "differs",
    "machine",  # another root, and this machine's kernel probe is another
    "missing",  # its records are gone
    "follows",  # not computed: the state before it is not the recorded one
]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is known of one step."""

    recorded: TrainStep
    outcome: Outcome
    done: Replayed | None = None
    """None where nothing was computed; without its weights, for a command keeps a verdict of every step."""
    tensors: TensorsDiffer | None = None
    tensors_unknown: str = ""
    """Why the recorded weights could not be compared."""
    causes: tuple[Cause, ...] = ()
    follows: int | None = None
    """The step whose difference stands in the way."""


async def verify(
    source: Source,
    start: State,
    first: int,
    last: int,
    *,
    now: Provenance,
    change: Change = lambda settings: settings,
    cancelled: Callable[[], bool] = lambda: False,
    on_way: Callable[[TrainStep], None] = lambda step: None,
) -> AsyncGenerator[Verdict, None]:
    """A verdict for each of steps `first` to `last`, and for one before them that stood in the way.

    `start`: a state at or before `first - 1`, as of `newest_state`. `on_way`: told of each step computed
    again only to get to `first`. `change` must be one that leaves no trace (microbatches). Raises
    TrainingError, StoreUnavailable, BusUnavailable, Cancelled.
    """
    state: State | None = start
    at, blocked = start.step, 0
    while at < last:
        if state is None:
            resume = await _rejoin(source, at, last)
            end = resume.step if resume is not None else last
            for step in range(max(at + 1, first), end + 1):
                yield Verdict(source.recorded(step), "follows", follows=blocked)
            state, at = resume, end
            continue
        async with aclosing(_until_a_difference(source, state, last, now, change, cancelled)) as walk:
            async for verdict in walk:
                at = verdict.recorded.step
                if verdict.outcome != "equal":
                    blocked, state = at, None
                if verdict.outcome != "equal" or at >= first:
                    yield verdict
                else:
                    on_way(verdict.recorded)


async def _rejoin(source: Source, step: int, last: int) -> State | None:
    """The next state at or after `step`, before `last`, that a checkpoint has."""
    live = live_checkpoints(source.ledger)
    for at in sorted(at for at in live if step <= at < last):
        try:
            return await source.saved(at, live[at])
        except StoreUnavailable:
            raise
        except StoreError:
            continue
    return None


async def _until_a_difference(
    source: Source,
    state: State,
    last: int,
    now: Provenance,
    change: Change,
    cancelled: Callable[[], bool],
) -> AsyncGenerator[Verdict, None]:
    step = state.step
    try:
        async with aclosing(replay(source, state, last, change=change, cancelled=cancelled)) as walk:
            async for done in walk:
                step = done.recorded.step
                if not done.equal:
                    yield await _difference(source, done, now)
                    return
                yield Verdict(done.recorded, "equal", done.without_weights())
    except StoreUnavailable:
        raise
    except (StoreError, OffsetGone) as error:
        yield Verdict(source.recorded(step + 1), "missing", causes=(Cause("missing", str(error)),))


async def _difference(source: Source, done: Replayed, now: Provenance) -> Verdict:
    found = causes.why(source, done, now)
    faulty = any(cause.kind in FAULTS for cause in found)
    machine = not faulty and causes.probe_differs([done.recorded], now)
    tensors, unknown = None, ""
    try:
        weights = await causes.recorded_weights(source, done.recorded.version_to)
        tensors = await source.compute(lambda: causes.compare(weights, done.result.state.masters))
    except StoreUnavailable:
        raise
    except (StoreError, PolicyError) as error:
        unknown = str(error)
    outcome: Outcome = "machine" if machine else "differs"
    return Verdict(done.recorded, outcome, done.without_weights(), tensors, unknown, found)
