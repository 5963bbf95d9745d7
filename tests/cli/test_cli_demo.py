"""`headrace demo` from end to end, as a newcomer runs it, with small sizes."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from headrace.bus import open_bus
from headrace.cli import main
from headrace.cli.process import living
from headrace.cli.run_view import Follower, RunView

SMALL = (
    *("--evaluation.tasks", "8", "--evaluation.samples", "1", "--evaluation.watch_tasks", "4"),
    *("--run.groups_per_step", "8", "--run.group_size", "4"),
)
DEADLINE_S = 240.0
"""Of each wait: seconds on an idle machine, minutes on a crowded one."""
pytestmark = pytest.mark.timeout(600)


@contextmanager
def demo(run_dir: Path, *words: str) -> Iterator[subprocess.Popen[str]]:
    """A demo as a process; it doesn't outlive the test, and its children don't outlive it."""
    process = subprocess.Popen(
        [sys.executable, "-m", "headrace", "demo", "--run-dir", str(run_dir), *SMALL, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def view(run_dir: Path) -> RunView:
    async def read() -> RunView:
        async with open_bus(f"sqlite:{run_dir / 'bus.sqlite'}") as bus:
            return await Follower(bus, run_dir.name).refresh()

    return asyncio.run(read())


def test_demo_trains_resumes_and_stops(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two steps and a report, then more until SIGTERM: the ledger is contiguous, nothing trained twice,
    no process left."""
    run_dir = tmp_path / "run"
    with demo(run_dir, "--steps", "2") as first:
        told, _ = first.communicate(timeout=DEADLINE_S)
    assert first.returncode == 0, told
    assert "held-out pass rate, weights v0 -> v2" in told
    assert (run_dir / "report/report.html").is_file()
    assert living(run_dir) == {}

    with demo(run_dir, "--minutes", "5") as second:
        end = time.monotonic() + DEADLINE_S
        while view(run_dir).step < 4 and second.poll() is None and time.monotonic() < end:
            time.sleep(0.5)
        second.send_signal(signal.SIGTERM)
        told, _ = second.communicate(timeout=DEADLINE_S)
    assert second.returncode == 128 + signal.SIGTERM, told
    assert f"go on with: headrace demo --run-dir {run_dir}" in told
    assert living(run_dir) == {}

    found = view(run_dir)
    assert [point.step for point in found.steps] == list(range(1, found.step + 1))
    assert found.step >= 4
    assert found.trained + sum(found.drops.values()) == found.consumed <= found.prompts
    place = ["--json", "--run-dir", str(run_dir)]
    assert main(["tail", "train.steps", "--from", "begin", *place]) == 0
    ledger = [json.loads(line)["value"] for line in capsys.readouterr().out.splitlines()]
    step = next(record for record in ledger if record["admitted"])
    assert main(["trajectory", step["admitted"][0], *place]) == 0
    story = json.loads(capsys.readouterr().out)
    assert story["trained_in_step"] == step["step"]
    assert len(story["members"]) == 4 and all(member["steps"] for member in story["members"])
