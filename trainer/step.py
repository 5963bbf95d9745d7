"""One training step: records -> admission -> loss -> optimizer -> the next state.

A deterministic function of the records, the state and the settings: the trainer consumer calls it to learn,
and calls it again with the ledger's records to recover (`run_step` is the only way to a new state). It knows
no broker and no store.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from headrace.policy.checkpoint import weights_root
from headrace.policy.model import ModelConfig
from headrace.trainer import metrics
from headrace.trainer.admission import Admission, Entry, admit
from headrace.trainer.advantage import baseline
from headrace.trainer.config import StepSettings
from headrace.trainer.learner import learn
from headrace.trainer.ranks import ALONE, Ranks
from headrace.trainer.state import State, published, remember

LIVE: Final = "live"


@dataclass(frozen=True, slots=True)
class StepResult:
    state: State
    admission: Admission
    metrics: dict[str, float]


def run_step(
    state: State,
    entries: Sequence[Entry],
    positions: dict[str, int],
    *,
    model: ModelConfig,
    settings: StepSettings,
    cancelled: Callable[[], bool] = lambda: False,
    ranks: Ranks = ALONE,
) -> StepResult:
    """The state after step `state.step + 1` on `entries`, which end before `positions`; `state` is not
    changed.

    Without anything to train the weights stay as they are and the version still moves on. With several
    `ranks` each calls it with the same arguments and gets the same result. Raises TrainingError that names
    the record when a number is not finite, `Cancelled` when told to stop.
    """
    config = settings.trainer
    admission = admit(
        entries,
        version=state.version,
        seen=state.seen,
        model=model,
        lag_versions_max=settings.run.lag_versions_max,
        sequence_tokens_max=config.sequence_tokens_max,
        scale_std=config.advantage_std,
        baseline=state.baselines.get(LIVE),
        user_units_max=config.user_units_max,
        train_revoked=config.train_revoked,
    )
    learned = learn(state, admission.units, model=model, config=config, cancelled=cancelled, ranks=ranks)
    step = state.step + 1
    mean = baseline(state.baselines.get(LIVE), admission.live_rewards, config.baseline_rate)
    new_state = replace(
        learned.state,
        step=step,
        positions=positions,
        seen=remember(state.seen, admission.read, step),
        baselines=state.baselines if mean is None else {LIVE: mean},
        root=state.root if learned.state is state else weights_root(published(learned.state.masters)),
    )
    ranks.agree(f"after step {step} the root", new_state.root)
    found = {
        "units.read": float(len(entries)),
        "units.trained": float(len(admission.units)),
        **metrics.spread("reward", admission.rewards),
        **metrics.live(admission.live_rewards, mean),
        **metrics.drop_counts(admission.drops),
        **learned.metrics,
    }
    return StepResult(new_state, admission, found)
