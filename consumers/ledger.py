"""The ledger of a run: its training steps and announced versions, as the log has them, and the next record.

Read whole at the trainer's start and checked: steps without a hole, each beginning with the weights that the
one before left. Not here: what a step computes (`trainer.step`).
"""

import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass

from headrace import log
from headrace.bus.protocol import Bus, Delivery
from headrace.config import canonical_json, config_sha256
from headrace.consumers.batches import Batch
from headrace.errors import TrainingError, WireError
from headrace.trainer.config import StepSettings
from headrace.trainer.provenance import Provenance
from headrace.trainer.state import State
from headrace.trainer.step import StepResult
from headrace.wire.codec import decode
from headrace.wire.records import Checkpoint, TrainStep, WeightsPublished
from headrace.wire.topics import TRAIN_STEPS, WEIGHTS

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Ledger:
    """`steps[i]` is step i + 1. `published` is by version; version 0 is the seed's."""

    steps: list[TrainStep]
    published: dict[int, WeightsPublished]

    @property
    def version(self) -> int:
        return len(self.steps)


async def read_ledger(bus: Bus, run_name: str) -> Ledger:
    """All that is committed now. Raises TrainingError for a ledger with a hole or a broken chain of roots, or
    a record under the run's key that can't be read: going on would train on a guess. What lies under another
    key is not the run's: it can't keep its trainer from starting."""
    steps: list[TrainStep] = []
    published: dict[int, WeightsPublished] = {}
    async for delivery in _deliveries(bus):
        if delivery.key != run_name.encode():
            continue
        try:
            record = decode(delivery.topic, delivery.value or b"", delivery.headers)
        except WireError as error:
            raise TrainingError(f"{delivery.place}: expected a record of the ledger: {error}") from error
        if isinstance(record, TrainStep) and record.run == run_name:
            _check_follows(record, steps, delivery)
            steps.append(record)
        elif isinstance(record, WeightsPublished) and record.run == run_name:
            published[record.version] = record
    return Ledger(steps, published)


def step_record(
    before: State,
    result: StepResult,
    batch: Batch,
    *,
    settings: StepSettings,
    now: Provenance,
    seconds: dict[str, float],
    beside_s: float,
    saved: Checkpoint | None,
    pruned: tuple[int, ...],
    started_ms: int,
    ended_ms: int,
) -> TrainStep:
    """Everything needed to compute this step again, and what it measured (docs/training.md names the
    numbers). `seconds`: of the step's phases, waiting included; `beside_s`: those in which a checkpoint was
    being written meanwhile."""
    total_s = sum(seconds.values()) or 1e-9
    learn_s = seconds["seconds.learn"] or 1e-9
    return TrainStep(
        run=settings.run.name,
        step=result.state.step,
        version_from=before.version,
        version_to=result.state.version,
        consumed=tuple(entry.consumed for entry in batch.entries),
        positions=batch.positions,
        admitted=tuple(unit.group_id for unit in result.admission.units),
        drops=tuple(result.admission.drops),
        config=canonical_json(settings),
        config_sha256=config_sha256(settings),
        seed=settings.run.seed,
        code=now.code,
        libraries=now.libraries,
        threads=now.threads,
        kernel_probe=now.kernel_probe,
        metrics={
            **result.metrics,
            **seconds,
            "checkpoint.beside_s": beside_s,
            "idle_share": seconds["seconds.wait"] / total_s,
            "tokens_per_s": result.metrics.get("tokens.forward", 0.0) / learn_s,
            "drops.other_run": float(batch.other_run),
        },
        root_before=before.root,
        root_after=result.state.root,
        checkpoint=saved,
        checkpoints_pruned=pruned,
        started_ms=started_ms,
        ended_ms=ended_ms,
    )


def log_step(record: TrainStep) -> None:
    """One line of the trainer's log."""
    shown = ("loss", "reward.mean", "lag.mean", "mismatch.abs_max", "idle_share", "seconds.learn")
    log.event(
        _logger,
        "step",
        level=logging.INFO,
        step=record.step,
        trained=len(record.admitted),
        dropped=len(record.drops),
        **{name: record.metrics.get(name, "-") for name in shown},
    )


async def _deliveries(bus: Bus) -> AsyncIterator[Delivery]:
    topics = [TRAIN_STEPS.name, WEIGHTS.name]
    begins, ends = await bus.begins(topics), await bus.ends(topics)
    for tp, end in ends.items():
        async for delivery in bus.read_range(tp, begins[tp], end):
            yield delivery


def _check_follows(record: TrainStep, steps: list[TrainStep], delivery: Delivery) -> None:
    if record.step != len(steps) + 1:
        raise TrainingError(
            f"{delivery.place}: run {record.run!r}: expected step {len(steps) + 1}, got {record.step}"
        )
    if steps and record.root_before != steps[-1].root_after:
        raise TrainingError(
            f"{delivery.place}: run {record.run!r}: step {record.step}: expected to begin with root"
            f" {steps[-1].root_after}, got {record.root_before}"
        )
