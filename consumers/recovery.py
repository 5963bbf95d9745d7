"""Where a trainer goes on: the newest state that the ledger vouches for, then the ledger's steps again, from
the very records, to its head.

Recovery is replay: `trainer.step.run_step` with each step's own settings, checked against its root.
A checkpoint only shortens the way. Not here: new steps (`consumers.training`).
"""

import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import msgspec

from headrace import log
from headrace.bus.protocol import Bus
from headrace.consumers.batches import entries_of, positions_by_name
from headrace.consumers.ledger import Ledger
from headrace.errors import Fenced, StoreError, StoreUnavailable, TrainingError
from headrace.policy.model import ModelConfig, Weights
from headrace.store.blobs import Blobs
from headrace.trainer import checkpoint, provenance
from headrace.trainer.config import StepSettings
from headrace.trainer.provenance import Provenance
from headrace.trainer.state import State, fresh
from headrace.trainer.step import StepResult, run_step
from headrace.wire.topics import EXPERIENCE

_logger = logging.getLogger(__name__)


async def recover(
    bus: Bus,
    blobs: Blobs,
    ledger: Ledger,
    *,
    run_name: str,
    group: str,
    seed: tuple[ModelConfig, Weights],
    held: Sequence[State],
    now: Provenance,
    compute: Callable[[Callable[[], StepResult]], Awaitable[StepResult]],
    cancelled: Callable[[], bool],
) -> State:
    """The state at the head of `ledger`.

    `held`: states in memory, if this process was already training when it lost the log; raises Fenced when
    the ledger went on without them, for then another trainer did. Raises TrainingError when a step computed
    again has another root than the ledger says, and what is different from then.
    """
    model, weights = seed
    state = _held(ledger, held)
    if state is None:
        state = await _newest_checkpoint(blobs, ledger, run_name)
    if state is None:
        state = fresh(weights, await _first_positions(bus, group))
        _check_seed(ledger, state, run_name)
    for step in ledger.steps[state.step :]:
        entries = await entries_of(bus, blobs, step)
        settings = msgspec.json.decode(step.config, type=StepSettings)
        again = partial(
            run_step, state, entries, step.positions, model=model, settings=settings, cancelled=cancelled
        )
        state = (await compute(again)).state
        if state.root != step.root_after:
            reasons = "; ".join(provenance.differences(step, now)) or "the same code and libraries"
            raise TrainingError(
                f"run {run_name!r}: step {step.step} computed again: expected root {step.root_after},"
                f" got {state.root} ({reasons})"
            )
        log.event(_logger, "replayed", step=step.step, root=state.root[:12])
    return state


def _held(ledger: Ledger, held: Sequence[State]) -> State | None:
    """The state in memory that is the ledger's head."""
    if not held:
        return None
    for state in held:
        if _agrees(ledger, state):
            return state
    steps = " or ".join(str(state.step) for state in held)
    raise Fenced(
        f"trainer: expected the ledger to end at step {steps} of this process, found step {ledger.version}:"
        " another trainer of this run went on"
    )


def _agrees(ledger: Ledger, state: State) -> bool:
    if state.step != ledger.version:
        return False
    if state.step == 0:
        return True
    head = ledger.steps[-1]
    return head.root_after == state.root and head.positions == state.positions


async def _newest_checkpoint(blobs: Blobs, ledger: Ledger, run_name: str) -> State | None:
    """The newest one that is what its hash says; those that are not are passed over, aloud."""
    for step in reversed(ledger.steps):
        if step.checkpoint is None:
            continue
        place = f"{step.checkpoint.uri}: checkpoint of step {step.step}"
        try:
            data = await blobs.get(step.checkpoint.uri, step.checkpoint.sha256)
            state = checkpoint.decode(data, run_name, place)
            if (state.step, state.root) != (step.step, step.root_after):
                raise StoreError(
                    f"{place}: expected root {step.root_after}, got step {state.step} with {state.root}"
                )
        except StoreUnavailable:
            raise
        except StoreError as error:
            log.event(_logger, "checkpoint_refused", level=logging.WARNING, step=step.step, reason=error)
            continue
        log.event(_logger, "checkpoint_read", step=step.step, root=state.root[:12])
        return state
    return None


async def _first_positions(bus: Bus, group: str) -> dict[str, int]:
    begins = await bus.begins([EXPERIENCE.name])
    committed = await bus.committed(group, [EXPERIENCE.name])
    return positions_by_name({**begins, **committed})


def _check_seed(ledger: Ledger, state: State, run_name: str) -> None:
    first = ledger.published.get(0)
    expected = first.root if first else ledger.steps[0].root_before if ledger.steps else state.root
    if state.root != expected:
        raise TrainingError(
            f"run {run_name!r}: expected to start from the seed of root {expected}, got {state.root}:"
            " the run began with another model"
        )
