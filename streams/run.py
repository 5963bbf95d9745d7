"""The process behind `headrace experience`: the experience join on the bus host, one task for each partition
it owns.

Not here: the command line, which opens the bus and the store (`headrace.cli`); Faust (`streams.app`).

Partitions are divided by a fixed share, `2/3` being the second of three processes: each knows its own without
talking to the others. A wrong share is harmless: the process that starts last fences the other
(docs/adr/0006-stream-hosts.md).
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence

import msgspec

from headrace import log
from headrace.bus.protocol import Bus
from headrace.clock import Clock, SystemClock
from headrace.errors import ConfigError, TopicMismatch
from headrace.store.blobs import Blobs
from headrace.streams.experience import ExperienceConfig, ExperienceJoin
from headrace.streams.hosts.bus import HostConfig, PartitionHost
from headrace.streams.processor import Processor
from headrace.wire.topics import DEAD_LETTERS

REPORT_S = 10.0

_logger = logging.getLogger(__name__)


class StreamConfig(msgspec.Struct, frozen=True, kw_only=True):
    share: str = "1/1"
    """`i/n`: this process is the i-th of n."""
    join: ExperienceConfig = ExperienceConfig()
    host: HostConfig = HostConfig()


async def run(
    bus: Bus,
    config: StreamConfig,
    stop: asyncio.Event,
    *,
    blobs: Blobs,
    clock: Clock | None = None,
    report_s: float = REPORT_S,
) -> None:
    """Joins until `stop`, with everything read committed. Topics must exist (`headrace topics create`).

    Raises ConfigError, TopicMismatch, Fenced (another process owns one of our partitions now), OffsetGone,
    BusUnavailable.
    """
    processor = ExperienceJoin(config.join)
    partitions = await _partitions(bus, processor)
    hosts = [
        PartitionHost(
            bus, processor, partition, blobs=blobs, clock=clock or SystemClock(), config=config.host
        )
        for partition in owned(config.share, partitions)
    ]
    report = asyncio.create_task(_report(processor, hosts, report_s))
    try:
        async with asyncio.TaskGroup() as tasks:
            for host in hosts:
                tasks.create_task(host.run(stop))
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None
    finally:
        report.cancel()
        _log(processor, hosts)


def owned(share: str, partitions: int) -> range:
    """The partitions of share `i/n`: i-1, i-1+n, … Raises ConfigError."""
    index, _, of = share.partition("/")
    if not (index.isdecimal() and of.isdecimal() and 1 <= int(index) <= int(of) <= partitions):
        raise ConfigError(f"share: expected i/n with 1 <= i <= n <= {partitions} partitions, got {share!r}")
    return range(int(index) - 1, partitions, int(of))


async def _partitions(bus: Bus, processor: Processor) -> int:
    """How many partitions every input and the state topic have. Raises TopicMismatch."""
    topics = await bus.topics()
    needed = [
        topic.name for topic in (*processor.inputs, *processor.outputs, processor.state_topic, DEAD_LETTERS)
    ]
    missing = [name for name in needed if name not in topics]
    if missing:
        raise TopicMismatch(f"topics: expected {', '.join(missing)}, found none (headrace topics create)")
    counts = {topic.name: len(topics[topic.name]) for topic in (*processor.inputs, processor.state_topic)}
    if len(set(counts.values())) > 1:
        raise TopicMismatch(f"topics: expected the same number of partitions, got {counts}")
    return next(iter(counts.values()))


async def _report(processor: Processor, hosts: Sequence[PartitionHost], report_s: float) -> None:
    while True:
        await asyncio.sleep(report_s)
        _log(processor, hosts)


def _log(processor: Processor, hosts: Sequence[PartitionHost]) -> None:
    counts = sum((host.counts for host in hosts), Counter())
    log.event(_logger, "counts", stream=processor.name, open=sum(host.open for host in hosts), **counts)
