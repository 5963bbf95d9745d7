"""`headrace diff`: the first step at which two runs part, and why."""

import json
from pathlib import Path
from typing import Any

import account_log as log
import msgspec
import pytest
from account_log import Change, closed, group, made

from headrace.cli import main
from headrace.wire import records as r

replace = msgspec.structs.replace
AT = "(experience[0]@5)"


def unchanged(ledger: list[r.TrainStep]) -> list[r.TrainStep]:
    return ledger


def from_step(number: int, **changes: Any) -> Change:
    """A ledger in which step `number` and those after it are otherwise."""
    return lambda ledger: [replace(s, **changes) if s.step >= number else s for s in ledger]


def run_dir(path: Path, *, change: Change = unchanged, steps: Any = None) -> str:
    path.mkdir()
    (path / "run.toml").write_text('[run]\nname = "sample"\n')
    made(path / "bus.sqlite", change=change, steps=steps)
    return str(path)


def told(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    code = main(["diff", *words, "--json"])
    return code, json.loads(capsys.readouterr().out)


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> str:
    return run_dir(tmp_path_factory.mktemp("runs") / "a")


def shorter(ledger: list[r.TrainStep]) -> list[r.TrainStep]:
    return [
        replace(s, threads=2, config='{"run":{"name":"b","seed":0},"trainer":{"lr":0.001}}')
        for s in ledger[:2]
    ]


def test_equal_over_the_common_length(first: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A shorter run with another name and thread count: exit code 0, and what left no trace is told."""
    code, found = told(capsys, first, run_dir(tmp_path / "b", change=shorter))
    assert (code, found["equal"], found["common"]) == (0, True, 2)
    assert (found["a"]["steps"], found["b"]["steps"]) == (3, 2)
    assert found["notes"] == ["provenance, from step 1: threads 1 / 2"]


def other_group(ledger: list[r.TrainStep]) -> list[r.TrainStep]:
    second = ledger[1]
    consumed = (second.consumed[0], replace(second.consumed[1], group_id=group(70)), *second.consumed[2:])
    return [
        ledger[0],
        replace(second, consumed=consumed, root_after="x"),
        replace(ledger[2], root_before="x"),
    ]


def another_answer(ledger: list[r.TrainStep]) -> list[r.TrainStep]:
    return [*ledger[:2], replace(ledger[2], drops=tuple(replace(d, reason="late") for d in ledger[2].drops))]


@pytest.mark.parametrize(
    ("change", "step", "why", "said"),
    [
        (other_group, 2, "records", f"record 2 of 4: {group(4)} {AT} / {group(70)} {AT}"),
        (
            from_step(3, root_after="x", config='{"run":{"seed":0},"trainer":{"lr":0.002}}'),
            3,
            "configuration",
            "trainer.lr 0.001 / 0.002",
        ),
        (from_step(2, root_after="x", seed=7), 2, "seed", "0 / 7"),
        (from_step(1, root_before="y"), 1, "start", "root root0 / y"),
        (another_answer, 3, "answers", f"{group(7)}: stale / late"),
        (lambda ledger: [ledger[0], ledger[2]], 3, "hole", "step 2 / 3 comes next"),
    ],
    ids=["records", "configuration", "seed", "start", "answers", "hole"],
)
def test_why_they_part(
    first: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    change: Change,
    step: int,
    why: str,
    said: str,
) -> None:
    """The first cause is the one told, with both sides of it; exit code 1."""
    code, found = told(capsys, first, run_dir(tmp_path / "b", change=change))
    assert (code, found["step"], found["why"]) == (1, step, why)
    assert found["causes"][0]["text"] == said


def test_numerics_only_after_the_records_were_compared(
    first: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another root from equal records is numerics, with what computed it and never a setting that changes
    nothing; from another reward, records."""
    config = '{"run":{"seed":0,"steps_max":9},"trainer":{"lr":0.001}}'
    change = from_step(2, root_after="x", libraries={"torch": "3"}, config=config)
    _, found = told(capsys, first, run_dir(tmp_path / "b", change=change))
    assert (found["step"], found["why"]) == (2, "weights")
    assert {"kind": "provenance", "text": "torch 2 / 3"} in found["causes"]
    assert {"kind": "settings", "text": "run.steps_max not there / 9"} in found["causes"]
    steps = log.answered()
    steps[1][2] = closed(5, (0.5, 0.0), tokens=(38, 39))
    _, found = told(capsys, first, run_dir(tmp_path / "c", change=change, steps=steps))
    assert (found["step"], found["why"]) == (2, "records")
    assert found["causes"][0]["text"] == f"{group(5)} (experience[0]@6): member 0: reward 1.0 / 0.5"


def test_the_screen(
    first: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Says up to where they are equal, and why they part in words."""
    monkeypatch.setenv("COLUMNS", "80")
    other = run_dir(tmp_path / "b", change=from_step(3, root_after="x"))
    assert main(["diff", first, other]) == 1
    screen = capsys.readouterr().out
    assert "equal up to step 2\nthey part at step 3: numerics" in screen
    assert "nothing recorded of code, libraries and kernels differs" in screen


def test_runs_on_one_bus_and_what_is_none(
    first: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A name is a run of the bus that is pointed at; anything else is told."""
    assert main(["diff", "sample", "sample", "--run-dir", first]) == 0
    capsys.readouterr()
    assert main(["diff", "sample", "simple", "--run-dir", first]) == 2
    assert "did you mean 'sample'?" in capsys.readouterr().err
    assert main(["diff", first, str(tmp_path)]) == 2
    assert "expected a run's directory" in capsys.readouterr().err
