"""`make chaos`: one chaos run, its table, and exit code 1 if anything is wrong.

    python -m chaos --minutes 2 --seed 7 [--bus kafka] [--kills N] [--append benchmarks/chaos.md]

with `tests` on the path. The run's directory is kept when something is wrong, and when it was given.
"""

import argparse
import asyncio
import logging
import os
import platform
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import headrace
from chaos import table
from chaos.play import ChaosRun, Stuck
from chaos.whole import Outcome, Wanted, run_through
from headrace import log
from headrace.bus import local_kafka

PROGRESS_S = 5.0
SEED_MAX = 1_000_000


def main() -> int:
    args = arguments()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    log.configure("chaos", level="error")
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)
    seed = int.from_bytes(os.urandom(4), "big") % SEED_MAX if args.seed is None else int(args.seed)
    parent = Path(tempfile.mkdtemp(prefix="headrace-chaos-"))
    run_dir = (args.run_dir or parent / "run").resolve()
    wanted = Wanted(run_dir, seed, args.bus == "kafka", args.kills, args.minutes, args.delay)
    length = f"--kills {wanted.kills}" if wanted.kills else f"--minutes {wanted.minutes:g}"
    words = f"{length} --seed {seed} --bus {args.bus} --delay {wanted.delay_s:g}"
    say(f"{words}; headrace of {Path(headrace.__file__).parent}")
    try:
        outcome = asyncio.run(_stoppable(wanted))
    except Stuck as stuck:
        say(f"{stuck}\nkept: {run_dir}")
        return 1
    except asyncio.CancelledError:
        say(f"stopped; kept: {run_dir}")
        return 130
    page = table.rendered(outcome)
    print(f"\n{page}", flush=True)
    if args.append:
        with args.append.open("a") as pages:
            pages.write(f"\n## `{words}`\n\n{machine()}\n\n{page}\n")
    if outcome.wrong:
        say(f"kept: {run_dir}")
    else:
        shutil.rmtree(parent)
    return 1 if outcome.wrong else 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="chaos", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=2.0, help="how long faults go on (default: 2)")
    parser.add_argument("--kills", type=int, default=0, metavar="N", help="until so many SIGKILLs, instead")
    parser.add_argument("--seed", type=int, help="what decides the faults (default: drawn, and printed)")
    parser.add_argument("--delay", type=float, default=3.0, help="mean seconds between faults (default: 3)")
    parser.add_argument("--bus", choices=("sqlite", "kafka"), default="sqlite")
    parser.add_argument("--run-dir", type=Path, help="a new directory for the run (default: temporary)")
    parser.add_argument("--append", type=Path, metavar="PAGE", help="a page to append the table to")
    args = parser.parse_args()
    if args.bus == "kafka" and (lack := local_kafka.missing()):
        parser.error(f"--bus kafka: {lack}")
    return args


async def _stoppable(wanted: Wanted) -> Outcome:
    """Ctrl-C and SIGTERM end it in order, with all that it started."""
    me = asyncio.current_task()
    assert me is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, me.cancel)

    async def progress(run: ChaosRun) -> None:
        while True:
            await asyncio.sleep(PROGRESS_S)
            kills, passed_s = run.story.kills, run.elapsed_s
            say(
                f"{passed_s:.0f} s, {len(run.story.done)} faults, {kills} kills"
                f" ({60 * kills / passed_s:.1f}/min), step {run.watch.step}, {wanted.left_s(run):.0f} s left"
            )

    return await run_through(wanted, say=say, meanwhile=progress)


def say(text: str) -> None:
    print(f"chaos: {text}", flush=True)


def machine() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    cpu = names[0] if names else platform.processor()
    date = time.strftime("%Y-%m-%d")
    return f"{date}, {cpu}, {os.cpu_count()} cores, Python {platform.python_version()}, {sys.platform}."


if __name__ == "__main__":
    sys.exit(main())
