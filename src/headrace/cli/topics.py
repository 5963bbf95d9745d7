"""`headrace topics`: what lies on the bus; `headrace topics create`: the topics as they are defined.

Lag of a consumer group: records from its committed position to the end; markers of transactions count, so a
group that has read all may show a few.
"""

import argparse
from dataclasses import dataclass

from headrace.bus.protocol import Bus, Difference, PartitionInfo, TopicPartition
from headrace.cli import options, shown
from headrace.cli.options import Place
from headrace.wire.topics import TOPICS

DETAIL = """With `create`, makes the missing topics with the settings of their definitions, and reports the
settings that differ on topics that exist (exit code 1); those are left alone."""

WIDTH_MAX = 10_000


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("act", nargs="?", choices=["list", "create"], default="list")
    options.run_arguments(parser)


def run(args: argparse.Namespace) -> int:
    where = options.place(args, new=args.act == "create")
    if args.act == "create":
        return _create(where, args.json)
    return options.with_bus(lambda bus, _: _list(bus, args.json), where)


@dataclass(frozen=True, slots=True)
class TopicRow:
    topic: str
    partitions: int
    records: int
    bytes: int | None
    lag: dict[str, int]


def rows(
    topics: dict[str, list[PartitionInfo]], groups: dict[str, dict[TopicPartition, int]]
) -> list[TopicRow]:
    """One row a topic, the defined ones first and in the order of their definition."""
    order = list(TOPICS)
    names = sorted(topics, key=lambda name: (order.index(name) if name in order else len(order), name))
    return [_row(name, topics[name], groups) for name in names]


def _row(
    name: str, partitions: list[PartitionInfo], groups: dict[str, dict[TopicPartition, int]]
) -> TopicRow:
    lag: dict[str, int] = {}
    for group, positions in sorted(groups.items()):
        own = {tp.partition: offset for tp, offset in positions.items() if tp.topic == name}
        if own:
            lag[group] = sum(
                max(0, info.end - own.get(number, info.begin)) for number, info in enumerate(partitions)
            )
    sizes = [info.bytes for info in partitions]
    known = [size for size in sizes if size is not None]
    return TopicRow(
        topic=name,
        partitions=len(partitions),
        records=sum(info.records for info in partitions),
        bytes=sum(known) if len(known) == len(sizes) else None,
        lag=lag,
    )


async def _list(bus: Bus, as_json: bool) -> int:
    table = rows(await bus.topics(), await bus.groups())
    if as_json:
        for row in table:
            options.print_json({name: getattr(row, name) for name in TopicRow.__slots__})
        return 0
    from rich.console import Console
    from rich.table import Table

    drawn = Table(box=None, pad_edge=False)
    drawn.add_column("topic", no_wrap=True)
    for column in ("partitions", "records", "bytes"):
        drawn.add_column(column, justify="right", no_wrap=True)
    drawn.add_column("lag by consumer group", no_wrap=True)
    for row in table:
        lag = ", ".join(f"{group} {count:,}" for group, count in row.lag.items())
        drawn.add_row(row.topic, str(row.partitions), f"{row.records:,}", shown.size(row.bytes), lag or "-")
    # As wide as it is: a row stays one line for `grep`, and numbers stay whole on a narrow terminal.
    console = Console()
    wanted = console.measure(drawn, options=console.options.update(width=WIDTH_MAX)).maximum
    console = Console(width=max(console.width, wanted))
    with console.capture() as captured:
        console.print(drawn)
    print("\n".join(line.rstrip() for line in captured.get().splitlines()))
    return 0


def _create(where: Place, as_json: bool) -> int:
    import asyncio

    async def act() -> list[Difference]:
        async with options.opened(where, new=True) as bus:
            return await bus.create_topics(list(TOPICS.values()))

    differences = asyncio.run(act())
    for found in differences:
        if as_json:
            options.print_json({name: getattr(found, name) for name in found.__slots__})
        else:
            print(f"{found.topic}: {found.setting}: expected {found.expected}, found {found.found}")
    if not as_json and not differences:
        print(f"{len(TOPICS)} topics as defined on {where.settings.bus.address}")
    return 1 if differences else 0
