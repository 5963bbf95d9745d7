"""The words of `headrace replay`: its arguments, which of them go together, and which steps they mean.

Not here: what is done with them (`replay`).
"""

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

from headrace.cli import options
from headrace.errors import ConfigError

SUFFIX = ".hrpack"
EXPORT = "export"
DETAIL = """\
examples:
  headrace replay 12                  step 12: forward, backward and optimizer again, compare the weights
  headrace replay 3..7                a range of steps
  headrace replay --last 20           the newest steps
  headrace replay 12 --what-if trainer.lr=2e-5 --what-if trainer.loss.clip_high=0.3
  headrace replay --without user:4f2a -o clean.checkpoint
                                      the run as if those records had never been; then, from there:
                                      headrace demo --trainer.start_from clean.checkpoint
  headrace replay export 12 -o step.hrpack
  headrace replay step.hrpack         in any directory, without the log

It starts from the newest checkpoint before the first step and reads the records that the ledger names.
Nothing is written but what -o names. Exit code: 0 all equal, 9 a step differs, 5 records are gone, 11 this
machine computes otherwise than the one that made the steps."""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "words",
        nargs="*",
        metavar="STEP | FROM..TO | export STEPS | FILE.hrpack [STEPS]",
        help="which steps, from 1; of the run, or of a pack (all of its steps if none are named)",
    )
    parser.add_argument("--last", type=options.positive, metavar="N", help="the newest N steps")
    parser.add_argument("--run", metavar="NAME", dest="run_name", help="a run on this log (default: its own)")
    parser.add_argument(
        "--what-if",
        action="append",
        default=[],
        metavar="SETTING=VALUE",
        help="the same records under another setting of a step, side by side; repeatable",
    )
    parser.add_argument(
        "--without",
        action="append",
        default=[],
        metavar="KIND:VALUE",
        help="group:ID, user:ID, source:live or env:NAME: the run as if these had never been; repeatable",
    )
    parser.add_argument(
        "--to", type=options.positive, metavar="N", help="with --without: the last step (default: the newest)"
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="with export: the pack (default: RUN-STEPS.hrpack); with --without: a checkpoint to start from",
    )
    parser.add_argument("--force", action="store_true", help="write the output even if it exists")
    parser.add_argument(
        "--threads", type=options.positive, metavar="N", help="compute with N threads; must leave no trace"
    )
    parser.add_argument(
        "--microbatch",
        type=options.positive,
        metavar="N",
        help="compute N groups at a time; must leave no trace",
    )
    options.run_arguments(parser)


def check_together(args: argparse.Namespace, export: bool) -> None:
    """Raises ConfigError for arguments that would be without effect."""
    packed = bool(args.words) and not export and args.words[0].endswith(SUFFIX)
    asked = {"export": export, "--what-if": bool(args.what_if), "--without": bool(args.without)}
    named = [name for name, there in asked.items() if there]
    wrong = [
        (len(named) > 1, f"expected one of {', '.join(asked)}, got {' and '.join(named)}"),
        (
            args.without and (args.words[1:] if packed else args.words),
            "--without is of the whole run: expected --to N, not steps",
        ),
        (
            args.without and args.last is not None,
            "--without is of the whole run: expected --to N, not --last",
        ),
        (args.to is not None and not args.without, "--to goes with --without"),
        (
            (args.output or args.force) and not (export or args.without),
            "-o and --force go with export and --without",
        ),
        (
            export and args.output is not None and args.output.suffix != SUFFIX,
            f"-o: expected the name of a pack, FILE{SUFFIX}, got {args.output}",
        ),
        (packed and args.run_name is not None, "--run: a pack holds one run"),
        (
            args.microbatch is not None and bool(named),
            f"--microbatch goes with a plain replay, not with {' '.join(named)}",
        ),
    ]
    for there, text in wrong:
        if there:
            raise ConfigError(f"headrace replay: {text}")


def steps_asked(words: Sequence[str], last: int | None, head: int, begin: int = 1) -> tuple[int, int]:
    """First and last step meant by `12`, `3..7` or `--last 20`, of steps `begin` to `head`. Raises
    ConfigError."""
    place = "headrace replay"
    if len(words) + (last is not None) != 1:
        got = " ".join([*words, *([f"--last {last}"] if last is not None else [])]) or "nothing"
        raise ConfigError(f"{place}: expected one of STEP, FROM..TO and --last N, got {got}")
    if not head:
        raise ConfigError(f"{place}: expected a run with training steps, its ledger is empty")
    if last is not None:
        return max(begin, head - last + 1), head
    match = re.fullmatch(r"(\d+)(?:\.\.(\d+))?", words[0])
    if match is None:
        hint = f" (a pack's name ends in {SUFFIX})" if Path(words[0]).is_file() else ""
        raise ConfigError(f"{place}: expected a step (12) or a range of steps (3..7), got {words[0]!r}{hint}")
    first, end = int(match[1]), int(match[2] or match[1])
    if end < first:
        raise ConfigError(f"{place}: expected FROM..TO with FROM before TO, got {words[0]}")
    if not begin <= first <= end <= head:
        raise ConfigError(f"{place}: expected steps from {begin} to {head}, got {words[0]}")
    return first, end
