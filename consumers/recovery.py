"""Where a trainer goes on: the newest state that the ledger vouches for, then the ledger's steps again, from
the very records, to its head.

Recovery is `consumers.replay`, every root checked; a checkpoint only shortens the way. Not here: new steps
(`consumers.training`).
"""

import logging
from collections.abc import Callable, Sequence

from headrace import log
from headrace.bus.protocol import Bus
from headrace.consumers.ledger import Ledger
from headrace.consumers.replay import Compute, RunStep, Source, check_root, newest_state, replay
from headrace.errors import Fenced
from headrace.policy.model import ModelConfig, Weights
from headrace.store.blobs import Blobs
from headrace.trainer.provenance import Provenance
from headrace.trainer.state import State
from headrace.trainer.step import run_step

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
    compute: Compute,
    cancelled: Callable[[], bool],
    start_from: str = "",
    run_step: RunStep = run_step,
) -> State:
    """The state at the head of `ledger`; of a run without any step, what it begins with.

    `held`: states in memory, if this process was already training when it lost the log; raises Fenced when
    the ledger went on without them, for then another trainer did. Raises TrainingError when a step computed
    again has another root than the ledger says, and what is different from then.
    """
    state = _held(ledger, held)
    if state is not None:
        return state
    if start_from and ledger.published:
        log.event(_logger, "start_from_passed_over", file=start_from, reason="the run has begun")
    source = Source(bus, blobs, ledger, run_name, group, seed, compute, start_from, run_step)
    state = await newest_state(source, ledger.version)
    async for done in replay(source, state, ledger.version, cancelled=cancelled):
        check_root(source, done, now)
        state = done.result.state
        log.event(_logger, "replayed", step=state.step, root=state.root[:12])
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
