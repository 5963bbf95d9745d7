"""`headrace replay --what-if`: the same records under other settings, and nothing of it anywhere but on the
screen."""

from pathlib import Path

import pytest
from altered_log import contents, record_run, replay
from packed_place import Place

from headrace.wire.records import TrainStep


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("recorded"))


@pytest.fixture(scope="module")
def steps(place: Place) -> list[TrainStep]:
    return record_run(place)


def test_another_learning_rate(place: Place, steps: list[TrainStep]) -> None:
    """AdamW without decay moves each weight by lr times something that lr is not in: with three times the lr,
    the first step ends two recorded ways further."""
    before = contents(place.directory)
    said = replay(place.directory, "1", "--what-if", "trainer.lr=0.03", "--json")
    assert said.code == 0
    [step] = said.json["steps"]
    assert step["distance"]["relative"] == pytest.approx(2.0, rel=1e-4)
    assert step["recorded"]["root"] == steps[0].root_after != step["what_if"]["root"]
    assert step["recorded"]["metrics"] == step["what_if"]["metrics"]  # both of the forward pass before
    assert step["recorded"]["logp_change_positive"] > 0 > step["recorded"]["logp_change_negative"]
    assert step["what_if"]["logp_change_positive"] > step["recorded"]["logp_change_positive"]
    assert contents(place.directory) == before


def test_a_learning_rate_of_nothing(place: Place, steps: list[TrainStep]) -> None:
    """With lr 0 the weights stay where they were: exactly one recorded way apart, and no token changes."""
    said = replay(place.directory, "2", "--what-if", "trainer.lr=0", "--json")
    [step] = said.json["steps"]
    assert step["distance"]["relative"] == 1.0
    assert step["what_if"]["root"] == steps[1].root_before
    assert (step["what_if"]["logp_change_positive"], step["what_if"]["logp_change_negative"]) == (0.0, 0.0)


def test_both_ways_go_on_from_their_own_weights(place: Place, steps: list[TrainStep]) -> None:
    """Over a range the two part: the loss of a later step is another, and the recorded one is as recorded."""
    said = replay(place.directory, "1..3", "--what-if", "trainer.lr=0.02", "--json")
    found = said.json["steps"]
    assert [step["recorded_equal"] for step in found] == [True] * 3
    assert [step["recorded"]["root"] for step in found] == [step.root_after for step in steps[:3]]
    losses = [(step["recorded"]["metrics"]["loss"], step["what_if"]["metrics"]["loss"]) for step in found]
    assert losses[0][0] == losses[0][1]
    assert losses[1][0] != losses[1][1]
    apart = [step["distance"]["l2"] for step in found]
    assert apart == sorted(apart)


def test_what_changes_nothing_says_so(place: Place, steps: list[TrainStep]) -> None:
    """A setting that a step does not use."""
    said = replay(place.directory, "1", "--what-if", "trainer.alarm_ms=5")
    assert "the same weights: these settings have no effect on this step" in said.out


def test_side_by_side(place: Place, steps: list[TrainStep]) -> None:
    """The screen: settings as recorded and now, numbers beside each other; with no lag allowed, the groups of
    version 0 are stale in step 2."""
    said = replay(
        place.directory, "2", "--what-if", "run.lag_versions_max=0", "--what-if", "trainer.loss.clip-high=0.3"
    )
    assert said.code == 0
    assert "  run.lag_versions_max = 0 (recorded: 99)" in said.out
    assert "  trainer.loss.clip_high = 0.3 (recorded: 0.28)" in said.out
    rows = {line[:38].strip(): line[38:].split() for line in said.out.splitlines()}
    assert rows["step 2"] == ["recorded", "what", "if"]
    assert rows["units.trained"] == ["2", "0"]
    assert rows["drops.stale"] == ["-", "2"]
    assert rows["root"] == [steps[1].root_after[:12], steps[1].root_before[:12]]
    assert all(len(line) <= 80 for line in said.out.splitlines())


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ("trainer.lrr=1", "trainer.lrr: trainer: unknown key 'lrr': did you mean 'lr'?"),
        ("trainer.loss.clip_hi=1", "did you mean 'clip_high'?"),
        ("trainer.lr=fast", "trainer.lr: Expected `float`, got `str`"),
        ("trainer.lr", "--what-if trainer.lr: expected SETTING=VALUE, e.g. trainer.lr=2e-5"),
        ("inference.batch=2", "unknown key 'inference'"),
    ],
)
def test_settings_that_steps_do_not_have(
    place: Place, steps: list[TrainStep], given: str, reason: str
) -> None:
    """One line, the nearest name, exit code 2."""
    said = replay(place.directory, "1", "--what-if", given)
    assert (said.code, said.out, said.err.count("\n")) == (2, "", 1)
    assert reason in said.err


def test_a_way_that_is_not_the_recorded_one(
    place: Place, steps: list[TrainStep], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What if needs the recorded state to start from: on a machine that computes otherwise it says so."""
    monkeypatch.setattr("headrace.kernels.moe.silu", lambda x: x / (1 + (-x).exp()) * (1 + 2**-12))
    said = replay(place.directory, "2", "--what-if", "trainer.lr=0.02")
    assert said.code == 9
    assert "step 1 computed again: expected root" in said.err
