"""The arguments that many commands share, and the run that they point at.

Not here: what a setting means (`settings`), how a bus works (`headrace.bus`).
"""

import argparse
import json
import math
import os
import re
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace import log
from headrace.bus.protocol import Bus
from headrace.cli import settings as tree
from headrace.errors import BusUnavailable, ConfigError

RUN_DIR_VARIABLE = "HEADRACE_RUN_DIR"
LOCAL_KAFKA = "local-kafka:"
"""`local-kafka:DIR` is the broker that `headrace kafka up --dir DIR` started: its port may change."""


@dataclass(frozen=True, slots=True)
class Place:
    """A run: its settings, and its directory if it is on this machine."""

    settings: tree.Settings
    run_dir: Path | None

    @property
    def home(self) -> Path:
        """The run directory. Raises ConfigError for a run known by its bus alone."""
        if self.run_dir is None:
            raise ConfigError("--run-dir: expected the directory of the run, got only a bus")
        return self.run_dir


def run_arguments(parser: argparse.ArgumentParser) -> None:
    """`--run-dir`, `--bus`, `--config`, `--json`."""
    group = parser.add_argument_group("the run")
    group.add_argument(
        "--run-dir",
        type=Path,
        metavar="DIR",
        default=os.environ.get(RUN_DIR_VARIABLE),
        help=f"directory of the run (default: ${RUN_DIR_VARIABLE}, or the newest in ./runs)",
    )
    group.add_argument(
        "--bus",
        metavar="ADDRESS",
        help="sqlite:PATH, kafka:host:port or local-kafka:DIR, instead of the run's own",
    )
    group.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        action="append",
        default=[],
        help="TOML file; repeatable, later wins",
    )
    group.add_argument("--json", action="store_true", help="machine-readable output")


def process_arguments(parser: argparse.ArgumentParser, name: str) -> None:
    """`--name` and `--log-level` of a command that runs as a process, and those of its run."""
    parser.add_argument("--name", default=name, help="of this process in logs and pid file")
    parser.add_argument("--log-level", choices=log.LEVELS, default="info")
    run_arguments(parser)


def positive(text: str) -> int:
    """A count on the command line, 1 or more. Raises ArgumentTypeError."""
    if not re.fullmatch("0*[1-9][0-9]*", text):
        raise argparse.ArgumentTypeError(f"expected a whole number from 1, got {text!r}")
    return int(text)


def place(args: argparse.Namespace, *, new: bool = False) -> Place:
    """The run that the arguments point at; a `new` one may not exist yet. Raises ConfigError."""
    run_dir = Path(args.run_dir) if args.run_dir else None
    flags: Mapping[str, str] = args.dotted
    if args.bus:
        flags = {**flags, "bus.address": args.bus}
    by_bus = new or "bus.address" in flags
    if run_dir is None and not by_bus and not args.config:
        run_dir = newest_run()
    if run_dir is not None and not by_bus and not (run_dir / tree.RUN_FILE).is_file():
        raise ConfigError(
            f"{run_dir}: expected a run (a directory with {tree.RUN_FILE}), found none (a new one: "
            f"headrace topics create --run-dir {run_dir})"
        )
    settings = tree.load(run_dir, files=args.config, flags=flags)
    if not settings.bus.address and not new:
        raise ConfigError("--run-dir or --bus: expected one of them, got neither")
    return Place(settings, run_dir)


def is_named(args: argparse.Namespace) -> bool:
    """Whether the run at `args.run_dir`, or the arguments, may have given it a name."""
    known = (Path(args.run_dir) / tree.RUN_FILE).is_file()
    return known or "run.name" in args.dotted or bool(args.config)


def newest_run(parent: Path = Path("runs")) -> Path:
    """The run directory in `parent` that was started last. Raises ConfigError when there is none."""
    found = sorted(parent.glob(f"*/{tree.RUN_FILE}"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise ConfigError(
            f"--run-dir: expected a run's directory, got none and ./{parent} holds no run (a new one: "
            f"headrace topics create --run-dir {parent}/NAME)"
        )
    return found[-1].parent


@asynccontextmanager
async def opened(where: Place, *, new: bool = False) -> AsyncIterator[Bus]:
    """The run's bus; a `new` embedded log may not exist yet. Raises BusUnavailable that names the address."""
    from headrace.bus import open_bus

    config = where.settings.bus
    address = config.address
    if address.startswith(LOCAL_KAFKA):
        address = f"kafka:{running_kafka(Path(address.removeprefix(LOCAL_KAFKA)))}"
    elif not new:
        _expect_file(address)
    async with open_bus(address, security=config.security) as bus:
        yield bus


def local_kafka_dir() -> Path:
    """Where `headrace kafka` keeps its broker unless told otherwise."""
    return Path(os.environ.get("HEADRACE_KAFKA_DIR", ".kafka")).resolve()


def running_kafka(home: Path) -> str:
    """Address of the local broker in `home`, whatever port it has now. Raises BusUnavailable when it isn't
    up."""
    from headrace.bus import local_kafka

    now = local_kafka.status(home)
    if not now.running:
        raise BusUnavailable(
            f"{LOCAL_KAFKA}{home}: expected a running broker, found none (start it: "
            f"headrace kafka up --dir {home})"
        )
    return now.address


def _expect_file(address: str) -> None:
    """A command that looks must not create the log that it looks for."""
    path = address.removeprefix("sqlite:")
    if path not in (address, ":memory:") and not Path(path).is_file():
        raise ConfigError(
            f"{path}: expected the log of a run, found no file (a new one: "
            f"headrace topics create --bus {address})"
        )


def with_bus(act: Callable[[Bus, Place], Coroutine[Any, Any, int]], where: Place) -> int:
    """Runs `act` on the run's opened bus; its exit code."""
    import asyncio

    async def main() -> int:
        async with opened(where) as bus:
            return await act(bus, where)

    return asyncio.run(main())


def print_json(value: Any) -> None:
    """One JSON document on one line of standard output; null for a number that is not finite, which JSON does
    not have."""
    print(json.dumps(_finite(value), default=str, allow_nan=False), flush=True)


def _finite(value: Any) -> Any:
    match value:
        case float():
            return value if math.isfinite(value) else None
        case dict():
            return {key: _finite(part) for key, part in value.items()}
        case list() | tuple():
            return [_finite(part) for part in value]
    return value


def is_terminal() -> bool:
    return sys.stdout.isatty() and os.environ.get("TERM") != "dumb" and not os.environ.get("NO_COLOR")
