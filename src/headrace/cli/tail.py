"""`headrace tail TOPIC`: a topic's records, decoded, as they lie in the log.

Works on any topic, also one whose records this version does not know: those show as MessagePack without a
schema, or as bytes. Order: by offset within a partition, by log-append time across partitions.
"""

import argparse
import json
import re
import time
from collections.abc import AsyncIterator
from typing import Any

from headrace.bus.protocol import Bus, Delivery, TopicPartition
from headrace.cli import options, shown
from headrace.errors import ConfigError, HeadraceError
from headrace.wire.topics import TOPICS

DETAIL = """--from and --until take `begin`, an offset (`1042`, or `3@1042` for partition 3), an age (`90s`,
`5m`, `2h`, `1d`) or a time (`2026-11-30T12:00`, read as UTC). The default shows the last 10 records;
--follow goes on with new ones."""

SORT_RECORDS_MAX = 50_000
"""Up to this many records are put in the order of their time; more are printed partition by partition."""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("topic", metavar="TOPIC", help=", ".join(TOPICS))
    parser.add_argument("--from", dest="start", metavar="WHERE", help="where to begin")
    parser.add_argument("--until", metavar="WHERE", help="where to end")
    parser.add_argument("--key", help="only records with this key (a prefix ends with *)")
    parser.add_argument("--type", dest="record_type", help="only records of this type, e.g. GroupFailed")
    parser.add_argument("-n", "--count", type=options.positive, help="at most this many records")
    parser.add_argument("-f", "--follow", action="store_true", help="go on with new records until Ctrl-C")
    parser.add_argument("--full", action="store_true", help="show long values whole")
    options.run_arguments(parser)


def run(args: argparse.Namespace) -> int:
    return options.with_bus(lambda bus, _: _tail(bus, args), options.place(args))


async def _tail(bus: Bus, args: argparse.Namespace) -> int:
    known = await bus.topics()
    if args.topic not in known:
        raise ConfigError(shown.unknown("topic", args.topic, known))
    _check_type(args)
    starts, ends = await _bounds(bus, args)
    printer = _Printer(args)
    if args.start is None and args.until is None:
        latest = args.count or 10
        for delivery in (await _last(bus, args, starts, ends, latest))[-latest:]:
            printer.show(delivery)
        printer.left = None if args.follow else 0
    else:
        async for delivery in _range(bus, starts, ends):
            if printer.done:
                return 0
            if _wanted(delivery, args):
                printer.show(delivery)
    if args.follow and not printer.done:
        async with bus.reader(ends) as reader:
            while not printer.done:
                for delivery in await reader.read(wait_ms=1000):
                    if _wanted(delivery, args) and not printer.done:
                        printer.show(delivery)
    return 0


def _check_type(args: argparse.Namespace) -> None:
    """Raises ConfigError for a record type that a topic of ours never carries: nothing would ever match."""
    wanted, topic = args.record_type, TOPICS.get(args.topic)
    if wanted is None or "." in wanted or topic is None or not topic.records:
        return
    names = [*(record.__name__ for record in topic.records), "bytes"]
    if wanted.lower() not in map(str.lower, names):
        raise ConfigError(shown.unknown(f"type on {args.topic}", wanted, names))


async def _bounds(
    bus: Bus, args: argparse.Namespace
) -> tuple[dict[TopicPartition, int], dict[TopicPartition, int]]:
    """First and past-the-last position of each partition to show."""
    begins, ends = await bus.begins([args.topic]), await bus.ends([args.topic])
    starts = begins if args.start is None else await position(bus, args.topic, args.start, begins, ends)
    stops = ends if args.until is None else await position(bus, args.topic, args.until, ends, ends)
    clamped = {tp: min(max(offset, begins[tp]), ends[tp]) for tp, offset in starts.items()}
    return clamped, {tp: max(clamped[tp], min(stops[tp], ends[tp])) for tp in clamped}


async def position(
    bus: Bus,
    topic: str,
    text: str,
    elsewhere: dict[TopicPartition, int],
    ends: dict[TopicPartition, int],
) -> dict[TopicPartition, int]:
    """`begin`, `1042`, `3@1042`, `5m` or `2026-11-30T12:00` as positions of every partition; partitions that
    an offset does not name stay `elsewhere`. Raises ConfigError."""
    if text == "begin":
        return dict(await bus.begins([topic]))
    if text == "end":
        return dict(ends)
    if match := re.fullmatch(r"(?:(\d+)@)?(\d+)", text):
        partition, offset = match[1], int(match[2])
        if partition is not None:
            named = TopicPartition(topic, int(partition))
            if named not in ends:
                raise ConfigError(f"{topic}: expected a partition in 0..{len(ends) - 1}, got {partition}")
            return {**elsewhere, named: offset}
        return dict.fromkeys(ends, offset)
    return dict(await bus.offsets_at(topic, shown.time_ms(text, int(time.time() * 1000))))


async def _range(
    bus: Bus, starts: dict[TopicPartition, int], ends: dict[TopicPartition, int]
) -> AsyncIterator[Delivery]:
    if sum(ends[tp] - starts[tp] for tp in ends) > SORT_RECORDS_MAX:
        for tp in sorted(ends):
            async for delivery in bus.read_range(tp, starts[tp], ends[tp]):
                yield delivery
        return
    gathered: list[Delivery] = []
    for tp in sorted(ends):
        gathered += [delivery async for delivery in bus.read_range(tp, starts[tp], ends[tp])]
    gathered.sort(key=lambda delivery: delivery.timestamp_ms)  # stable: a partition keeps its order
    for delivery in gathered:
        yield delivery


async def _last(
    bus: Bus,
    args: argparse.Namespace,
    starts: dict[TopicPartition, int],
    ends: dict[TopicPartition, int],
    count: int,
) -> list[Delivery]:
    """The last `count` wanted records of all partitions, oldest first; reads backwards in growing strides."""
    found: list[Delivery] = []
    for tp in sorted(ends):
        own: list[Delivery] = []
        upper, stride = ends[tp], max(64, 2 * count)
        while upper > starts[tp] and len(own) < count:
            lower = max(starts[tp], upper - stride)
            part = [d async for d in bus.read_range(tp, lower, upper) if _wanted(d, args)]
            own, upper, stride = part + own, lower, 2 * stride
        found += own[-count:]
    return sorted(found, key=lambda delivery: delivery.timestamp_ms)


def _wanted(delivery: Delivery, args: argparse.Namespace) -> bool:
    if args.key is not None:
        key = (delivery.key or b"").decode(errors="replace")
        if not (key.startswith(args.key[:-1]) if args.key.endswith("*") else key == args.key):
            return False
    return args.record_type is None or shown.record_type(delivery).lower() == args.record_type.lower()


class _Printer:
    """Prints deliveries until `count` of them are out."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.left: int | None = args.count
        self._json: bool = args.json
        self._full: bool = args.full
        self._colour = options.is_terminal()

    @property
    def done(self) -> bool:
        return self.left is not None and self.left <= 0

    def show(self, delivery: Delivery) -> None:
        if self.left is not None:
            self.left -= 1
        if self._json:
            print(json.dumps(self._document(delivery), default=str), flush=True)
        else:
            print(shown.line(delivery, colour=self._colour, full=self._full), flush=True)

    def _document(self, delivery: Delivery) -> dict[str, Any]:
        document: dict[str, Any] = {
            "place": delivery.place,
            "topic": delivery.topic,
            "partition": delivery.partition,
            "offset": delivery.offset,
            "timestamp_ms": delivery.timestamp_ms,
            "key": None if delivery.key is None else delivery.key.decode(errors="replace"),
            "type": shown.record_type(delivery),
            "headers": {name: value.decode(errors="replace") for name, value in delivery.headers},
        }
        try:
            document["value"] = shown.value(delivery, full=True)
        except HeadraceError as error:
            document["error"] = str(error)
        return document
