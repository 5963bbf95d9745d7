"""Training steps computed again from what the log and the store hold.

One way for everyone: the newest state that the ledger vouches for (a checkpoint, else the seed), then
`trainer.step.run_step` on the very records, positions and settings of each ledger record. Recovery, `headrace
replay`, what-if and counterfactuals all walk it. Nothing is written or published. Not here: why a step is not
equal (`consumers.causes`), new steps (`consumers.training`).
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import msgspec

from headrace import log
from headrace.bus.protocol import Bus
from headrace.consumers import kept
from headrace.consumers.batches import entries_of, positions_by_name
from headrace.consumers.ledger import Ledger
from headrace.consumers.start import first_state
from headrace.errors import PolicyError, StoreError, StoreUnavailable, TrainingError
from headrace.policy.model import ModelConfig, Weights, check_shapes
from headrace.store.blobs import BlobReader
from headrace.trainer import checkpoint, provenance
from headrace.trainer.admission import Entry
from headrace.trainer.config import StepSettings
from headrace.trainer.provenance import Provenance
from headrace.trainer.state import State
from headrace.trainer.step import StepResult, run_step
from headrace.wire.records import Checkpoint, TrainStep
from headrace.wire.topics import EXPERIENCE

_logger = logging.getLogger(__name__)

Compute = Callable[[Callable[[], Any]], Awaitable[Any]]
"""Runs a call where this process computes (a thread that was prepared for it) and gives its result."""
RunStep = Callable[..., StepResult]
"""`trainer.step.run_step`, or the same with other processes' help (`consumers.ranks`)."""
Change = Callable[[StepSettings], StepSettings]
Select = Callable[[Sequence[Entry]], Sequence[Entry]]


async def in_place(call: Callable[[], Any]) -> Any:
    """The plainest `Compute`: here and now."""
    return call()


@dataclass(frozen=True)
class Source:
    """Where a run's records are. The three reads at its end are what a subclass answers from elsewhere."""

    bus: Bus
    blobs: BlobReader
    ledger: Ledger
    run_name: str
    group: str
    """The trainer's consumer group, `trainer-<run>`."""
    seed: tuple[ModelConfig, Weights]
    compute: Compute = field(default=in_place)
    start_from: str = ""
    """What a run that has not begun is to begin with (`consumers.start`)."""
    run_step: RunStep = run_step

    @property
    def model(self) -> ModelConfig:
        return self.seed[0]

    @property
    def begin(self) -> int:
        """The first step that there is."""
        return 1

    def recorded(self, step: int) -> TrainStep:
        """The ledger's record of `step`. Raises TrainingError when there is none."""
        if not 1 <= step <= self.ledger.version:
            held = f"steps 1 to {self.ledger.version}" if self.ledger.version else "no step yet"
            raise TrainingError(f"run {self.run_name!r}: expected step {step} in the ledger, it has {held}")
        return self.ledger.steps[step - 1]

    async def entries(self, step: TrainStep) -> list[Entry]:
        """The records that `step` consumed, in its order. Raises StoreError that names what is gone."""
        return await entries_of(self.bus, self.blobs, step)

    async def saved(self, step: int, named: Checkpoint) -> State:
        """The checkpoint of `step`, once it is what the ledger says. Raises StoreError."""
        place = f"{named.uri}: checkpoint of step {step}"
        data = await self.blobs.get(named.uri, named.sha256)
        state: State = await self.compute(partial(checkpoint.decode, data, self.run_name, place))
        root = self.recorded(step).root_after
        if (state.step, state.root) != (step, root):
            raise StoreError(f"{place}: expected root {root}, got step {state.step} with {state.root}")
        try:
            check_shapes(self.model, state.masters)
        except PolicyError as error:
            raise StoreError(f"{place}: expected the model of this run: {error}") from error
        return state

    async def first(self) -> State:
        """Version 0, checked against the ledger. Raises TrainingError (the run began with another model),
        ConfigError and StoreError (what it began with can't be read)."""
        begins = await self.bus.begins([EXPERIENCE.name])
        committed = await self.bus.committed(self.group, [EXPERIENCE.name])
        return await first_state(
            self.blobs,
            self.ledger,
            run_name=self.run_name,
            seed=self.seed,
            positions=positions_by_name({**begins, **committed}),
            start_from=self.start_from,
        )


@dataclass(frozen=True, slots=True)
class Replayed:
    """A step computed again, beside its record. `seconds`: of the computation alone."""

    recorded: TrainStep
    before: State
    entries: Sequence[Entry]
    settings: StepSettings
    result: StepResult
    seconds: float

    @property
    def equal(self) -> bool:
        """The same weights out of the same units, and the same answer for every other."""
        return (
            self.before.root == self.recorded.root_before
            and self.result.state.root == self.recorded.root_after
            and self.admitted == self.recorded.admitted
            and tuple(self.result.admission.drops) == self.recorded.drops
            and not self.metrics_that_differ()
        )

    def without_weights(self) -> "Replayed":
        """The same, to be kept by the thousand: no tensor, no records, no ids seen."""
        result = replace(
            self.result,
            state=_bare(self.result.state),
            admission=replace(
                self.result.admission,
                units=[replace(unit, sequences=()) for unit in self.result.admission.units],
            ),
        )
        return replace(self, before=_bare(self.before), entries=(), result=result)

    @property
    def admitted(self) -> tuple[str, ...]:
        return tuple(unit.group_id for unit in self.result.admission.units)

    def metrics_that_differ(self) -> dict[str, tuple[float, float]]:
        """Name -> (recorded, computed), of the metrics that both have. Times and rates are none of them:
        `run_step` gives only what its inputs decide."""
        found = self.result.metrics
        return {
            name: (then, found[name])
            for name, then in sorted(self.recorded.metrics.items())
            if name in found and found[name] != then
        }


def _bare(state: State) -> State:
    return replace(state, masters={}, moment1={}, moment2={}, seen={})


def live_checkpoints(ledger: Ledger) -> dict[int, Checkpoint]:
    """Step -> checkpoint, of those that the ledger names and has not given up since."""
    return kept.live(ledger.steps)


def say_refused(step: int, error: StoreError) -> None:
    """A checkpoint that is passed over is an event of the log."""
    log.event(_logger, "alarm", level=logging.WARNING, kind="checkpoint_refused", step=step, reason=error)


async def newest_state(
    source: Source, step: int, *, refused: Callable[[int, StoreError], None] = say_refused
) -> State:
    """The newest state at or before `step` that checks out: a live checkpoint, else the seed. `refused` is
    told of each checkpoint that does not. Raises StoreUnavailable, TrainingError."""
    live = live_checkpoints(source.ledger)
    for at in sorted((at for at in live if at <= step), reverse=True):
        try:
            state = await source.saved(at, live[at])
        except StoreUnavailable:
            raise
        except StoreError as error:
            refused(at, error)
            continue
        log.event(_logger, "checkpoint_read", step=at, root=state.root[:12])
        return state
    return await source.first()


async def state_before(
    source: Source,
    step: int,
    *,
    now: Provenance,
    start: State | None = None,
    cancelled: Callable[[], bool] = lambda: False,
) -> State:
    """The state that `step` started from, every step on the way to it equal to its record. `start`: where the
    way begins, the newest state if None. Raises TrainingError at the first that is not equal."""
    state = start or await newest_state(source, step - 1)
    async for done in replay(source, state, step - 1, cancelled=cancelled):
        check_root(source, done, now)
        state = done.result.state
    return state


def check_root(source: Source, done: Replayed, now: Provenance) -> None:
    """Raises TrainingError, with what is not as it was then, when `done` has another root than its record."""
    step, state = done.recorded, done.result.state
    if state.root != step.root_after:
        reasons = "; ".join(provenance.differences(step, now)) or "the same code and libraries"
        raise TrainingError(
            f"run {source.run_name!r}: step {step.step} computed again: expected root {step.root_after},"
            f" got {state.root} ({reasons})"
        )


async def replay(
    source: Source,
    state: State,
    last: int,
    *,
    change: Change = lambda settings: settings,
    select: Select = lambda entries: entries,
    cancelled: Callable[[], bool] = lambda: False,
) -> AsyncGenerator[Replayed, None]:
    """Steps `state.step + 1` to `last`, each from the state that the one before left, equal or not.

    `change`: of each step's own settings (what if they had been others). `select`: of its records (what if
    some had never been). The records of the next step are read while one is computed. Raises TrainingError
    (not in the ledger, settings that can't be read), StoreError (records gone), OffsetGone, Cancelled.
    """
    steps = [source.recorded(step) for step in range(state.step + 1, last + 1)]
    reading = asyncio.ensure_future(source.entries(steps[0])) if steps else None
    try:
        for index, recorded in enumerate(steps):
            assert reading is not None
            entries = select(await reading)
            reading = asyncio.ensure_future(source.entries(steps[index + 1])) if steps[index + 1 :] else None
            settings = change(settings_of(recorded))
            again = partial(
                source.run_step,
                state,
                entries,
                recorded.positions,
                model=source.model,
                settings=settings,
                cancelled=cancelled,
            )
            result, seconds = await source.compute(partial(_timed, again))
            yield Replayed(recorded, state, entries, settings, result, seconds)
            state = result.state
    finally:
        if reading is not None:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)


def settings_of(step: TrainStep) -> StepSettings:
    """What `step` was computed with. Raises TrainingError when this code can't read it."""
    try:
        return msgspec.json.decode(step.config, type=StepSettings)
    except msgspec.MsgspecError as error:
        raise TrainingError(
            f"run {step.run!r}: step {step.step}: expected settings that this code knows: {error}"
        ) from error


def _timed(call: Callable[[], StepResult]) -> tuple[StepResult, float]:
    started_s = time.perf_counter()
    return call(), time.perf_counter() - started_s
