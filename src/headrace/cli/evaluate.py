"""`headrace evaluate`: one held-out round under one version of the weights; writes `evaluations`.

Tasks and seeds depend on `evaluation.seed` alone, so two rounds can be compared try by try.
"""

import argparse
import asyncio

import msgspec

from headrace.cli import options, processes
from headrace.cli.options import Place
from headrace.cli.process import run_process
from headrace.cli.run_view import Follower
from headrace.errors import ConfigError


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--version", type=int, help="of the weights (default: the newest announced)")
    parser.add_argument("--round", default="check", help="name of the round (default: check)")
    parser.add_argument("--tasks", type=options.positive, help="held-out tasks (default: evaluation.tasks)")
    parser.add_argument("--samples", type=int, help="sampled tries a task; one greedy try comes on top")
    options.process_arguments(parser, "evaluate")


def run(args: argparse.Namespace) -> int:
    where = options.place(args)
    return run_process(
        args.name,
        where.run_dir,
        lambda stop: _evaluate(where, args, stop),
        module="headrace.consumers.evaluation",
        level=args.log_level,
    )


async def _evaluate(where: Place, args: argparse.Namespace, stop: asyncio.Event) -> None:
    from headrace.consumers import evaluation

    settings = where.settings
    config = settings.evaluation
    if args.tasks is not None:
        config = msgspec.structs.replace(config, tasks=args.tasks)
    if args.samples is not None:
        config = msgspec.structs.replace(config, samples=args.samples)
    async with options.opened(where) as bus:
        view = await Follower(bus, settings.run.name).refresh()
        version = view.version if args.version is None else args.version
        if version is None:
            raise ConfigError(f"run {settings.run.name}: expected announced weights, found none")
        await evaluation.evaluate(
            bus,
            settings.run,
            config,
            processes.blobs(where),
            version,
            args.round,
            stop,
            env=settings.env,
        )
        view = await Follower(bus, settings.run.name).refresh()
    for (name, mode, at), tally in sorted(view.rounds.items()):
        if (name, at) == (args.round, version):
            document = {
                "round": name,
                "mode": mode,
                "version": at,
                "passed": tally.passed,
                "tried": tally.tried,
            }
            if args.json:
                options.print_json(document)
            else:
                print(f"{name} v{at} {mode}: {tally.passed} of {tally.tried} ({100 * tally.rate:.1f} %)")
