"""`headrace measure`: what the suggestions of one version are worth to simulated users, on files that nobody
trains on; writes `DIR/measures/<round>.json`.

The same users at the same places with the same seeds, whatever the version: two rounds are compared pair by
pair (`producers.figures`). The engine runs in this process and nothing is published. Not here: the trials
(`producers.measure`).
"""

import argparse
import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from headrace import log
from headrace.cli import options, processes
from headrace.cli.files import write_whole
from headrace.cli.options import Place
from headrace.cli.process import run_process
from headrace.errors import ConfigError

if TYPE_CHECKING:
    from headrace.producers.measure import Answer, Judge, Trial

TRIALS = 2000
SAMPLES = 8
SEED = 7
_logger = logging.getLogger(__name__)


class Try(msgspec.Struct, frozen=True, kw_only=True):
    """One place, one user, one answer."""

    name: str
    kind: str
    shown: bool
    silent: bool
    accepted: float
    reward: float
    text: str | None
    """What would be shown."""


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    round: str
    version: int
    break_even: float
    """Accept probability above which showing pays, by the rewards of the run."""
    tries: list[Try]
    again: list[Try]
    """Some of the same places, `SAMPLES` times each: how often it shows there, how often that is accepted."""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--version", type=int, required=True, help="of the weights")
    parser.add_argument("--round", default="check", help="name of the round (default: check)")
    parser.add_argument(
        "--trials", type=options.positive, default=TRIALS, help=f"suggestions asked for (default: {TRIALS})"
    )
    options.process_arguments(parser, "measure")


def run(args: argparse.Namespace) -> int:
    where = options.place(args)
    return run_process(
        args.name,
        where.run_dir,
        lambda stop: _measure(where, args, stop),
        module="headrace.consumers.evaluation",
        level=args.log_level,
    )


def path_of(home: Path, name: str) -> Path:
    return home / "measures" / f"{name}.json"


def read(home: Path, name: str) -> Measured | None:
    """A round that was measured; None without one. Raises ConfigError for a file that is none."""
    path = path_of(home, name)
    try:
        return msgspec.json.decode(path.read_bytes(), type=Measured)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{path}: expected the tries of a round: {error}") from error


async def _measure(where: Place, args: argparse.Namespace, stop: asyncio.Event) -> None:
    from headrace.consumers import evaluation
    from headrace.policy import checkpoint
    from headrace.producers import measure, open_files

    settings = where.settings
    config = settings.editors
    codec = checkpoint.load_seed()[2]
    opened = open_files.functions(
        config.heldout,
        codec,
        tokens_min=config.function_tokens_min,
        tokens_max=config.function_tokens_max,
    )
    asked = measure.trials(opened, config, count=args.trials, seed=SEED, name="held-out")
    again = _again(asked)
    async with (
        options.opened(where) as bus,
        evaluation.serving(
            bus, settings.run, settings.evaluation, processes.blobs(where), args.version, slots=measure.ASKING
        ) as replica,
    ):
        answers = await measure.ask(replica, [*asked, *again], config, codec, run=settings.run.name)
    judge = judge_of(where)
    told = [_try(answer, judge) for answer in answers]
    tries = told[: len(asked)]
    found = Measured(
        round=args.round,
        version=args.version,
        break_even=settings.feedback_join.join.rewards.break_even,
        tries=tries,
        again=told[len(asked) :],
    )
    write_whole(path_of(where.home, args.round), msgspec.json.encode(found))
    shown = [item for item in tries if item.shown]
    accepted = sum(item.accepted for item in shown) / max(len(shown), 1)
    log.event(
        _logger,
        "measured",
        round=args.round,
        version=args.version,
        tries=len(tries),
        shown=len(shown),
        accepted=f"{accepted:.3f}",
        reward=f"{sum(item.reward for item in tries) / len(tries):.4f}",
    )


def judge_of(where: Place) -> "Judge":
    """The rules of the run's feedback join, with every event in time."""
    from headrace.streams.suggestion import outcome_of

    join = where.settings.feedback_join.join

    def judged(answer: "Answer") -> tuple[float, float | None]:
        if answer.silent:
            return 0.0, join.rewards.silent
        outcome = outcome_of(
            answer.events, answer.text_length, rewards=join.rewards, flicker_ms=join.flicker_ms
        )
        return outcome.share, outcome.reward

    return judged


def _try(answer: "Answer", judge: "Judge") -> Try:
    from headrace.producers import measure

    result = measure.result(answer, judge)
    return Try(
        name=answer.trial.name,
        kind=result.kind,
        shown=result.shown,
        silent=result.silent,
        accepted=result.accepted,
        reward=result.reward,
        text=answer.text,
    )


def _again(asked: "Sequence[Trial]") -> "list[Trial]":
    """Part of the trials, each under several seeds of its own."""
    from dataclasses import replace

    return [
        replace(trial, seed=(trial.seed + 1 + sample) % (1 << 62))
        for trial in asked[: len(asked) // SAMPLES]
        for sample in range(SAMPLES)
    ]
