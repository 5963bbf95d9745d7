"""`headrace topics`: what lies on the bus; `headrace topics create`: the topics as they are defined,
and a run directory that has no settings yet gets them.

Lag of a consumer group: records from its committed position to the end; markers of transactions count, so a
group that has read all may show a few.
"""

import argparse
from dataclasses import dataclass

import msgspec

from headrace.bus.protocol import Bus, Difference, PartitionInfo, TopicPartition
from headrace.cli import options, shown
from headrace.cli import settings as tree
from headrace.cli.options import Place
from headrace.errors import ConfigError
from headrace.wire.topics import TOPICS

DETAIL = """With `create`, makes the missing topics with the settings of their definitions, and reports the
settings that differ on topics that exist (exit code 1); those are left alone. `create --run-dir DIR` begins
a run: DIR/run.toml is written if it isn't there, from --config and flags."""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("act", nargs="?", choices=["list", "create"], default="list")
    options.run_arguments(parser)


def run(args: argparse.Namespace) -> int:
    where = options.place(args, new=args.act == "create")
    if args.act == "create":
        return _create(where, args)
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
    from headrace.cli.tables import draw

    drawn = [
        (
            row.topic,
            row.partitions,
            row.records,
            shown.size(row.bytes),
            ", ".join(f"{group} {count:,}" for group, count in row.lag.items()) or None,
        )
        for row in table
    ]
    columns = ("topic", ">partitions", ">records", ">bytes", "lag by consumer group")
    print("\n".join(draw(columns, drawn)))
    return 0


def _create(where: Place, args: argparse.Namespace) -> int:
    """0; 1 when settings of topics differ."""
    import asyncio

    async def act() -> list[Difference]:
        async with options.opened(where, new=True) as bus:
            return await bus.create_topics(list(TOPICS.values()))

    if not where.settings.bus.address:
        raise ConfigError("topics create: expected --run-dir DIR (a new run) or --bus ADDRESS, got neither")
    if where.run_dir is not None and not (where.run_dir / tree.RUN_FILE).is_file():
        run = (
            where.settings.run
            if options.is_named(args)
            else tree.named_after(where.run_dir, where.settings.run)
        )
        tree.save(msgspec.structs.replace(where.settings, run=run), where.run_dir)
    differences = asyncio.run(act())
    for found in differences:
        if args.json:
            options.print_json({name: getattr(found, name) for name in found.__slots__})
        else:
            print(f"{found.topic}: {found.setting}: expected {found.expected}, found {found.found}")
    if not args.json and not differences:
        print(f"{len(TOPICS)} topics as defined on {where.settings.bus.address}")
    return 1 if differences else 0
