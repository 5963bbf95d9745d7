"""The report says what the log holds, no more, and shows text of models without interpreting it."""

import asyncio
import json
import re
from pathlib import Path

import pytest
from sample_log import RUN, evaluation, group, prompt, train_step, write

from headrace.cli import main, report
from headrace.cli import settings as tree
from headrace.cli.report_figure import rolling
from headrace.cli.report_page import pairs
from headrace.cli.run_view import IDLE, LAG, LAG_MAX, REWARD, RunView
from headrace.consumers.comparison import Difference
from headrace.wire import records as r

FUNCTIONS = 30
STEP = {REWARD: 0.5, LAG: 1.0, LAG_MAX: 2.0, IDLE: 0.1, "tokens.trained": 100.0}


def run_dir(path: Path, passed_after: int) -> Path:
    """A run in which no held-out try passed before and the first `passed_after` functions pass after."""
    records = [
        *(prompt(n) for n in range(4)),
        *(
            train_step(n, [n], [n], [r.Drop(group_id=group(n), reason="stale", member=1)], **STEP)
            for n in (1, 2)
        ),
        *(
            evaluation(name, version, n, version > 0 and n < passed_after, mode=mode)
            for name, version in (("before", 0), ("after", 2))
            for mode in ("sampled", "greedy")
            for n in range(FUNCTIONS)
        ),
    ]
    tree.save(tree.load(path, environment={}, flags={"run.name": RUN}), path)
    asyncio.run(write(path / "bus.sqlite", records))
    return path


def test_an_improvement_is_told_with_its_interval(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """20 of 30 functions pass only after: +66.7 points, an interval above 0, page and picture are there."""
    home = run_dir(tmp_path, passed_after=20)
    assert main(["report", "--run-dir", str(home)]) == 0
    told = capsys.readouterr().out
    assert "0.0 % -> 66.7 %, +66.7 points [+" in told
    assert "no significant change" not in told
    assert "30 tasks of 30 functions" in told
    assert f"headrace trajectory {RUN}-0000000 --run-dir" in told
    assert (home / "report/report.png").read_bytes().startswith(b"\x89PNG")
    assert main(["report", "--json", "--run-dir", str(home)]) == 0
    document = json.loads(capsys.readouterr().out)
    sampled = next(d for d in document["differences"] if (d["mode"], d["measure"]) == ("sampled", "any"))
    assert sampled["significant"] and sampled["change"] == pytest.approx(2 / 3)
    assert (document["version_before"], document["version_after"]) == (0, 2)


def test_no_change_is_called_no_change(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One function more out of 30 is within chance, and the report says so."""
    assert main(["report", "--run-dir", str(run_dir(tmp_path, passed_after=1))]) == 0
    told = capsys.readouterr().out
    assert told.count("no significant change seen") == 2
    assert "No significant change seen" in told
    assert "sharpening" not in told


def test_a_run_without_rounds_still_has_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Before any held-out round, or any step, the report says that nothing can be said."""
    tree.save(tree.load(tmp_path, environment={}, flags={"run.name": RUN}), tmp_path)
    asyncio.run(write(tmp_path / "bus.sqlite", [prompt(0)]))
    assert main(["report", "--run-dir", str(tmp_path)]) == 0
    assert "nothing can be said about the pass rate" in capsys.readouterr().out


def test_the_page_needs_nothing_and_interprets_nothing(tmp_path: Path) -> None:
    """One file without links to other places; what a model wrote (`<b>x`) stands there as text."""
    home = run_dir(tmp_path, passed_after=20)
    assert main(["report", "--run-dir", str(home)]) == 0
    page = (home / "report/report.html").read_text()
    assert "<b>" not in page and "&lt;b&gt;x" in page
    assert not re.search(r'(src|href)="(?!data:)', page)
    assert "$" not in re.sub(r"<pre>.*?</pre>", "", page, flags=re.S)  # nothing of the template is left
    assert "failed before, passes now: 20 of 30" in page
    assert "members withheld: stale" in page


def difference(mode: str, change: float, low: float, high: float) -> Difference:
    return Difference(
        mode=mode,  # type: ignore[arg-type]
        measure="any",
        kind="all",
        before=0.2,
        after=0.2 + change,
        low=low,
        high=high,
        tries=1,
        tasks=1,
        functions=1,
    )


@pytest.mark.parametrize(
    ("sampled", "greedy", "words"),
    [
        ((0.1, 0.05, 0.15), (0.0, -0.1, 0.1), "sharpening, not a new ability"),
        ((0.1, 0.05, 0.15), (0.1, 0.01, 0.2), "Greedy tries pass more often too"),
        ((-0.1, -0.15, -0.05), (0.0, -0.1, 0.1), "went down"),
        ((0.0, -0.1, 0.1), (0.0, -0.1, 0.1), "No significant change seen"),
        ((0.1, 0.05, 0.15), (-0.1, -0.2, -0.01), "paid for one with the other"),
        ((0.0, -0.1, 0.1), (0.1, 0.05, 0.2), "Only the greedy rate changed"),
    ],
)
def test_reading_claims_no_more_than_the_intervals(
    sampled: tuple[float, float, float], greedy: tuple[float, float, float], words: str
) -> None:
    """Each pair of intervals has its own sentence."""
    told = " ".join(report.reading(difference("sampled", *sampled), difference("greedy", *greedy)))
    assert words in told


def test_pairs_are_by_task_and_sample() -> None:
    """A try is compared with that of the same task and sample only; greedy and lone ones are left out."""
    make = [
        evaluation("before", 0, 1, False),
        evaluation("after", 2, 1, True),
        evaluation("before", 0, 2, True, sample=1),
        evaluation("after", 2, 2, False, sample=0),
        evaluation("before", 0, 3, True, mode="greedy"),
        evaluation("after", 2, 3, False, mode="greedy"),
    ]
    found = report.Findings(RunView("x"))
    for _, _, record in make:
        assert isinstance(record, r.Evaluation)
        (found.before if record.round == "before" else found.after).append(record)
    assert {key: len(value) for key, value in pairs(found).items()} == {(False, True): 1}


def test_rolling_mean() -> None:
    """The mean of a value and those before it, by hand."""
    assert rolling([1, 3, 5, 7], 2) == [1, 2, 4, 6]
