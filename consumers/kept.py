"""Which checkpoints a run still has, and which it gives up: pure functions of its ledger records.

Nothing is read, written or deleted here: `consumers.checkpoints` writes and deletes, `consumers.replay`
starts from what is live, `consumers.sweep` and `consumers.retention` keep what is needed behind it.
"""

from collections.abc import Collection, Iterable

from headrace.wire.records import Checkpoint, TrainStep


def live(steps: Iterable[TrainStep]) -> dict[int, Checkpoint]:
    """Step -> checkpoint, of those that the records name and have not given up since; oldest first.

    Records from before pruning was recorded name checkpoints that are gone: who reads one has to bear that.
    """
    found: dict[int, Checkpoint] = {}
    for record in steps:
        fold(found, record)
    return found


def fold(found: dict[int, Checkpoint], record: TrainStep) -> None:
    """What `live` does with one record more."""
    if record.checkpoint is not None:
        step = record.checkpoint.step
        found[record.step if step is None else step] = record.checkpoint
    for pruned in record.checkpoints_pruned:
        found.pop(pruned, None)


def given_up(steps: Collection[int], *, newest: int, forever_every: int) -> tuple[int, ...]:
    """Which of the live checkpoints `steps` are no longer kept: all but the `newest` last ones and, for ever,
    the first one from each multiple of `forever_every` steps on (0: none)."""
    ordered = sorted(steps)
    stay = set(ordered[-newest:])
    if forever_every:
        first: dict[int, int] = {}
        for step in ordered:
            first.setdefault(step // forever_every, step)
        stay |= {step for multiple, step in first.items() if multiple > 0}
    return tuple(step for step in ordered if step not in stay)
