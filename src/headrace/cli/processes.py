"""Each process of the loop alone: `headrace prompts`, `rollouts`, `inference`, `experience`, `trainer`,
`relay`, `canary`, `watch`.

Here the parts meet their bus, store and settings; what they do is theirs. Start more `rollouts` to scale.
"""

import argparse
import asyncio
import os
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from headrace import log
from headrace.cli import options, planting
from headrace.cli.options import Place
from headrace.cli.process import run_process
from headrace.errors import ConfigError
from headrace.store.blobs import BlobReader, Blobs

if TYPE_CHECKING:
    from headrace.producers.suggestions import SuggestionLog

REPLICA_WAIT_S = 120.0
"""How long a process waits for the address of an inference server to appear in the run directory."""

Body = Callable[[Place, argparse.Namespace, asyncio.Event], Awaitable[object]]


def arguments(parser: argparse.ArgumentParser) -> None:
    command = parser.prog.split()[-1]
    parser.add_argument("--name", help="of this process in logs, pid file and records")
    parser.add_argument("--log-level", choices=log.LEVELS, default="info")
    if command in ("rollouts", "relay"):
        parser.add_argument(
            "--inference",
            metavar="HOST:PORT",
            type=_host_port,
            action="append",
            default=[],
            help="an inference server; repeatable (default: those of the run directory)",
        )
    if command == "trainer":
        parser.add_argument("--plant", choices=planting.KINDS, help=argparse.SUPPRESS)
    options.run_arguments(parser)


def run(args: argparse.Namespace) -> int:
    processes: dict[str, tuple[str, Body]] = {
        "prompts": ("headrace.producers.prompts", _prompts),
        "rollouts": ("headrace.consumers.rollouts", _rollouts),
        "inference": ("headrace.inference.server", _inference),
        "experience": ("headrace.streams.run", _experience),
        "feedback-join": ("headrace.streams.run", _feedback_join),
        "trainer": ("headrace.consumers.training", _trainer),
        "relay": ("headrace.consumers.weights", _relay),
        "canary": ("headrace.streams.canary", _canary),
        "watch": ("headrace.consumers.evaluation", _watch),
    }
    where = options.place(args)
    args.stable = args.name is not None
    args.name = args.name or _free_name(args.command, where.run_dir)
    module, body = processes[args.command]
    return run_process(
        args.name,
        where.run_dir,
        lambda stop: body(where, args, stop),
        module=module,
        level=args.log_level,
    )


def _host_port(text: str) -> str:
    if not re.fullmatch(r".+:\d{1,5}", text):
        raise argparse.ArgumentTypeError(f"expected HOST:PORT, got {text!r}")
    return text


async def _prompts(where: Place, args: argparse.Namespace, stop: asyncio.Event) -> None:
    from headrace.producers import prompts

    async with options.opened(where) as bus:
        await prompts.run(bus, where.settings.run, where.settings.prompts, stop, env=where.settings.env)


async def _rollouts(where: Place, args: argparse.Namespace, stop: asyncio.Event) -> None:
    from headrace.consumers import rollouts

    addresses = await replicas(where, args.inference, stop)
    async with options.opened(where) as bus:
        await rollouts.run(
            bus,
            where.settings.run,
            where.settings.rollouts,
            addresses,
            stop,
            args.name,
            env=where.settings.env,
            stable=args.stable,
        )


async def _inference(where: Place, args: argparse.Namespace, stop: asyncio.Event) -> None:
    import msgspec

    from headrace.inference import server

    own = where.home / f"{args.name}.address"
    config = msgspec.structs.replace(
        where.settings.inference, replica=args.name, address=_earlier(own, where.settings.inference.address)
    )
    suggestions = _suggestions(where, args.name)
    # They are written until the server has stopped: requests in flight still end.
    served = asyncio.Event()
    writing = asyncio.create_task(suggestions.run(lambda: options.opened(where), served))
    writing.add_done_callback(lambda _: stop.set())
    try:
        await server.run(config, stop, lambda address: _write_whole(own, address), record=suggestions.offer)
    finally:
        served.set()
        await writing


def _suggestions(where: Place, worker: str) -> "SuggestionLog":
    from functools import partial

    from headrace.policy import checkpoint
    from headrace.producers.feedback import pseudonyms_of
    from headrace.producers.suggestions import SuggestionLog, step_of

    settings = where.settings
    _, _, codec = checkpoint.load_seed()
    pseudonyms = pseudonyms_of(settings.gateway)
    make = partial(step_of, codec=codec, run=settings.run, worker=worker, pseudonym=pseudonyms.of)
    return SuggestionLog(settings.suggestions, settings.run.name, make)


async def _experience(where: Place, args: argparse.Namespace, stop: asyncio.Event) -> None:
    from headrace.streams import run as host

    async with options.opened(where) as bus:
        await host.run(bus, where.settings.experience, stop, blobs=blobs(where))


async def _feedback_join(where: Place, args: argparse.Namespace, stop: asyncio.Event) -> None:
    from headrace.streams import run as host

    async with options.opened(where) as bus:
        await host.run_feedback(bus, where.settings.feedback_join, stop, blobs=blobs(where))


async def _trainer(where: Place, args: argparse.Namespace, stop: asyncio.Event) -> None:
    from headrace.consumers import training

    async with options.opened(where) as bus:
        settings = where.settings
        await training.run(
            bus,
            settings.run,
            settings.trainer,
            blobs(where),
            stop,
            grace_ms=settings.store.grace_ms,
            announced=planting.planter(args.plant, where.home) if args.plant else None,
        )


async def _relay(where: Place, args: argparse.Namespace, stop: asyncio.Event) -> None:
    from headrace.consumers import weights

    addresses = await replicas(where, args.inference, stop)
    async with options.opened(where) as bus, region_blobs(where) as found:
        settings = where.settings
        await weights.run(bus, settings.run, settings.relay, found, addresses, stop, release=settings.release)


async def _canary(where: Place, args: argparse.Namespace, stop: asyncio.Event) -> None:
    from headrace.streams import canary

    async with options.opened(where) as bus:
        settings = where.settings
        await canary.run(bus, settings.run, settings.release, settings.canary, stop)


async def _watch(where: Place, args: argparse.Namespace, stop: asyncio.Event) -> None:
    from headrace.consumers import evaluation

    async with options.opened(where) as bus:
        await evaluation.run(
            bus,
            where.settings.run,
            where.settings.evaluation,
            blobs(where),
            stop,
            env=where.settings.env,
        )


def blobs(where: Place) -> Blobs:
    """The blob store of the run. Raises ConfigError."""
    if not where.settings.store.uri:
        raise ConfigError("--store.uri or --run-dir: expected one of them, got neither")
    return Blobs.open(where.settings.store.uri)


@asynccontextmanager
async def region_blobs(where: Place) -> AsyncIterator[BlobReader]:
    """The blob store of the run, behind the region's cache if it has one. Raises ConfigError."""
    if not where.settings.relay.cache:
        yield blobs(where)
        return
    from headrace.store.cache import CachedBlobs

    async with CachedBlobs.open(blobs(where), where.settings.relay.cache) as cached:
        yield cached


async def replicas(where: Place, given: list[str], stop: asyncio.Event) -> list[str]:
    """The inference servers to use: the given ones, or those whose addresses stand in the run directory, as
    soon as there is one. Raises ConfigError when none appears."""
    deadline = asyncio.get_running_loop().time() + REPLICA_WAIT_S
    while not given and not stop.is_set():
        given = [path.read_text().strip() for path in sorted(where.home.glob("*.address"))]
        if not given and asyncio.get_running_loop().time() > deadline:
            raise ConfigError(
                f"{where.home}: expected the address of an inference server within {REPLICA_WAIT_S:.0f} s, "
                "found none (start `headrace inference`, or give --inference)"
            )
        if not given:
            await asyncio.sleep(0.1)
    return given


def _earlier(path: Path, configured: str) -> str:
    """The address that this server had before it was restarted, so that its clients find it again; the
    configured one if that fixes a port, or if the earlier port was taken since."""
    host, _, port = configured.rpartition(":")
    if port != "0" or not path.is_file():
        return configured
    earlier = path.read_text().strip()
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, int(earlier.rpartition(":")[2])))
        except (OSError, ValueError):
            return configured
    return earlier


def _write_whole(path: Path, text: str) -> None:
    staged = path.with_name(path.name + ".staged")
    staged.write_text(text + "\n")
    staged.replace(path)


def _free_name(command: str, run_dir: Path | None) -> str:
    """`trainer`; `rollouts-<host>-<pid>` for a command of which several may run."""
    if command == "inference":
        return "inference-0"
    return (
        f"{command}-{socket.gethostname()}-{os.getpid()}"
        if command == "rollouts" or run_dir is None
        else command
    )
