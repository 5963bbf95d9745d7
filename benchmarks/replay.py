"""How fast steps are computed again, what a crash costs, and what it costs to be able to.

Records three runs with `headrace demo` as it is shipped (a long one of small steps, and short ones of default
steps on the embedded log and on Kafka where there is one), or takes those of `--runs` from an earlier call;
then replays them with `headrace replay`. Ratios are of one machine in one call.
"""

import argparse
import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import msgspec

from benchmarks import gradient_sums
from benchmarks.page import header, table
from headrace.bus import open_bus
from headrace.bus.protocol import TopicPartition
from headrace.cli import settings as tree
from headrace.cli.options import Place, opened
from headrace.cli.process import living
from headrace.consumers.batches import entries_of
from headrace.consumers.ledger import read_ledger
from headrace.policy.checkpoint import load_seed
from headrace.store.blobs import Blobs
from headrace.trainer.admission import Unit, admit
from headrace.trainer.config import StepSettings
from headrace.wire.codec import decode
from headrace.wire.records import TrainStep
from headrace.wire.topics import TRAIN_STEPS

SMALL = {
    "run.groups_per_step": "4",
    "run.group_size": "4",
    "trainer.checkpoint_every": "50",
    "evaluation.tasks": "0",
    "evaluation.watch_versions": "1000000",
}
DEFAULT = {"evaluation.tasks": "0"}
DEFAULT_STEPS = 20
BARS = {"replay": 1.0, "ledger": 0.03, "sums": 1.15, "pause": 0.05}
WORK = ("learn", "store", "checkpoint", "commit")
RECORD_S = 3600.0
COMMAND_S = 1200.0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=1000, help="of the long run")
    parser.add_argument("--runs", type=Path, help="keep the recorded runs here, and use those that are there")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        home = args.runs or Path(scratch)
        home.mkdir(parents=True, exist_ok=True)
        long = _recorded(home / "long", args.steps, SMALL)
        default = _recorded(home / "default", DEFAULT_STEPS, DEFAULT)
        print(header("Replay: speed, recovery, overhead", "torch"))
        print(asyncio.run(_replays(long, Path(scratch))))
        print(_recovery(long))
        print(asyncio.run(_overhead(long, default)))
        print(asyncio.run(_sums(default)))
        print(asyncio.run(_sizes(long, default, Path(scratch))))


def _headrace(*words: str, ok: Sequence[int] = (0,)) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "headrace", *words],
        capture_output=True,
        text=True,
        timeout=COMMAND_S,
        check=False,
    )
    if done.returncode not in ok:
        raise SystemExit(f"headrace {' '.join(words)}: exit code {done.returncode}\n{done.stderr}")
    return done.stdout


def _recorded(run_dir: Path, steps: int, flags: dict[str, str], *more: str) -> Path:
    """A run of so many steps, made now unless it is there."""
    if not (run_dir / "report").exists():
        words = [word for name, value in flags.items() for word in (f"--{name}", value)]
        subprocess.run(
            [
                *(sys.executable, "-m", "headrace", "demo", "--steps", str(steps), "--plain"),
                *("--run-dir", str(run_dir), *words, *more),
            ],
            stdout=sys.stderr,
            timeout=RECORD_S,
            check=True,
        )
    return run_dir


async def _ledger(run_dir: Path) -> list[TrainStep]:
    settings = tree.load(run_dir)
    async with opened(Place(settings, run_dir)) as bus:
        return (await read_ledger(bus, settings.run.name)).steps


async def _replays(run_dir: Path, scratch: Path) -> str:
    """From the seed: all steps, plain and under other conditions that must not matter."""
    recorded = await _ledger(run_dir)
    moved = scratch / "elsewhere" / run_dir.name
    shutil.copytree(run_dir, moved)
    original_s = sum(step.metrics["seconds.learn"] for step in recorded)
    rows = []
    for what, where, words in (
        ("as recorded", run_dir, []),
        ("2 threads", run_dir, ["--threads", "2"]),
        ("microbatches of 1", run_dir, ["--microbatch", "1"]),
        ("in another directory", moved, ["--microbatch", "3", "--threads", "2"]),
    ):
        started_s = time.perf_counter()
        found = json.loads(
            _headrace("replay", f"1..{len(recorded)}", "--json", "--run-dir", str(where), *words, ok=(0, 1))
        )
        wall_s = time.perf_counter() - started_s
        equal = sum(step["equal"] for step in found["steps"])
        computed_s = sum(step["seconds"] for step in found["steps"])
        rows.append([what, f"{equal:,} of {len(recorded):,}", computed_s, original_s / computed_s, wall_s])
    columns = ["replay", "equal", "compute s", "original / replay", "wall s"]
    return (
        f"## Speed\n\nThe original steps took {original_s:.1f} s of computing beside the rest of the loop,"
        f" {(recorded[-1].ended_ms - recorded[0].started_ms) / 1000:.0f} s by the clock."
        f" Bar: at least {BARS['replay']:.1f}x.\n\n{table(columns, rows)}"
    )


def _recovery(run_dir: Path) -> str:
    """A trainer killed in the middle of a step, 49 steps after its checkpoint, and the one that follows
    it."""
    rows = []
    for steps in (1, 25, 49):
        rows.append([steps, *_killed(run_dir, steps)])
    columns = ["steps since the checkpoint", "replayed", "process start s", "ledger and replay s", "in all s"]
    return (
        "## Recovery\n\nA `headrace trainer` on the long run, killed with SIGKILL some steps after the newest"
        " checkpoint; from the start of the next process to its first own step. Checkpoints: every 50 steps."
        "\n\n" + table(columns, rows)
    )


def _killed(run_dir: Path, since: int) -> list[object]:
    """Goes on with a copy of the run until it is `since` steps past its newest checkpoint, kills the trainer
    and times the next one."""
    with tempfile.TemporaryDirectory() as scratch:
        home = Path(scratch) / run_dir.name
        shutil.copytree(run_dir, home)
        before = len(asyncio.run(_ledger(home)))
        words = [
            sys.executable,
            "-m",
            "headrace",
            "demo",
            "--minutes",
            "30",
            "--plain",
            "--run-dir",
            str(home),
        ]
        demo = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            end_s = time.monotonic() + COMMAND_S
            while len(asyncio.run(_ledger(home))) < before + since:
                if demo.poll() is not None or time.monotonic() > end_s:
                    raise SystemExit(f"{home}: expected {since} more steps; the demo ended or hung")
                time.sleep(0.05)
            os.kill(living(home)["trainer"], signal.SIGKILL)
            demo.wait(60)
        finally:
            if demo.poll() is None:
                demo.terminate()
                demo.wait(60)
        return _restarted(home)


def _restarted(home: Path) -> list[object]:
    """Steps replayed; seconds until the process reads its ledger, from there to its first own step,
    together."""
    words = [sys.executable, "-m", "headrace", "trainer", "--run-dir", str(home)]
    started_s = time.perf_counter()
    trainer = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert trainer.stdout is not None
    replayed, begun_s = 0, 0.0
    try:
        for line in trainer.stdout:
            if " checkpoint_read " in line:
                begun_s = time.perf_counter()
            replayed += " replayed " in line
            if " trainer_start " in line:
                ready_s = time.perf_counter()
                return [replayed, begun_s - started_s, ready_s - begun_s, ready_s - started_s]
    finally:
        trainer.terminate()
        trainer.wait(60)
    raise SystemExit(f"{home}: the trainer ended before its first step")


async def _overhead(long: Path, default: Path) -> str:
    """From the ledgers' own times: a commit's are in the record after it."""
    rows = [_costs("small steps", await _ledger(long)), _costs("default steps", await _ledger(default))]
    if shutil.which("mvn") is not None:
        os.environ["HEADRACE_KAFKA_DIR"] = str(default.with_name("broker"))
        _headrace("kafka", "up")
        try:
            run_dir = _recorded(default.with_name("kafka"), DEFAULT_STEPS, DEFAULT, "--bus", "kafka")
            rows.append(_costs("default, Kafka", await _ledger(run_dir)))
        finally:
            _headrace("kafka", "down")
    columns = [
        "run",
        "steps",
        "work ms / step",
        "commit ms p50",
        "commit",
        "checkpoint pause",
        "slower beside one",
    ]
    return (
        "## Ledger, transaction, checkpoints\n\nWork: learning, storing the weights, committing; not waiting."
        f" Bars: commit at most {BARS['ledger']:.0%}, pause at most {BARS['pause']:.0%} of a step.\n\n"
        + table(columns, rows)
    )


def _beside(steps: Sequence[TrainStep]) -> float:
    """How much longer a token takes in steps beside which a checkpoint was being written."""

    def pace(chosen: Sequence[TrainStep]) -> float:
        tokens = sum(step.metrics.get("tokens.forward", 0.0) for step in chosen)
        return sum(step.metrics["seconds.learn"] for step in chosen) / tokens if tokens else float("nan")

    beside = [step for step in steps if step.metrics.get("checkpoint.beside_s", 0.0) > 0]
    return pace(beside) / pace([step for step in steps if step not in beside]) - 1


def _costs(name: str, recorded: Sequence[TrainStep]) -> list[object]:
    steps = recorded[2:]
    working_s = sum(sum(step.metrics.get(f"seconds.{phase}", 0.0) for phase in WORK) for step in steps)
    commit_s = sum(step.metrics["seconds.commit"] for step in steps)
    pause_s = sum(step.metrics.get("seconds.checkpoint", 0.0) for step in steps[:-1])
    return [
        name,
        len(steps),
        1000 * working_s / len(steps),
        1000 * median(step.metrics["seconds.commit"] for step in steps),
        f"{commit_s / working_s:.1%}",
        f"{pause_s / working_s:.2%}",
        f"{_beside(steps):.1%}",
    ]


async def _sums(run_dir: Path) -> str:
    """On the units of the default run, at the seed's weights."""
    model, weights, _ = load_seed()
    settings = tree.load(run_dir)
    batches: list[list[Unit]] = []
    async with open_bus(settings.bus.address) as bus:
        for step in (await read_ledger(bus, settings.run.name)).steps[-6:]:
            own = msgspec.json.decode(step.config, type=StepSettings)
            answer = admit(
                await entries_of(bus, Blobs.open(settings.store.uri), step),
                version=step.version_from,
                seen={},
                model=model,
                lag_versions_max=own.run.lag_versions_max,
                sequence_tokens_max=own.trainer.sequence_tokens_max,
                scale_std=False,
            )
            batches.append(answer.units)
    costs = gradient_sums.measure(weights, model, batches, times=5)
    rows = [[c.microbatch, c.plain_s, c.exact_s, c.exact_s / c.plain_s] for c in costs]
    columns = ["groups in a microbatch", "plain CPU s", "exact CPU s", "exact / plain"]
    return (
        f"## Gradient sums\n\n{len(batches)} default steps, {sum(map(len, batches))} groups: forward, loss,"
        f" backward. Bar: at most {BARS['sums']:.2f}x.\n\n{table(columns, rows)}"
    )


async def _sizes(long: Path, default: Path, scratch: Path) -> str:
    rows: list[list[object]] = []
    for name, run_dir in (("small steps", long), ("default steps", default)):
        settings = tree.load(run_dir)
        sizes, packed = [], []
        async with open_bus(settings.bus.address) as bus:
            tp = TopicPartition(TRAIN_STEPS.name, 0)
            async for delivery in bus.read_range(tp, 0, (await bus.ends([tp.topic]))[tp]):
                value = delivery.value or b""
                sizes.append(len(value) + sum(len(key) + len(text) for key, text in delivery.headers))
                packed.append(decode(tp.topic, value, delivery.headers))
        pack = scratch / f"{run_dir.name}.hrpack"
        _headrace("replay", "export", str(len(packed) // 2), "-o", str(pack), "--run-dir", str(run_dir))
        rows.append([name, int(median(sizes)), max(sizes), pack.stat().st_size])
    columns = ["run", "ledger record bytes p50", "most", "pack of one step bytes"]
    return f"## Sizes\n\n{table(columns, rows)}"


if __name__ == "__main__":
    main()
