"""`headrace demo`: the whole loop on one machine, as independent processes around one log.

    topics -> trainer, inference, relay, join, workers -> held-out round "before" -> prompt feed, training
           -> stop -> held-out round "after" -> report

The same run directory goes on where it was. Ctrl-C and SIGTERM stop everything; a process that dies ends the
demo with its name and the end of its log. Not here: how processes are kept (`supervisor`), what is drawn
(`screen`), what the report says (`report`).
"""

import argparse
import asyncio
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from headrace.cli import options, planting, report
from headrace.cli import settings as tree
from headrace.cli.options import Place
from headrace.errors import ConfigError

DETAIL = """The run's directory holds its log, weights, process logs and report; give it again to go on.
Exit code 0 when the report is written; 130 or 143 when interrupted; 10 when a process died."""


ONLINE_FILE = Path(__file__).resolve().parents[3] / "configs" / "online.toml"


def arguments(parser: argparse.ArgumentParser) -> None:
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--steps", type=options.positive, help="training steps, instead of a time")
    length.add_argument("--minutes", type=float, help="training time of this demo (default: 3)")
    parser.add_argument("--workers", type=options.positive, help="rollout workers (default: 2)")
    parser.add_argument("--plain", action="store_true", help="lines instead of the live screen")
    parser.add_argument(
        "--restart", type=int, default=0, metavar="N", help="start a process that died again, up to N times"
    )
    parser.add_argument(
        "--online", action="store_true", help="simulated editors too: both kinds of experience, one trainer"
    )
    parser.add_argument(
        "--plant",
        choices=planting.KINDS,
        help="with --online: publish such weights in mid-run, for the canary to take back",
    )
    options.run_arguments(parser)


def run(args: argparse.Namespace) -> int:
    from headrace.cli.supervisor import only_supervisor

    if args.plant and not args.online:
        raise ConfigError("--plant: expected --online, which has users whom bad weights could reach")
    if args.minutes is not None and not args.minutes > 0:
        raise ConfigError(f"--minutes: expected more than 0, got {args.minutes:g}")
    args.run_dir = Path(args.run_dir or time.strftime("runs/demo-%Y%m%d-%H%M%S")).resolve()
    args.bus = {
        "sqlite": None,
        "kafka": f"{options.LOCAL_KAFKA}{options.local_kafka_dir()}",
    }.get(args.bus, args.bus)
    with only_supervisor(args.run_dir):
        where = _settled(args)
        return asyncio.run(_main(where, args))


def _settled(args: argparse.Namespace) -> Place:
    """The run's place, with a name of its own and what this demo was told."""
    from headrace.cli import online_loop

    named = options.is_named(args)
    if args.online and not (args.run_dir / tree.RUN_FILE).is_file():
        args.config = [ONLINE_FILE, *args.config]
    where = options.place(args, new=True)
    run = where.settings.run if named else tree.named_after(args.run_dir, where.settings.run)
    demo = where.settings.demo
    if args.minutes is not None:
        demo = msgspec.structs.replace(demo, minutes=args.minutes)
    if args.workers is not None:
        demo = msgspec.structs.replace(demo, workers=args.workers)
    settings = msgspec.structs.replace(where.settings, run=run, demo=demo)
    if args.online and demo.silence_share and not settings.trainer.start_from:
        start = str(args.run_dir / online_loop.START_FILE)
        trainer = msgspec.structs.replace(settings.trainer, start_from=start)
        settings = msgspec.structs.replace(settings, trainer=trainer)
    if args.plant:
        release = msgspec.structs.replace(settings.release, mode="gradual")
        settings = msgspec.structs.replace(settings, release=release)
    return Place(settings, where.run_dir)


async def _main(where: Place, args: argparse.Namespace) -> int:
    from headrace.cli.loop import Loop
    from headrace.cli.online_loop import OnlineLoop
    from headrace.cli.screen import screen

    stop = asyncio.Event()
    received: list[int] = []

    def ask(number: int) -> None:
        received.append(number)
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, ask, number)
    async with _local_kafka(where), options.opened(where, new=True) as bus:
        with screen(plain=args.plain or args.json) as shown:
            loop = (OnlineLoop if args.online else Loop)(
                bus,
                where,
                shown,
                stop,
                restarts_max=args.restart,
                steps_max=where.settings.run.steps_max if "run.steps_max" in args.dotted else None,
            )
            if isinstance(loop, OnlineLoop):
                loop.plant = args.plant or ""
            finished = await loop.run(args.steps)
        if not finished:
            print(f"stopped; go on with: headrace demo --run-dir {where.home}", flush=True)
            return 128 + received[0]
        return await report.write(bus, where, as_json=args.json)


@asynccontextmanager
async def _local_kafka(where: Place) -> AsyncIterator[None]:
    """Starts the local broker that the run lies on, if that isn't up, and stops it afterwards."""
    address = where.settings.bus.address
    if not address.startswith(options.LOCAL_KAFKA):
        yield
        return
    from headrace.bus import local_kafka

    home = Path(address.removeprefix(options.LOCAL_KAFKA))
    was_up = local_kafka.status(home).running
    if not was_up:
        print("starting Apache Kafka (the first time, Maven fetches it)", flush=True)
        await asyncio.to_thread(local_kafka.up, home)
    try:
        yield
    finally:
        if not was_up:
            await asyncio.to_thread(local_kafka.down, home)
