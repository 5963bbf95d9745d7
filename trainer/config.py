"""Settings of a training step. All of them stand, resolved, in every ledger record (`StepSettings`)."""

from typing import Literal

import msgspec

from headrace.config import AtLeastOne, AtLeastZero, RunConfig


class LossConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Policy-gradient loss with importance correction (`trainer.loss` has the formulas and their sources)."""

    correction: Literal["ppo", "tis", "icepop"] = "tis"
    """What the ratio to the rollout's policy does: enters the clipped surrogate (`ppo`), weighs each token up
    to `tis_max`, or weighs it inside the IcePop band and masks it outside."""
    clip_low: float = 0.2
    clip_high: float = 0.28
    """Larger than `clip_low`: clip-higher."""
    dual_clip: float | None = None
    """Bound, above 1, on the ratio where the advantage is negative, e.g. 3.0."""
    tis_max: float = 2.0
    icepop_low: float = 0.5
    icepop_high: float = 2.0
    sequence_low: float | None = None
    """Sequences whose geometric mean ratio is below are masked, e.g. 0.99."""
    sequence_high: float | None = None
    veto: float | None = None
    """Sequences with any token's ratio below are masked, e.g. 1e-4."""
    off_policy_delta: float | None = None
    """Sequences of negative advantage whose mean log-prob fell by more since the rollout are masked."""


class TrainerConfig(msgspec.Struct, frozen=True, kw_only=True):
    start_from: str = ""
    """File of a checkpoint that a new run begins with, instead of the seed. Read once: the run's log keeps
    the state, and a run that has begun goes on without the file."""
    lr: float = 4e-4
    beta1: float = 0.9
    beta2: float = 0.95
    adam_eps: float = 1e-8
    weight_decay: float = 0.0
    grad_norm_max: float = 1.0
    epochs: int = 1
    """Optimizer passes over one step's batch."""
    advantage_std: bool = False
    """Advantage (r - mean) / (std + 1e-6) instead of r - mean."""
    baseline_rate: float = 0.05
    """How far a step moves the running mean that single live units are measured against."""
    user_units_max: int = 8
    """Live units of one user that a step trains at most: nobody moves the model alone."""
    train_revoked: bool = False
    """Train units too that weights which have been rolled back generated (docs/release.md)."""
    sequence_tokens_max: int = 512
    """Prompt and own part together; a longer member is withheld."""
    microbatch_groups: int = 8
    """Groups in one forward and backward: speed and memory, not the result."""
    threads: int = 1
    """Of torch, in each rank: speed, not the result."""
    ranks: int = 1
    """Processes that compute a step together, on this machine: speed, not the result."""
    loss: LossConfig = LossConfig()
    checkpoint_every: AtLeastOne = 10
    """Steps between checkpoints: about what a restart computes again, at most."""
    checkpoints_kept: AtLeastOne = 2
    """The newest ones, of which the last but one is for the day the last is damaged."""
    checkpoints_forever_every: AtLeastZero = 0
    """The first checkpoint from each multiple of so many steps on is kept for ever; 0: none."""
    sweep_every_ms: AtLeastZero = 3_600_000
    """How often the trainer removes blobs that nobody names (docs/training.md); 0: never."""
    full_every: int = 20
    """Versions between full snapshots; the others are deltas against the version before."""
    alarm_ms: int = 60_000
    """Without any experience for so long, the trainer raises an alarm in its log."""
    outage_ms_max: int = 120_000
    """How long the trainer waits for a log that does not answer before it ends with an error."""


class StepSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a step's result depends on, beside its records and the state before it."""

    run: RunConfig
    trainer: TrainerConfig
