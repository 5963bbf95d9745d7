"""`headrace diff RUN_A RUN_B`: the first step at which two runs part, and why.

Not here: what makes two steps different (`parting`).
"""

import argparse
import textwrap
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.bus.protocol import Bus, TopicPartition
from headrace.cli import options, shown
from headrace.cli import settings as tree
from headrace.cli.options import Place
from headrace.cli.parting import Cause, Parting, content, is_numerics, part
from headrace.cli.reading import at_places, expect_run, ledger
from headrace.errors import ConfigError, StoreError
from headrace.store.blobs import Blobs
from headrace.store.claims import check_out
from headrace.wire.codec import at
from headrace.wire.records import Consumed, Experience, TrainStep

DETAIL = """A run is a run's directory, or the name of a run on the bus that --run-dir or --bus points at.
Compared are the ledgers, step by step over the length that both have: weights before, groups read, answers,
weights after. Where only the weights part, the records of that step are read from both logs: what the groups
held is a difference of records, not of numerics. Groups of runs of other names are the same by their number.

Exit code 0 when equal over the common length, 1 when they part."""

WIDTH = 80
WHY = {
    "hole": "a ledger with a hole",
    "start": "other weights to begin with",
    "records": "other records",
    "configuration": "other settings",
    "seed": "another seed",
    "answers": "other answers to the same records",
    "provenance": "computed by something else",
    "weights": "numerics: the same records, settings and start, other weights",
}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_a", metavar="RUN_A", help="directory of a run, or the name of one on the bus")
    parser.add_argument("run_b", metavar="RUN_B", help="the other")
    options.run_arguments(parser)


def run(args: argparse.Namespace) -> int:
    import asyncio

    return asyncio.run(_diff(args))


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two runs, opened."""

    bus: Bus
    place: Place
    name: str

    async def steps(self) -> AsyncIterator[TrainStep]:
        async for _, step in ledger(self.bus, self.name):
            yield step

    async def record(self, consumed: Consumed) -> Experience | None:
        """The whole record; None where it can't be had any more."""
        tp = TopicPartition(consumed.topic, consumed.partition)
        found = await at_places(self.bus, [(tp, consumed.offset)])
        item = found.get(at(*tp, consumed.offset))
        if item is None or not isinstance(item.record, Experience):
            return None
        if item.record.claim is None:
            return item.record
        uri = self.place.settings.store.uri
        try:
            return await check_out(item.record, Blobs.open(uri)) if uri else None
        except StoreError:
            return None


async def _diff(args: argparse.Namespace) -> int:
    async with AsyncExitStack() as stack:
        a = await _side(stack, args, args.run_a)
        b = await _side(stack, args, args.run_b)
        for side in (a, b):
            await expect_run(side.bus, side.name)
        found = await part(a.steps(), b.steps())
        if is_numerics(found.causes) and found.pair is not None:
            found.causes = await _contents(a, b, found)
    if args.json:
        options.print_json(document(args.run_a, args.run_b, found))
    else:
        for line in lines(args.run_a, args.run_b, found):
            print(shown.printable(line))
    return 0 if found.step is None else 1


async def _side(stack: AsyncExitStack, args: argparse.Namespace, word: str) -> Side:
    """The run that a word means: its directory if there is one, else a run by its name."""
    if (Path(word) / tree.RUN_FILE).is_file():
        given = argparse.Namespace(run_dir=word, bus=None, config=[], dotted={})
        place = options.place(given)
        return Side(await stack.enter_async_context(options.opened(place)), place, place.settings.run.name)
    if "/" in word or not (args.run_dir or args.bus or args.dotted.get("bus.address")):
        raise ConfigError(
            f"{word}: expected a run's directory (with {tree.RUN_FILE}), or the name of a run on the bus that"
            " --run-dir or --bus points at"
        )
    place = options.place(args)
    return Side(await stack.enter_async_context(options.opened(place)), place, word)


async def _contents(a: Side, b: Side, found: Parting) -> list[Cause]:
    """The causes of a step whose weights alone differ, once its records were compared."""
    assert found.pair is not None
    unread = 0
    for mine, yours in zip(found.pair[0].consumed, found.pair[1].consumed, strict=True):
        one, other = await a.record(mine), await b.record(yours)
        if one is None or other is None:
            unread += 1
            continue
        if text := content(one, other):
            place = at(mine.topic, mine.partition, mine.offset)
            return [Cause("records", f"{mine.group_id} ({place}): {text}"), *found.causes]
    weights = [cause for cause in found.causes if cause.kind == "weights"]
    others = [cause for cause in found.causes if cause.kind != "weights"]
    if unread:
        others.append(Cause("records", f"{unread} of them can't be read any more: they may differ"))
    elif not others:
        others.append(Cause("provenance", "nothing recorded of code, libraries and kernels differs"))
    return weights + others


def lines(run_a: str, run_b: str, found: Parting) -> list[str]:
    """The answer as a person reads it; what is of A stands before the slash."""
    drawn = [f"A  {run_a}: {found.length_a} steps", f"B  {run_b}: {found.length_b} steps", ""]
    if found.step is None:
        drawn.append(f"equal over {found.common} steps")
        longer = abs(found.length_a - found.length_b)
        if longer:
            drawn.append(f"{'A' if found.length_a > found.length_b else 'B'} has {longer} more")
    else:
        drawn.append(f"equal up to step {found.common}" if found.common else "different from the beginning")
        drawn.append(f"they part at step {found.step}: {WHY[found.causes[0].kind]}")
        for cause in found.causes:
            drawn += _wrapped(f"{cause.kind:<15}{cause.text}")
    if found.notes:
        drawn += ["", "different before that, and without a trace in the weights:"]
        for note in found.notes:
            drawn += _wrapped(note)
    return drawn


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH - 1, initial_indent="  ", subsequent_indent=" " * 17)


def document(run_a: str, run_b: str, found: Parting) -> dict[str, Any]:
    """The same for `--json`."""
    return {
        "a": {"run": run_a, "steps": found.length_a},
        "b": {"run": run_b, "steps": found.length_b},
        "equal": found.step is None,
        "common": found.common,
        "step": found.step,
        "why": found.causes[0].kind if found.causes else None,
        "causes": [{"kind": cause.kind, "text": cause.text} for cause in found.causes],
        "notes": found.notes,
    }
