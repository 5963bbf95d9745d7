"""What a run begins with: version 0 and the positions it reads from.

The shipped seed; or, for a run that was told to, the state in a checkpoint file: its weights, moments and
update count, with step, version, positions and ids seen begun anew. Such a state is stored as a blob that the
announcement of version 0 names, so from then on the log alone is enough. Not here: where a run goes on
(`consumers.recovery`).
"""

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from headrace import log
from headrace.consumers.ledger import Ledger
from headrace.errors import ConfigError, PolicyError, StoreError, TrainingError
from headrace.policy.checkpoint import weights_root
from headrace.policy.model import ModelConfig, Weights, check_shapes
from headrace.store.blobs import BlobReader
from headrace.trainer import checkpoint
from headrace.trainer.state import State, fresh, published

_logger = logging.getLogger(__name__)


async def first_state(
    blobs: BlobReader,
    ledger: Ledger,
    *,
    run_name: str,
    seed: tuple[ModelConfig, Weights],
    positions: Mapping[str, int],
    start_from: str = "",
) -> State:
    """The state before step 1. `start_from` counts only before version 0 is announced; `positions` where no
    stored state says them.

    Raises ConfigError (no such file), StoreError (not a checkpoint, of another model, or the stored state is
    gone), TrainingError when the run began with another seed.
    """
    model, weights = seed
    begun = ledger.published.get(0)
    if begun is None and not ledger.steps:
        if not start_from:
            return fresh(weights, dict(positions))
        state = read_start(Path(start_from), model, positions)
        log.event(_logger, "start_from", file=start_from, root=state.root[:12], updates=state.updates)
        return state
    if begun is not None and begun.checkpoint is not None:
        place = f"{begun.checkpoint.uri}: start of run {run_name!r}"
        data = await blobs.get(begun.checkpoint.uri, begun.checkpoint.sha256)
        state = checkpoint.decode(data, run_name, place)
        check_state(state, model, place)
    else:
        state = fresh(weights, dict(positions))
    expected = begun.root if begun is not None else ledger.steps[0].root_before
    if state.root != expected:
        raise TrainingError(
            f"run {run_name!r}: expected to start from the seed of root {expected}, got {state.root}:"
            " the run began with another model"
        )
    return state


def read_start(path: Path, model: ModelConfig, positions: Mapping[str, int]) -> State:
    """The checkpoint in `path` as version 0 of a new run that reads from `positions`. Raises ConfigError,
    StoreError."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: expected a checkpoint to start from: {error.strerror}") from error
    state = checkpoint.decode(data, None, str(path))
    check_state(state, model, str(path))
    return replace(state, step=0, positions=dict(positions), seen={})


def check_state(state: State, model: ModelConfig, place: str) -> None:
    """Raises StoreError unless the tensors are of this model and the weights have the root that they claim:
    the file may come from anywhere."""
    try:
        for part in (state.masters, state.moment1, state.moment2):
            check_shapes(model, part)
    except PolicyError as error:
        raise StoreError(f"{place}: expected a checkpoint of this model: {error}") from error
    root = weights_root(published(state.masters))
    if root != state.root:
        raise StoreError(f"{place}: expected weights of root {state.root}, got {root}")
