"""`headrace replay STEP`: training steps computed again from the log, and compared with the ledger.

Exit codes beside those of every command: 0 only if every step is equal; 9 a step differs; 5 records of a
step are gone; 11 this machine computes otherwise (its kernel probe is not the ledger's), which says nothing
against the record. Not here: the walk and its verdicts (`consumers.verification`), their looks
(`replay_rows`), `--what-if` (`what_if`).
"""

import argparse
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from headrace.bus.protocol import Bus
from headrace.cli import options, replay_rows
from headrace.cli.ground import Ground, ground
from headrace.cli.options import Place
from headrace.errors import ConfigError, StoreError, TrainingError

if TYPE_CHECKING:
    from headrace.consumers.causes import Cause
    from headrace.consumers.replay import Change
    from headrace.consumers.verification import Verdict
    from headrace.trainer.config import StepSettings
    from headrace.trainer.state import State

EXIT_DIFFERS = TrainingError.exit_code
EXIT_MISSING = StoreError.exit_code
EXIT_MACHINE = 11
DETAIL = """\
examples:
  headrace replay 12                  step 12: forward, backward and optimizer again, compare the weights
  headrace replay 3..7                a range of steps
  headrace replay --last 20           the newest steps
  headrace replay 12 --what-if trainer.lr=2e-5 --what-if trainer.loss.clip_high=0.3

It starts from the newest checkpoint before the first step and reads the records that the ledger names.
Nothing is written. Exit code: 0 all equal, 9 a step differs, 5 records are gone, 11 this machine computes
otherwise than the one that made the steps."""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("words", nargs="*", metavar="STEP | FROM..TO", help="which steps, from 1")
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
        "--threads", type=options.positive, metavar="N", help="compute with N threads; must leave no trace"
    )
    parser.add_argument(
        "--microbatch",
        type=options.positive,
        metavar="N",
        help="compute N groups at a time; must leave no trace",
    )
    options.run_arguments(parser)


def run(args: argparse.Namespace) -> int:
    where = options.place(args)

    async def act(bus: Bus, where: Place) -> int:
        async with ground(bus, where, args.run_name, threads=args.threads) as found:
            first, last = steps_asked(args.words, args.last, found.source.ledger.version)
            if args.what_if:
                from headrace.cli import what_if

                return await what_if.show(found, first, last, args.what_if, as_json=args.json)
            return await show(found, first, last, microbatch=args.microbatch, as_json=args.json)

    return options.with_bus(act, where)


def steps_asked(words: Sequence[str], last: int | None, head: int) -> tuple[int, int]:
    """First and last step meant by `12`, `3..7` or `--last 20`, in a ledger that ends at `head`. Raises
    ConfigError."""
    place = "headrace replay"
    if len(words) + (last is not None) != 1:
        got = " ".join([*words, *([f"--last {last}"] if last is not None else [])]) or "nothing"
        raise ConfigError(f"{place}: expected one of STEP, FROM..TO and --last N, got {got}")
    if not head:
        raise ConfigError(f"{place}: expected a run with training steps, its ledger is empty")
    if last is not None:
        return max(1, head - last + 1), head
    match = re.fullmatch(r"(\d+)(?:\.\.(\d+))?", words[0])
    if match is None:
        raise ConfigError(f"{place}: expected a step (12) or a range of steps (3..7), got {words[0]!r}")
    first, end = int(match[1]), int(match[2] or match[1])
    if not 1 <= first <= end <= head:
        raise ConfigError(f"{place}: expected steps from 1 to {head}, which the ledger has, got {words[0]}")
    return first, end


async def show(
    found: Ground, first: int, last: int, *, microbatch: int | None = None, as_json: bool = False
) -> int:
    """Computes the steps again, prints what came of it; the exit code."""
    from headrace.consumers.verification import verify

    source = found.source
    start = await found.newest_state(first - 1)
    notices = machine_notices(found, first, last)
    if not as_json:
        print("\n".join([*_opening(found, start, first, last), *notices, "", replay_rows.HEAD]), flush=True)
    verdicts: list[Verdict] = []
    with replay_rows.progress(last - start.step, quiet=as_json) as advance:
        walk = verify(
            source,
            start,
            first,
            last,
            now=found.now,
            change=microbatches(microbatch),
            cancelled=found.cancelled,
            on_way=lambda step: advance(f"to step {first}"),
        )
        async for verdict in walk:
            verdicts.append(verdict)
            if not as_json:
                print(replay_rows.row(verdict), flush=True)
            advance("replay")
    code = exit_code(verdicts)
    if as_json:
        options.print_json(_document(found, start, first, last, verdicts, code))
    else:
        print("\n".join(["", replay_rows.summary(verdicts), *_closing(code)]), flush=True)
    return code


def microbatches(groups: int | None) -> "Change":
    """Settings with so many groups computed at a time; as they are if None."""
    import msgspec

    def change(settings: "StepSettings") -> "StepSettings":
        if groups is None:
            return settings
        trainer = msgspec.structs.replace(settings.trainer, microbatch_groups=groups)
        return msgspec.structs.replace(settings, trainer=trainer)

    return change


def exit_code(verdicts: Sequence["Verdict"]) -> int:
    """The gravest of them: a record that differs, then one that is gone, then another machine."""
    outcomes = {verdict.outcome for verdict in verdicts}
    codes = {"differs": EXIT_DIFFERS, "missing": EXIT_MISSING, "machine": EXIT_MACHINE}
    return next((code for outcome, code in codes.items() if outcome in outcomes), 0)


def machine_notices(found: Ground, first: int, last: int) -> list[str]:
    """What is not here as it was when the steps were computed, said before anything is."""
    from headrace.consumers import causes

    steps = [found.source.recorded(step) for step in range(first, last + 1)]
    others: list[Cause] = causes.elsewhere(steps, found.now)
    if not others:
        return ["code, libraries, threads and kernel probe: as they were then"]
    lines = [f"  {cause.text}" for cause in others]
    if causes.probe_differs(steps, found.now):
        return ["This machine computes otherwise than the one that made these steps:", *lines]
    return ["not as it was when these steps were made:", *lines]


def _opening(found: Ground, start: "State", first: int, last: int) -> list[str]:
    source = found.source
    span = f"step {first}" if first == last else f"steps {first} to {last}"
    way = first - 1 - start.step
    origin = f"the checkpoint of step {start.step}" if start.step else "the seed"
    between = f", {way} steps on the way" if way else ""
    return [
        f"run {source.run_name}: {span} of {source.ledger.version}, from {origin}{between}",
        *found.notes,
    ]


def _closing(code: int) -> list[str]:
    if code == EXIT_MACHINE:
        return [
            "The records are not at fault: this machine computes otherwise, see above. Replay where the",
            "kernel probe is that of the ledger.",
        ]
    return []


def _document(
    found: Ground, start: "State", first: int, last: int, verdicts: Sequence["Verdict"], code: int
) -> dict[str, Any]:
    from headrace.consumers import causes

    steps = [found.source.recorded(step) for step in range(first, last + 1)]
    return {
        "run": found.source.run_name,
        "first": first,
        "last": last,
        "head": found.source.ledger.version,
        "start": start.step,
        "notes": found.notes,
        "machine_differs": causes.probe_differs(steps, found.now),
        "not_as_then": [{"kind": c.kind, "text": c.text} for c in causes.elsewhere(steps, found.now)],
        "steps": [replay_rows.document(verdict) for verdict in verdicts],
        "equal": sum(verdict.outcome == "equal" for verdict in verdicts),
        "exit_code": code,
    }
