"""A training step on a tiny model: what moves, what must not, and that it is always the same."""

import math
from dataclasses import replace

import msgspec
import pytest
import torch
from trainer_records import MODEL, PREFIX, consumed, experience, pair, rollout

from headrace.config import RunConfig
from headrace.errors import TrainingError
from headrace.policy.model import Weights, initial_weights
from headrace.policy.tree import Group, tree_logp
from headrace.trainer import forward
from headrace.trainer.admission import Entry, admit
from headrace.trainer.config import LossConfig, StepSettings, TrainerConfig
from headrace.trainer.learner import Cancelled, learn, unit_gradient
from headrace.trainer.optimizer import adamw, clipped, gradient_norm
from headrace.trainer.state import State, fresh, published, remember
from headrace.trainer.step import StepResult, run_step
from headrace.wire.records import Experience, Span

CONFIG = TrainerConfig(lr=1e-2, microbatch_groups=1)


def _state(seed: int = 3) -> State:
    weights = initial_weights(MODEL, seed)
    for name in weights:  # blocks that do nothing would hide their gradients
        if name.endswith((".out", ".down")):
            weights[name] = initial_weights(MODEL, seed + 1)["embed"][:1, :1] + torch.linspace(
                -0.2, 0.2, weights[name].numel()
            ).view_as(weights[name])
    return fresh(weights, {"experience/0": 0})


def _step(
    state: State, *records: Experience, config: TrainerConfig = CONFIG, cancelled: bool = False
) -> StepResult:
    entries = [Entry(consumed(r.group_id, offset), r) for offset, r in enumerate(records)]
    settings = StepSettings(run=RunConfig(lag_versions_max=2), trainer=config)
    return run_step(
        state,
        entries,
        {"experience/0": len(records)},
        model=MODEL,
        settings=settings,
        cancelled=lambda: cancelled,
    )


def _on_policy(state: State, record: Experience) -> Experience:
    """The same group with the log-probabilities that the policy itself gives."""
    weights = published(state.masters)
    rollouts = []
    for item in record.rollouts:
        own = list(memoryview(item.steps[0].tokens_out).cast("I"))
        [[logp]] = tree_logp(weights, MODEL, [Group(list(PREFIX), [own])], item.steps[0].temperature).logp
        step = msgspec.structs.replace(item.steps[0], logp=logp.numpy().tobytes())
        rollouts.append(msgspec.structs.replace(item, steps=(step,)))
    return msgspec.structs.replace(record, rollouts=tuple(rollouts))


def _same(a: Weights, b: Weights) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_gradient_is_minus_advantage_over_tokens_times_the_slope_of_logp() -> None:
    """Two groups, 8 trained tokens: d loss = -sum A d logp / 8, computed again by plain autograd; its norm
    is the one that the ledger reports."""
    state = _state()
    records = [_on_policy(state, pair("a")), _on_policy(state, pair("b", first=20))]
    result = _step(state, *records)
    leaves = {name: weight.requires_grad_() for name, weight in published(state.masters).items()}
    for own, advantage in (((9, 10), 0.5), ((10, 11), -0.5), ((20, 10), 0.5), ((21, 11), -0.5)):
        [[logp]] = tree_logp(leaves, MODEL, [Group(list(PREFIX), [list(own)])], 1.0).logp
        (-advantage * logp.sum() / 8).backward()  # type: ignore[no-untyped-call]
    gradients = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    assert result.metrics["gradient.norm"] == pytest.approx(gradient_norm(gradients), rel=1e-5)
    # Adam's first update moves each weight by lr against the sign of its gradient.
    for name, gradient in gradients.items():
        clear = gradient.abs() > 1e-4
        moved = (result.state.masters[name] - state.masters[name])[clear]
        torch.testing.assert_close(moved, -1e-2 * gradient[clear].sign(), rtol=2e-3, atol=0)


def test_rewarded_tokens_become_likelier() -> None:
    """After a step the rewarded member has gained probability and the other has lost."""
    state = _state()
    result = _step(state, _on_policy(state, pair("a")), config=TrainerConfig(lr=1e-3))
    for own, direction in (([9, 10], 1), ([10, 11], -1)):
        before, after = (
            float(tree_logp(published(s.masters), MODEL, [Group(list(PREFIX), [own])], 1.0).logp[0][0].sum())
            for s in (state, result.state)
        )
        assert (after - before) * direction > 0


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_on_policy_mismatch_is_exactly_zero(temperature: float) -> None:
    """Log-probabilities compare at the temperature of sampling on both sides."""
    state = _state()
    group = experience("a", [rollout(m, float(m), temperature=temperature) for m in (0, 1)])
    metrics = _step(state, _on_policy(state, group)).metrics
    assert metrics["mismatch.abs_max"] == 0.0
    assert metrics["mismatch.k3_mean"] == 0.0
    assert metrics["mismatch.sample_size"] == 1.0
    assert metrics["mismatch.lag0.tokens"] == 4.0


def test_nothing_to_train_changes_nothing_but_the_version() -> None:
    """A batch of drops makes version 1 with the weights of version 0."""
    state = _state()
    record = experience("a", [rollout(0, 0.5), rollout(1, 0.5)])
    result = _step(state, record).state
    assert result == replace(state, step=1, positions={"experience/0": 1}, seen={"a": 1})
    assert result.masters is state.masters


@pytest.mark.parametrize("loss", [LossConfig(veto=1e3), LossConfig(correction="icepop", icepop_low=1e3)])
def test_an_all_masked_batch_changes_nothing(loss: LossConfig) -> None:
    """Not even the moments: no decay without a gradient."""
    state = _step(_state(), pair("z")).state
    config = replace_config(CONFIG, loss=loss, weight_decay=0.1)
    result = _step(state, pair("a", version=1), config=config)
    assert result.metrics["mask.share"] == 1.0
    assert result.state.root == state.root
    assert _same(result.state.masters, state.masters)
    assert _same(result.state.moment1, state.moment1)
    assert result.state.updates == state.updates


def replace_config(config: TrainerConfig, **changes: object) -> TrainerConfig:
    return msgspec.structs.replace(config, **changes)


def test_a_number_that_is_not_finite_stops_the_step_and_names_the_record() -> None:
    """An infinite advantage in the second group: it is named, and the state is as it was."""
    state = _state()
    before = {name: weight.clone() for name, weight in state.masters.items()}
    units = _step(state, pair("a"), pair("b")).admission.units
    units[1] = replace(units[1], advantages=(math.inf, -0.5))
    with pytest.raises(TrainingError, match=r"experience\[0\]@1: expected a finite loss"):
        learn(state, units, model=MODEL, config=CONFIG, cancelled=lambda: False)
    assert _same(before, state.masters)
    state.masters["embed"][20] = math.nan
    with pytest.raises(
        TrainingError, match=r"experience\[0\]@0: group a: member 0: expected finite log-prob"
    ):
        _step(state, pair("a"))


def test_same_records_same_bits() -> None:
    """Twice the same step has one root; another order of the records is another step."""
    records = [pair("a"), pair("b", first=20), pair("c", first=30)]
    first, again = _step(_state(), *records).state, _step(_state(), *records).state
    assert first.root == again.root
    assert _same(first.masters, again.masters)
    assert _same(first.moment2, again.moment2)


def test_microbatches_threads_and_order_leave_no_trace() -> None:
    """Any number of groups at a time, in any order, on one or two threads: one root, one loss, one norm."""
    records = [pair("a"), pair("b", first=20), pair("c", first=30), pair("d", first=40)]
    found = set()
    before = torch.get_num_threads()
    try:
        for threads, groups, turned in ((1, 1, 1), (1, 2, 1), (1, 3, -1), (2, 8, 1), (2, 1, -1)):
            torch.set_num_threads(threads)
            config = replace_config(CONFIG, microbatch_groups=groups)
            result = _step(_state(), *records[::turned], config=config)
            found.add((result.state.root, result.metrics["loss"], result.metrics["gradient.norm"]))
    finally:
        torch.set_num_threads(before)
    assert len(found) == 1


def test_units_share_out_the_gradient() -> None:
    """The units' own gradients add up to the step's."""
    state = _state()
    entries = [Entry(consumed(r.group_id, n), r) for n, r in enumerate([pair("a"), pair("b", first=20)])]
    answer = admit(
        entries,
        version=0,
        seen={},
        model=MODEL,
        lag_versions_max=2,
        sequence_tokens_max=64,
        scale_std=False,
    )
    parts = [unit_gradient(state, unit, 8, model=MODEL, config=CONFIG) for unit in answer.units]
    whole = learn(state, answer.units, model=MODEL, config=CONFIG, cancelled=lambda: False)
    total = {name: parts[0][name] + parts[1][name] for name in parts[0]}
    assert whole.metrics["gradient.norm"] == pytest.approx(gradient_norm(total), rel=1e-6)


def test_equal_members_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three members, two of them alike: two sequences are computed, the gradient is that of three."""
    members = [rollout(0, 1.0), rollout(1, 1.0), rollout(2, 0.0, [((), (11, 12))])]
    merged = _step(_state(), experience("a", members))
    monkeypatch.setattr(forward, "_distinct", lambda found: (list(found), list(range(len(found)))))
    apart = _step(_state(), experience("a", members))
    assert (merged.metrics["tokens.forward"], apart.metrics["tokens.forward"]) == (4 + 2 * 2, 4 + 3 * 2)
    assert merged.metrics["gradient.norm"] == pytest.approx(apart.metrics["gradient.norm"], rel=1e-5)
    assert merged.metrics["loss"] == pytest.approx(apart.metrics["loss"], rel=1e-6)


def test_two_passes_are_two_updates() -> None:
    """The second pass starts from the first one's weights and keeps its old log-probabilities."""
    result = _step(_state(), pair("a"), config=replace_config(CONFIG, epochs=2))
    assert result.state.updates == 2
    assert result.state.root != _step(_state(), pair("a")).state.root


def test_a_stop_abandons_the_step() -> None:
    """Between two microbatches, without a trace."""
    with pytest.raises(Cancelled):
        _step(_state(), pair("a"), cancelled=True)


def test_recorded_routes_are_replayed() -> None:
    """The recorded experts are used, and where the router would choose others it is counted."""
    members = [rollout(m, float(m), [((), (9 + m, 10))], routes=True) for m in (0, 1)]
    metrics = _step(_state(), experience("a", members)).metrics
    assert 0 < metrics["route.disagreement"] < 1
    assert _step(_state(), pair("a")).metrics["route.disagreement"] == 0.0


def test_mismatch_by_lag() -> None:
    """Half of the tokens at lag 1: their difference stands apart."""
    state = replace(_state(), step=1)
    fresh_group, old_group = _on_policy(state, pair("a", version=1)), pair("b", version=0)
    metrics = _step(state, fresh_group, old_group).metrics
    assert metrics["mismatch.lag0.abs_max"] == 0.0
    assert metrics["mismatch.lag1.abs_max"] > 0.1
    assert metrics["lag.mean"] == 0.5


def test_a_token_after_a_swap_is_not_on_policy() -> None:
    """Two tokens a member: one of a turn that saw the swap is sampled at version 1 and counts at lag 1 with
    all of its turn; so does the turn's whole group, which shares the prompt of its first member."""
    state = replace(_state(), step=1)
    fresh_group, swapped = _on_policy(state, pair("a", version=1)), pair("b", version=1)
    spans = (Span(start=0, end=1, weights_version=0), Span(start=1, end=2, weights_version=1))
    first, second = swapped.rollouts
    step = msgspec.structs.replace(first.steps[0], spans=spans, weights_version=0)
    swapped = msgspec.structs.replace(
        swapped, rollouts=(msgspec.structs.replace(first, steps=(step,)), second)
    )
    metrics = _step(state, fresh_group, swapped).metrics
    assert metrics["mismatch.lag0.tokens"] == metrics["mismatch.lag1.tokens"] == 4.0
    assert metrics["mismatch.lag0.abs_max"] == 0.0
    assert metrics["lag.mean"] == 1 / 8


def test_adamw_by_hand() -> None:
    """One weight 2, gradient 3, lr 0.1, decay 0.5: first update 2 x 0.95 - 0.1 x 3 / 3; then the moments."""
    config = TrainerConfig(lr=0.1, beta1=0.9, beta2=0.99, weight_decay=0.5)
    weight, zero = {"w": torch.tensor([2.0])}, {"w": torch.zeros(1)}
    masters, moment1, moment2 = adamw(config, weight, zero, zero, {"w": torch.tensor([3.0])}, 1)
    assert masters["w"].item() == pytest.approx(1.8)
    assert moment1["w"].item() == pytest.approx(0.3)
    assert moment2["w"].item() == pytest.approx(0.09)
    masters, *_ = adamw(config, masters, moment1, moment2, {"w": torch.tensor([-3.0])}, 2)
    # moment1 = 0.27 - 0.3 = -0.03, over 0.19; moment2 = 0.0891 + 0.09 = 0.1791, over 0.0199, root 3
    assert masters["w"].item() == pytest.approx(1.8 * 0.95 + 0.1 * (0.03 / 0.19) / 3)


def test_gradients_are_clipped_as_one() -> None:
    """3 and 4 have norm 5; clipped to 1 they are 0.6 and 0.8."""
    gradients = {"a": torch.tensor([3.0]), "b": torch.tensor([4.0])}
    norm = gradient_norm(gradients)
    assert norm == 5.0
    assert [g.item() for g in clipped(gradients, norm, 1.0).values()] == pytest.approx([0.6, 0.8])
    assert clipped(gradients, norm, 5.0) is gradients


def test_memory_of_ids_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three may be remembered: the oldest makes room."""
    monkeypatch.setattr("headrace.trainer.state.SEEN_MAX", 3)
    assert list(remember({"a": 1, "b": 1}, ["c", "d"], 2)) == ["b", "c", "d"]
