"""`headrace dead-letters list|show|redrive`: records that a process could not handle, with their bytes.

A letter is named by where its record came from, as in `rollout.steps[3]@1042`. Redriving sends the original
bytes again to their topic; it comes back here if nothing has changed.
"""

import argparse
import sys
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

from headrace.bus.protocol import Bus, TopicPartition
from headrace.cli import options, shown
from headrace.errors import ConfigError
from headrace.wire.codec import at, decode
from headrace.wire.records import DeadLetter
from headrace.wire.topics import DEAD_LETTERS

HEX_BYTES = 256


def arguments(parser: argparse.ArgumentParser) -> None:
    acts = parser.add_subparsers(dest="act", metavar="ACT", required=True)
    listing = acts.add_parser("list", help="one line a letter, and how many there are of each cause")
    showing = acts.add_parser("show", help="letters with their headers and bytes")
    showing.add_argument("letter", nargs="+", metavar="PLACE", help="e.g. 'rollout.steps[3]@1042'")
    redriving = acts.add_parser("redrive", help="send the original records again")
    redriving.add_argument("letter", nargs="*", metavar="PLACE", help="e.g. 'rollout.steps[3]@1042'")
    redriving.add_argument("--all", action="store_true", help="every letter that the filters leave")
    listing.set_defaults(letter=[])
    for act in (listing, showing, redriving):
        act.add_argument("--topic", help="only letters of records of this topic")
        act.add_argument("--error", help="only letters with this type of error, e.g. WireError")
        options.run_arguments(act)


def run(args: argparse.Namespace) -> int:
    where = options.place(args)
    if args.act == "redrive" and not args.letter and not args.all:
        raise ConfigError("redrive: expected the place of a letter or --all, got neither")
    acts = {"list": _list, "show": _show, "redrive": _redrive}
    return options.with_bus(lambda bus, _: acts[args.act](bus, args), where)


async def _list(bus: Bus, args: argparse.Namespace) -> int:
    causes: Counter[str] = Counter()
    async for letter in _letters(bus, args):
        causes[f"{letter.topic}: {letter.error}"] += 1
        if args.json:
            options.print_json(_document(letter, full=False))
        else:
            print(
                f"{_place(letter)}  {shown.clock(letter.at_ms)}  {letter.by}  {letter.error}: "
                f"{shown.shortened(letter.reason, 100)}  ({len(letter.value)} bytes)"
            )
    if not args.json:
        print("\n".join(f"{count} x {cause}" for cause, count in causes.most_common()) or "none")
    return 0


async def _show(bus: Bus, args: argparse.Namespace) -> int:
    async for letter in _letters(bus, args):
        if args.json:
            options.print_json(_document(letter, full=True))
            continue
        print(f"{_place(letter)}  {shown.clock(letter.at_ms)}  by {letter.by}")
        print(f"  {letter.error}: {letter.reason}")
        print(f"  key      {(letter.key or b'-').decode(errors='replace')}")
        for name, value in letter.headers:
            print(f"  header   {name}: {value.decode(errors='replace')}")
        print(f"  value    {len(letter.value)} bytes")
        for start in range(0, min(len(letter.value), HEX_BYTES), 16):
            row = letter.value[start : start + 16]
            text = "".join(chr(b) if 32 <= b < 127 else "." for b in row)
            print(f"    {start:06x}  {row.hex(' '):<47}  {text}")
        if len(letter.value) > HEX_BYTES:
            print(f"    ... {len(letter.value) - HEX_BYTES} more (--json has them all)")
    return 0


async def _redrive(bus: Bus, args: argparse.Namespace) -> int:
    from headrace.bus.dead_letters import redrive

    sent = 0
    async for letter in _letters(bus, args):
        await redrive(bus, letter)
        sent += 1
        if args.json:
            options.print_json({"redriven": _place(letter)})
        else:
            print(f"{_place(letter)} sent again to {letter.topic}")
    if not sent:
        print("nothing to send again", file=sys.stderr)
    return 0


async def _letters(bus: Bus, args: argparse.Namespace) -> AsyncIterator[DeadLetter]:
    """The letters that the arguments name, oldest first, the latest of each place. Raises ConfigError for a
    place that has none."""
    found: dict[str, DeadLetter] = {}
    tp = TopicPartition(DEAD_LETTERS.name, 0)
    begins, ends = await bus.begins([tp.topic]), await bus.ends([tp.topic])
    async for delivery in bus.read_range(tp, begins[tp], ends[tp]):
        letter = decode(tp.topic, delivery.value or b"", delivery.headers)
        assert isinstance(letter, DeadLetter), "only letters travel on this topic"
        if args.topic in (None, letter.topic) and args.error in (None, letter.error):
            found[_place(letter)] = letter
    for place in args.letter:
        if place not in found:
            raise ConfigError(shown.unknown("letter", place, found))
    for place in args.letter or list(found):
        yield found[place]


def _place(letter: DeadLetter) -> str:
    return at(letter.topic, letter.partition, letter.offset)


def _document(letter: DeadLetter, *, full: bool) -> dict[str, Any]:
    document: dict[str, Any] = {
        "place": _place(letter),
        "at_ms": letter.at_ms,
        "by": letter.by,
        "error": letter.error,
        "reason": letter.reason,
        "key": None if letter.key is None else letter.key.decode(errors="replace"),
        "bytes": len(letter.value),
    }
    if full:
        document["headers"] = {name: value.decode(errors="replace") for name, value in letter.headers}
        document["value_hex"] = letter.value.hex()
    return document
