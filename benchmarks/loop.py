"""Steps per minute of the asynchronous loop against the strictly synchronous one, on the real processes.

Both modes are `headrace` as it is shipped, on the embedded log, without held-out rounds: they differ by
`configs/synchronous.toml` alone, which lets the feed admit a step's prompts only when the weights before it
are published. The first steps of each run are left out. A third mode gives the trainer twice the work, so
that on a small machine, too, workers have capacity and the trainer's idle share means what its bar says.
"""

import argparse
import asyncio
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from benchmarks import inference
from benchmarks.page import header, table
from headrace.bus import open_bus
from headrace.cli import settings as tree
from headrace.cli.loop import STEPS_NO_LIMIT
from headrace.cli.run_view import LAG, LAG_MAX, TOKENS, Follower, RunView, StepPoint
from headrace.cli.supervisor import Crew
from headrace.wire.topics import TOPICS

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
ASYNCHRONOUS, SYNCHRONOUS, CAPACITY = "asynchronous", "synchronous", "asynchronous, 2 epochs"
MODES: dict[str, tuple[list[Path], dict[str, str]]] = {
    ASYNCHRONOUS: ([], {}),
    SYNCHRONOUS: ([CONFIGS / "synchronous.toml"], {}),
    CAPACITY: ([], {"trainer.epochs": "2"}),
}
"""Settings files and flags over the shipped settings."""
PHASES = ("wait", "learn", "store", "commit")
MISMATCH = "mismatch.lag0.abs_max"
STALE = ("drops.stale", "withheld.stale")
RATIO_BAR, IDLE_BAR, BATCHING_BAR = 1.5, 0.10, 4.0
READY_S, STEP_S = 240.0, 120.0
"""Deadlines: for the processes to be ready, and for a step of a machine that others use as well."""
TICK_S = 1 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Ran:
    """What one run, or several of a mode, did after the warm-up."""

    mode: str
    steps: list[StepPoint]
    seconds: float
    """From the end of the last step left out to the end of the last one."""
    cpu_s: Counter[str]
    """Processor seconds of each process and what it started, in that time."""
    others_s: float
    """Processor seconds that everything else on the machine took meanwhile."""

    @property
    def per_minute(self) -> float:
        return 60 * len(self.steps) / self.seconds

    @property
    def idle_share(self) -> float:
        """Of the trainer's time: waiting for groups, by all its phases."""
        return self.total("seconds.wait") / sum(self.total(f"seconds.{phase}") for phase in PHASES)

    @property
    def busiest(self) -> str:
        return max(self.cpu_s, key=lambda name: self.cpu_s[name])

    def total(self, metric: str) -> float:
        return sum(step.metrics.get(metric, 0.0) for step in self.steps)

    def most(self, metric: str) -> float:
        return max((step.metrics[metric] for step in self.steps if metric in step.metrics), default=0.0)

    def drops(self) -> Counter[str]:
        """Whole groups, and members of trained ones (`withheld`), by reason."""
        found: Counter[str] = Counter()
        for step in self.steps:
            for name, count in step.metrics.items():
                if name.startswith(("drops.", "withheld.")) and not name.endswith(".tokens") and count:
                    found[name.removeprefix("drops.").replace(".", " ")] += int(count)
        return found


def together(runs: Sequence[Ran]) -> Ran:
    """Several runs of a mode as one."""
    return Ran(
        mode=runs[0].mode,
        steps=[step for run in runs for step in run.steps],
        seconds=sum(run.seconds for run in runs),
        cpu_s=sum((run.cpu_s for run in runs), Counter()),
        others_s=sum(run.others_s for run in runs),
    )


async def measure(mode: str, home: Path, steps: int, warm_up: int) -> Ran:
    """Runs `steps` steps of `mode` in the run directory `home`. Raises ProcessDied when a process died or a
    deadline passed."""
    files, flags = MODES[mode]
    settings = tree.load(home, files=files, flags=flags)
    run = msgspec.structs.replace(settings.run, name="loop", steps_max=STEPS_NO_LIMIT)
    settings = msgspec.structs.replace(settings, run=run)
    tree.save(settings, home)
    async with open_bus(settings.bus.address) as bus, Crew(home) as crew:
        await bus.create_topics(list(TOPICS.values()))
        follower = Follower(bus, run.name)
        await _start(crew, follower, settings.demo.workers)
        points = [await _reach(crew, follower, step) for step in (warm_up, steps)]
        (cpu_from, others_from), (cpu_to, others_to) = points
    cpu_s = Counter({name: cpu_to[name] - cpu_from[name] for name in cpu_to})
    measured = follower.view.steps[warm_up:steps]
    return Ran(
        mode=mode,
        steps=measured,
        seconds=(measured[-1].ended_ms - follower.view.steps[warm_up - 1].ended_ms) / 1000,
        cpu_s=cpu_s,
        others_s=max(0.0, others_to - others_from),
    )


async def _start(crew: Crew, follower: Follower, workers: int) -> None:
    """As `headrace demo` does; the feed last, when a replica serves."""

    async def until(expected: str, true: Callable[[RunView], bool]) -> None:
        async def there() -> bool:
            return true(await follower.refresh())

        await crew.wait(there, deadline_s=READY_S, expected=expected)

    for name in ("trainer", "inference-0"):
        await crew.start(name, name.partition("-")[0])
    await until("the trainer to announce its weights", lambda view: view.version is not None)
    for name in ("relay", "experience", *(f"rollouts-{number}" for number in range(workers))):
        await crew.start(name, name.partition("-")[0])
    await until("a replica that serves", lambda view: bool(view.replicas))
    await crew.start("prompts", "prompts")


async def _reach(crew: Crew, follower: Follower, step: int) -> tuple[Counter[str], float]:
    """Waits for the end of `step`; processor seconds by then: of each process, of all that is not ours."""

    async def there() -> bool:
        return (await follower.refresh()).step >= step

    missing = step - follower.view.step
    await crew.wait(there, deadline_s=READY_S + STEP_S * missing, expected=f"step {step}")
    pids = {name: child.pid for name, child in crew.children.items()}
    own_s = cpu_seconds({"": os.getpid()})[""]  # the crew and this benchmark
    return cpu_seconds(pids), busy_seconds() - own_s


def cpu_seconds(pids: dict[str, int]) -> Counter[str]:
    """Processor seconds since its start of each named process, with all that it started, dead ones too."""
    own: dict[int, float] = {}
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it ended meanwhile; its parent has its time
        pid = int(path.parent.name)
        children.setdefault(int(fields[1]), []).append(pid)
        own[pid] = sum(map(int, fields[11:15])) * TICK_S  # user, system, and both of children waited for

    def whole(pid: int) -> float:
        return own.get(pid, 0.0) + sum(map(whole, children.get(pid, ())))

    return Counter({name: whole(pid) for name, pid in pids.items()})


def busy_seconds() -> float:
    """Processor seconds that this machine has worked, for whomever, since its start."""
    fields = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    user, nice, system, _, _, interrupts, soft, stolen = fields[:8]
    return (user + nice + system + interrupts + soft + stolen) * TICK_S


def runs_table(runs: Sequence[Ran]) -> str:
    """A row for each run, in the order of the runs."""
    rows = [
        [
            run.mode,
            len(run.steps),
            run.per_minute,
            f"{run.idle_share:.1%}",
            run.total(TOKENS) / run.seconds,
            sum(step.trained for step in run.steps),
            run.total("units.read") - sum(step.trained for step in run.steps),
            run.total(LAG) / len(run.steps),
            int(run.most(LAG_MAX)),
            run.most(MISMATCH),
            run.others_s / run.seconds,
        ]
        for run in runs
    ]
    columns = ["mode", "steps", "steps / min", "trainer idle", "tokens / s", "groups trained", "dropped"]
    return table([*columns, "lag mean", "lag max", "mismatch on policy", "cores of others"], rows)


def phases_table(modes: Sequence[Ran]) -> str:
    """Seconds per step by phase of the trainer; `rest` is what its ledger does not time."""
    rows = []
    for ran in modes:
        phases = [ran.total(f"seconds.{phase}") / len(ran.steps) for phase in PHASES]
        whole = ran.seconds / len(ran.steps)
        rows.append([ran.mode, *phases, whole - sum(phases), whole])
    return table(["mode", *PHASES, "rest", "step"], rows)


def cpu_table(modes: Sequence[Ran]) -> str:
    """Processor seconds per step of each process, and the cores that it kept busy."""
    names = sorted(modes[0].cpu_s, key=lambda name: -modes[0].cpu_s[name])
    rows = [
        [
            name,
            *(
                value
                for ran in modes
                for value in (ran.cpu_s[name] / len(ran.steps), ran.cpu_s[name] / ran.seconds)
            ),
        ]
        for name in names
    ]
    columns = [column for ran in modes for column in (f"{ran.mode}: CPU s / step", "cores")]
    return table(["process", *columns], rows)


def bars_table(modes: dict[str, Ran], batching: float) -> str:
    """Each bar, what was found, whether it holds here."""
    ratio = modes[ASYNCHRONOUS].per_minute / modes[SYNCHRONOUS].per_minute
    idle = {name: modes[name].idle_share for name in (ASYNCHRONOUS, CAPACITY)}
    synchronous = modes[SYNCHRONOUS]
    stale = sum(synchronous.total(name) for name in STALE)
    on_policy = [synchronous.most(LAG_MAX), synchronous.most("mismatch.abs_max"), stale]
    bars = [
        ("steps / min, asynchronous to synchronous", f">= {RATIO_BAR}", f"{ratio:.2f}", ratio >= RATIO_BAR),
        *(
            (f"trainer idle, {name}", f"<= {IDLE_BAR:.0%}", f"{share:.1%}", share <= IDLE_BAR)
            for name, share in idle.items()
        ),
        (
            "tokens / s, batched to one by one",
            f">= {BATCHING_BAR}",
            f"{batching:.1f}",
            batching >= BATCHING_BAR,
        ),
        (
            "lag, mismatch, stale units, synchronous",
            "0, 0, 0",
            ", ".join(f"{found:g}" for found in on_policy),
            not any(on_policy),
        ),
    ]
    return table(
        ["bar", "asked", "found", "holds"], [[*bar, "yes" if holds else "no"] for *bar, holds in bars]
    )


def page(runs: Sequence[Ran], many: inference.Rate, single: inference.Rate) -> str:
    """All tables, and what in them was the bottleneck."""
    modes = {mode: together([run for run in runs if run.mode == mode]) for mode in MODES}
    lines = [runs_table(runs), phases_table([*modes.values()]), cpu_table([*modes.values()])]
    for ran in modes.values():
        drops = ", ".join(f"{count} {name}" for name, count in ran.drops().most_common()) or "none"
        busy_cores = ran.cpu_s[ran.busiest] / ran.seconds
        step_s, cores = sum(ran.cpu_s.values()) / len(ran.steps), len(os.sched_getaffinity(0))
        lines.append(
            f"{ran.mode}: busiest process {ran.busiest}, {busy_cores:.2f} cores; "
            f"all together {step_s:.2f} CPU s a step, "
            f"so at best {60 * cores / step_s:.1f} steps / min on {cores} cores; drops: {drops}.\n"
        )
    batching = min(many.per_s / single.per_s, many.per_cpu_s / single.per_cpu_s)
    lines.append(
        f"Inference, batched and one by one: {many.per_s:,.0f} and {single.per_s:,.0f} tokens / s; "
        f"{many.per_cpu_s:,.0f} and {single.per_cpu_s:,.0f} per processor second. "
        "The bar takes the smaller ratio.\n"
    )
    lines.append(bars_table(modes, batching))
    return "\n".join(lines)


def order(rounds: int) -> list[str]:
    """The modes of all runs: forth and back in turn, so that a machine that drifts favours none."""
    return [mode for number in range(rounds) for mode in list(MODES)[:: -1 if number % 2 else 1]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=16, help="of each run, warm-up included")
    parser.add_argument("--warm-up", type=int, default=3, help="first steps left out")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each mode")
    args = parser.parse_args()
    if not 0 < args.warm_up < args.steps or args.rounds < 1:
        parser.error("expected 0 < --warm-up < --steps and --rounds of 1 or more")
    load, runs = os.getloadavg()[0], []
    many, single = inference.ratio(args.rounds)
    for mode in order(args.rounds):
        with tempfile.TemporaryDirectory(prefix="headrace-loop-") as home:
            runs.append(asyncio.run(measure(mode, Path(home), args.steps, args.warm_up)))
        print(f"{mode}: {runs[-1].per_minute:.2f} steps / min", file=sys.stderr, flush=True)
    print(header("The loop: asynchronous against strictly synchronous", "torch"))
    print(f"{args.warm_up} of {args.steps} steps of each run left out; load when it began: {load:.1f}.\n")
    print(page(runs, many, single), end="")


if __name__ == "__main__":
    main()
