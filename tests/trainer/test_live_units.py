"""Single live units in the trainer: measured against a running mean, capped by user, beside groups."""

import math

import msgspec
import pytest
from trainer_records import MODEL, consumed, experience, pair, rollout

from headrace.config import RunConfig
from headrace.policy.model import initial_weights
from headrace.trainer import checkpoint
from headrace.trainer.admission import Admission, Entry, admit
from headrace.trainer.advantage import baseline
from headrace.trainer.config import StepSettings, TrainerConfig
from headrace.trainer.state import State, fresh
from headrace.trainer.step import StepResult, run_step
from headrace.wire.records import Experience


def live(name: str, reward: float | None, *, user: str = "", version: int = 0) -> Experience:
    """A suggestion that one user judged."""
    record = experience(name, [rollout(0, reward, version=version, group_id=name)])
    return msgspec.structs.replace(record, source="live", user=user, env="live")


def entries(*records: Experience) -> list[Entry]:
    return [Entry(consumed(record.group_id, n), record) for n, record in enumerate(records)]


def admitted(*records: Experience, mean: float | None = 0.0, cap: int = 99) -> Admission:
    return admit(
        entries(*records),
        version=2,
        seen={},
        model=MODEL,
        lag_versions_max=1,
        sequence_tokens_max=64,
        scale_std=False,
        baseline=mean,
        user_units_max=cap,
    )


def step(state: State, *records: Experience) -> StepResult:
    settings = StepSettings(run=RunConfig(), trainer=TrainerConfig(baseline_rate=0.5))
    return run_step(state, entries(*records), {}, model=MODEL, settings=settings)


def test_a_live_unit_is_measured_against_the_mean() -> None:
    """A group of one is no zero-advantage group when it is live; a simulated one is."""
    answer = admitted(live("a", 0.75, version=2), live("b", -0.25, version=2), mean=0.25)
    assert [unit.advantages for unit in answer.units] == [(0.5,), (-0.5,)]
    alone = msgspec.structs.replace(live("c", 0.75, version=2), source="sim")
    assert [drop.reason for drop in admitted(alone).drops] == ["zero_advantage"]


def test_the_first_units_are_measured_against_their_own_mean() -> None:
    """There is no mean yet: theirs, whatever is simulated beside them."""
    answer = admitted(pair("s"), live("a", 1.0, version=2), live("b", 0.0, version=2), mean=None)
    assert [unit.advantages for unit in answer.units if unit.source == "live"] == [(0.5,), (-0.5,)]


def test_what_is_not_trained_is_no_part_of_the_first_mean() -> None:
    """Neither an old unit, nor one sent twice, nor what one user gives beyond a share: the mean of the first
    units is the one that the state begins with."""
    records = [live("a", 1.0, user="u", version=2), live("b", 0.0, version=2)]
    beside = [live("a", 1.0, user="u", version=2), live("old", 0.75), live("c", 0.75, user="u", version=2)]
    answer = admitted(*records, *beside, mean=None, cap=1)
    assert [unit.advantages for unit in answer.units] == [(0.5,), (-0.5,)]
    assert baseline(None, answer.live_rewards, 0.5) == 0.5
    assert [drop.reason for drop in answer.drops] == ["duplicate", "stale", "user_cap"]


def test_a_user_has_a_share_of_a_step() -> None:
    """Units beyond it are dropped and counted; stale ones take no place; unknown users have no share."""
    records = [live(f"{n}", 0.75, user="u", version=2) for n in range(3)]
    records += [live("v", 0.75, user="v", version=2), live("x", 0.75), live("old", 0.75, user="v", version=0)]
    records += [live(f"n{n}", 0.75, version=2) for n in range(3)]
    answer = admitted(*records, cap=2)
    assert [unit.group_id for unit in answer.units] == ["0", "1", "v", "n0", "n1", "n2"]
    assert [(d.group_id, d.reason) for d in answer.drops] == [
        ("2", "user_cap"),
        ("x", "stale"),
        ("old", "stale"),
    ]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"closed": "failed", "reason": "never_shown", "rollouts": (), "missing": (0,)}, "never_shown"),
        ({"closed": "failed", "reason": "superseded", "missing": (0,)}, "superseded"),
        ({"closed": "failed", "reason": "continues r-live-7", "missing": (0,)}, "continued"),
        ({"closed": "failed", "reason": "state: lost a segment", "missing": (0,)}, "failed"),
        ({"closed": "timeout", "rollouts": (rollout(0, None),)}, "incomplete"),
        ({"rollouts": (rollout(0, 0.75, quarantined=True),)}, "quarantined"),
        ({"rollouts": (rollout(0, math.nan),)}, "malformed"),
        ({"rollouts": (rollout(0, 1.0), rollout(1, 0.0)), "group_size": 2}, "malformed"),
    ],
)
def test_what_is_not_trained_has_a_reason(changes: dict[str, object], reason: str) -> None:
    """No reward is invented for a suggestion that nobody saw or judged; a live group has one member."""
    record = msgspec.structs.replace(live("a", 0.75), **changes)
    assert [drop.reason for drop in admitted(record).drops] == [reason]


def test_the_running_mean() -> None:
    """By hand: the first mean, half of the way to the next, and untouched by a step without live units."""
    assert baseline(None, [], 0.5) is None
    assert baseline(None, [1.0, 0.0], 0.5) == 0.5
    assert baseline(0.5, [1.0, 1.0], 0.5) == 0.75
    assert baseline(0.5, [], 0.5) == 0.5


def test_the_mean_is_part_of_the_state() -> None:
    """It moves with every step that trains live units, and a checkpoint keeps it."""
    state = fresh(initial_weights(MODEL, 3), {})
    one = step(state, live("a", 0.75), live("b", -0.25))
    assert (one.state.baselines, one.metrics["live.trained"]) == ({"live": 0.25}, 2.0)
    two = step(one.state, pair("s"), live("c", 0.75, version=1))
    assert two.state.baselines == {"live": 0.5}
    three = step(two.state, pair("t", first=20))
    assert three.state.baselines == {"live": 0.5}
    assert checkpoint.decode(checkpoint.encode(two.state, "r"), "r", "x").baselines == {"live": 0.5}
    assert "live.trained" not in step(state, pair("s")).metrics
