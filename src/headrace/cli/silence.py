"""`headrace silence`: makes the checkpoint that an online run starts from: the seed, able to stay silent.

Mid-training teaches no silence; here the token gets its first form (`policy.silence`), from the prompts of
the editors' training files. When to be silent is not decided here: live feedback trains that.
"""

import argparse
import logging
import random
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from headrace import log
from headrace.cli import options
from headrace.cli.files import write_whole
from headrace.cli.options import Place
from headrace.cli.process import run_process

if TYPE_CHECKING:
    import asyncio

    from headrace.policy.silence import Place as CodePlace
    from headrace.policy.tokenizer import Tokenizer

DETAIL = "Give the file as --trainer.start-from to a new run. `headrace demo --online` does so by itself."
PLACES = 1024
SHARE = 0.08
"""Of first tokens that are silence, before anything is learned: enough to learn from."""

_logger = logging.getLogger(__name__)


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("out", type=Path, metavar="FILE", help="the checkpoint to write")
    parser.add_argument("--share", type=float, default=SHARE, help=f"of silence at first (default: {SHARE})")
    options.process_arguments(parser, "silence")


def run(args: argparse.Namespace) -> int:
    where = options.place(args)

    async def act(stop: "asyncio.Event") -> None:
        _prepare(where, args.out, args.share)

    return run_process(
        args.name, where.run_dir, act, module="headrace.trainer.checkpoint", level=args.log_level
    )


def _prepare(where: Place, out: Path, share: float) -> None:
    from headrace.kernels import invariant
    from headrace.policy import checkpoint, silence
    from headrace.trainer import checkpoint as whole
    from headrace.trainer.state import fresh

    invariant.warm_up()
    model, weights, codec = checkpoint.load_seed()
    fit = silence.prepare(
        weights,
        model,
        codec,
        _places(where, codec),
        share=share,
        temperature=where.settings.editors.temperature,
    )
    write_whole(out, whole.encode(fresh(fit.weights, {}), where.settings.run.name))
    live, tasks = f"{float(fit.share_P.mean()):.3f}", f"{fit.task_share:.4f}"
    log.event(_logger, "silence", file=out, share=live, share_of_tasks=tasks)


def _places(where: Place, codec: "Tokenizer") -> "list[CodePlace]":
    """Where editors ask, in their training files."""
    from headrace.policy import silence
    from headrace.producers import open_files

    config = where.settings.editors
    opened = open_files.functions(
        config.distributions,
        codec,
        tokens_min=config.function_tokens_min,
        tokens_max=config.function_tokens_max,
    )
    places = open_files.cursors(opened, config.kinds, random.Random("silence"))
    return [silence.Place(cursor.prefix, cursor.suffix, cursor.wanted) for cursor in islice(places, PLACES)]
