"""Checkpoints: all of the state, or a refusal."""

import pytest
import torch
from trainer_records import MODEL, consumed, pair

from headrace.config import RunConfig
from headrace.errors import StoreError
from headrace.policy.model import initial_weights
from headrace.trainer import checkpoint
from headrace.trainer.admission import Entry
from headrace.trainer.config import StepSettings, TrainerConfig
from headrace.trainer.state import State, fresh
from headrace.trainer.step import run_step


def _after(state: State, group: str) -> State:
    settings = StepSettings(run=RunConfig(), trainer=TrainerConfig(lr=1e-2))
    entries = [Entry(consumed(group), pair(group, version=state.step))]
    return run_step(state, entries, {"experience/0": 1}, model=MODEL, settings=settings).state


def _trained() -> State:
    return _after(fresh(initial_weights(MODEL, 1), {"experience/0": 0, "experience/1": 7}), "a")


def test_nothing_is_lost() -> None:
    """A state read back is equal in every field, in every bit, and goes on to the same next state."""
    state = _trained()
    data = checkpoint.encode(state, "run")
    assert data == checkpoint.encode(state, "run")
    back = checkpoint.decode(data, "run", "here")
    for name in ("step", "updates", "positions", "seen", "root"):
        assert getattr(back, name) == getattr(state, name)
    for part in ("masters", "moment1", "moment2"):
        before, after = getattr(state, part), getattr(back, part)
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)
    assert _after(back, "b").root == _after(state, "b").root
    assert _after(state, "b").root != state.root


@pytest.mark.parametrize("cut", [0, 7, 100, -1])
def test_a_truncated_checkpoint_is_refused(cut: int) -> None:
    """However much is missing, the place is named and nothing else is raised."""
    with pytest.raises(StoreError, match=r"^here: expected a checkpoint"):
        checkpoint.decode(checkpoint.encode(_trained(), "run")[:cut], "run", "here")


def test_a_checkpoint_of_another_run_is_refused() -> None:
    """Its weights would be trained on, silently."""
    with pytest.raises(StoreError, match=r"expected a checkpoint of run 'other' .* got run 'run'"):
        checkpoint.decode(checkpoint.encode(_trained(), "run"), "other", "here")
