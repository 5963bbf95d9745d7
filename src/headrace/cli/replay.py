"""`headrace replay STEP`: training steps computed again from the log, and compared with the ledger.

Exit codes beside those of every command: 0 only if every step is equal; 9 a step differs; 5 records of a
step are gone; 11 this machine computes otherwise (its kernel probe is not the ledger's), which says nothing
against the record. Not here: its arguments (`replay_words`), the walk and its verdicts
(`consumers.verification`), their looks (`replay_rows`), `--what-if` (`what_if`), `--without` (`without`),
packs (`pack`).
"""

import argparse
import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.bus.protocol import Bus
from headrace.cli import options, replay_rows
from headrace.cli.ground import Ground, ground
from headrace.cli.options import Place
from headrace.cli.replay_words import DETAIL, EXPORT, SUFFIX, arguments, check_together, steps_asked
from headrace.errors import StoreError, TrainingError

if TYPE_CHECKING:
    from headrace.consumers.replay import Change
    from headrace.consumers.verification import Verdict
    from headrace.trainer.config import StepSettings
    from headrace.trainer.state import State

__all__ = ["DETAIL", "arguments", "run"]

EXIT_DIFFERS = TrainingError.exit_code
EXIT_MISSING = StoreError.exit_code
EXIT_MACHINE = 11


def run(args: argparse.Namespace) -> int:
    export = args.words[:1] == [EXPORT]
    check_together(args, export)
    if args.words and args.words[0].endswith(SUFFIX):
        return asyncio.run(_in_pack(args, Path(args.words[0])))

    async def act(bus: Bus, where: Place) -> int:
        async with ground(bus, where, args.run_name, threads=args.threads) as found:
            return await _asked(args, found, args.words[1:] if export else args.words, export)

    return options.with_bus(act, options.place(args))


async def _in_pack(args: argparse.Namespace, path: Path) -> int:
    from headrace.cli import pack

    async with pack.ground_of(path, threads=args.threads) as found:
        words = args.words[1:]
        if not words and args.last is None:
            words = [f"{found.source.begin}..{found.source.ledger.version}"]
        return await _asked(args, found, words, export=False)


async def _asked(args: argparse.Namespace, found: Ground, words: Sequence[str], export: bool) -> int:
    """What the arguments ask of these steps; the exit code."""
    begin, head = found.source.begin, found.source.ledger.version
    if args.without:
        from headrace.cli import without

        _, last = (
            steps_asked([], 1, head) if args.to is None else steps_asked([f"{args.to}"], None, head, begin)
        )
        return await without.show(
            found, last, args.without, output=args.output, force=args.force, as_json=args.json
        )
    first, last = steps_asked(words, args.last, head, begin)
    if export:
        from headrace.cli import pack

        return await pack.export(found, first, last, args)
    if args.what_if:
        from headrace.cli import what_if

        return await what_if.show(found, first, last, args.what_if, as_json=args.json)
    return await show(found, first, last, microbatch=args.microbatch, as_json=args.json)


async def show(
    found: Ground, first: int, last: int, *, microbatch: int | None = None, as_json: bool = False
) -> int:
    """Computes the steps again, prints what came of it; the exit code."""
    from headrace.consumers.verification import verify

    source = found.source
    start = await found.newest_state(first - 1)
    notices = machine_notices(found, first, last)
    if not as_json:
        _print([*_opening(found, start, first, last), *notices, "", replay_rows.HEAD])
    verdicts: list[Verdict] = []
    lines = replay_rows.Lines()
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
        async with aclosing(walk):
            async for verdict in walk:
                verdicts.append(verdict)
                if not as_json:
                    _print(lines.of(verdict))
                advance("replay")
    code = exit_code(verdicts)
    if as_json:
        options.print_json(_document(found, start, first, last, verdicts, code))
    else:
        _print([*lines.rest(), "", replay_rows.summary(verdicts, first), *_closing(code)])
    return code


def _print(lines: Sequence[str]) -> None:
    if lines:
        print("\n".join(lines), flush=True)


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
    others = causes.elsewhere(steps, found.now)
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
    between = f", {way} steps on the way" if way else ""
    return [
        f"run {source.run_name}: {span} of {source.ledger.version}, from {found.origin(start)}{between}",
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
