"""The parts of the benchmark scripts on tiny sizes and hand-worked numbers, so that no script rots."""

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1]))  # the scripts are no part of the package

from benchmarks import inference, loop, streams
from benchmarks.page import table

from headrace.cli.run_view import StepPoint
from headrace.policy import checkpoint

BURN = "import time\nwhile time.process_time() < 0.3: pass\n"
PARENT = f"""
import subprocess, sys
subprocess.run([sys.executable, "-S", "-c", {BURN!r}], check=True)
print("burnt", flush=True)
sys.stdin.read()
"""


def ran(mode: str, seconds: float, *, lag: float = 0.0, stale: float = 0.0) -> loop.Ran:
    """Two steps of 32 groups, 30 trained; 1 s waited and 4 s worked in each."""
    metrics = {
        "seconds.wait": 1.0,
        "seconds.learn": 3.0,
        "seconds.store": 0.75,
        "seconds.commit": 0.25,
        "units.read": 32.0,
        "tokens.consumed": 100.0,
        "lag.mean": lag,
        "lag.max": lag,
        "mismatch.abs_max": lag / 8,
        "drops.zero_advantage": 2.0 - stale,
        "drops.stale": stale,
        "drops.stale.tokens": 40.0,
        "drops.other_run": 0.0,
    }
    steps = [StepPoint(step, 0, 0, 32, 30, metrics) for step in (4, 5)]
    return loop.Ran(mode, steps, seconds, Counter({"trainer": 8.0, "relay": 1.0}), 5.0)


def test_rates_of_a_run() -> None:
    """Two steps in 10 s are 12 a minute; 1 s of each 5 waited is 20 %; two equal runs are as one."""
    one = ran(loop.SYNCHRONOUS, 10.0, stale=1.0)
    for found in (one, loop.together([one, one])):
        assert found.per_minute == pytest.approx(12.0)
        assert found.idle_share == pytest.approx(0.2)
        assert found.busiest == "trainer"
    assert one.drops() == {"zero_advantage": 2, "stale": 2}
    assert loop.together([one, one]).cpu_s == {"trainer": 16.0, "relay": 2.0}
    assert loop.together([one, one]).others_s == 10.0


@pytest.mark.parametrize(("stale", "on_policy"), [(0.0, "yes"), (1.0, "no")])
def test_page_says_which_bars_hold(stale: float, on_policy: str) -> None:
    """A ratio of 1.6 holds, 20 % idle does not; a synchronous run with stale groups is not on policy."""
    runs = [
        ran(loop.ASYNCHRONOUS, 10.0, lag=2.0),
        ran(loop.SYNCHRONOUS, 16.0, stale=stale),
        ran(loop.CAPACITY, 10.0, lag=2.0),
    ]
    page = loop.page(runs, inference.Rate(600, 1.0, 0.5), inference.Rate(100, 1.0, 0.5))
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines()[-6:]]
    assert rows[1:] == [
        ["steps / min, asynchronous to synchronous", ">= 1.5", "1.60", "yes"],
        ["trainer idle, asynchronous", "<= 10%", "20.0%", "no"],
        ["trainer idle, asynchronous, 2 epochs", "<= 10%", "20.0%", "no"],
        ["tokens / s, batched to one by one", ">= 4.0", "6.0", "yes"],
        ["lag, mismatch, stale units, synchronous", "0, 0, 0", f"0, 0, {2 * stale:g}", on_policy],
    ]
    assert "busiest process trainer, 0.80 cores; all together 4.50 CPU s a step" in page


def test_modes_take_turns() -> None:
    """The second round runs backwards."""
    forth = [loop.ASYNCHRONOUS, loop.SYNCHRONOUS, loop.CAPACITY]
    assert loop.order(2) == [*forth, *reversed(forth)]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_time_of_dead_children_counts() -> None:
    """What a process started and outlived is in its processor seconds, and in the machine's."""
    busy_s = loop.busy_seconds()
    command = [sys.executable, "-S", "-c", PARENT]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "burnt\n"
        found = loop.cpu_seconds({"parent": parent.pid})
        busy_s = loop.busy_seconds() - busy_s
        parent.communicate(timeout=20)
    assert 0.25 < found["parent"] < 5.0
    assert busy_s > 0.25


def test_join_alone() -> None:
    """Every event of every group is counted."""
    assert streams.processor_alone(2).events == 2 * streams.EVENTS_A_GROUP


def test_inference_ways_answer_the_same_tokens() -> None:
    """Batched or one by one, a request gives as many tokens: the rates compare the same work."""
    work = inference.requests(checkpoint.load_seed()[0].vocabulary)[:1]
    many, single = inference.batched(work), inference.one_by_one(work)
    assert many.tokens == single.tokens > 0
    assert many.per_s == many.tokens / many.seconds


def test_table_aligns_numbers_to_the_right() -> None:
    """Words stand left, numbers right, with as many digits as they need."""
    assert table(["what", "n"], [["a", 1234], ["bc", 5.0]]) == (
        "| what |     n |\n| ---- | ----: |\n| a    | 1,234 |\n| bc   | 5.000 |\n"
    )
