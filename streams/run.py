"""The processes behind `headrace experience` and `headrace feedback-join`: processors on the bus host, one
task for each partition that they own.

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
from headrace.streams.feedback import FeedbackConfig, FeedbackJoin
from headrace.streams.hosts.bus import HostConfig, PartitionHost
from headrace.streams.processor import Processor
from headrace.streams.users import UsersConfig, UsersLimit
from headrace.wire.topics import DEAD_LETTERS

REPORT_S = 10.0

_logger = logging.getLogger(__name__)


class StreamConfig(msgspec.Struct, frozen=True, kw_only=True):
    share: str = "1/1"
    """`i/n`: this process is the i-th of n."""
    join: ExperienceConfig = ExperienceConfig()
    host: HostConfig = HostConfig()


class FeedbackStreamConfig(msgspec.Struct, frozen=True, kw_only=True):
    share: str = "1/1"
    """`i/n`: this process is the i-th of n."""
    join: FeedbackConfig = FeedbackConfig()
    users: UsersConfig = UsersConfig()
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
    """Joins steps and rewards until `stop`, as `run_processors` does."""
    processors: list[Processor] = [ExperienceJoin(config.join)]
    await run_processors(bus, processors, config.share, config.host, stop, blobs, clock, report_s)


async def run_feedback(
    bus: Bus,
    config: FeedbackStreamConfig,
    stop: asyncio.Event,
    *,
    blobs: Blobs,
    clock: Clock | None = None,
    report_s: float = REPORT_S,
) -> None:
    """Judges suggestions, and limits the weight of each user, until `stop`, as `run_processors` does."""
    processors: list[Processor] = [FeedbackJoin(config.join), UsersLimit(config.users)]
    await run_processors(bus, processors, config.share, config.host, stop, blobs, clock, report_s)


async def run_processors(
    bus: Bus,
    processors: Sequence[Processor],
    share: str,
    config: HostConfig,
    stop: asyncio.Event,
    blobs: Blobs,
    clock: Clock | None = None,
    report_s: float = REPORT_S,
) -> None:
    """Runs `processors` until `stop`, with everything read committed. Topics must exist (`headrace topics
    create`).

    Raises ConfigError, TopicMismatch, Fenced (another process owns one of our partitions now), OffsetGone,
    BusUnavailable.
    """
    hosts = [
        PartitionHost(bus, processor, partition, blobs=blobs, clock=clock or SystemClock(), config=config)
        for processor in processors
        for partition in owned(share, await _partitions(bus, processor))
    ]
    report = asyncio.create_task(_report(hosts, report_s))
    try:
        async with asyncio.TaskGroup() as tasks:
            for host in hosts:
                tasks.create_task(host.run(stop))
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None
    finally:
        report.cancel()
        _log(hosts)


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


async def _report(hosts: Sequence[PartitionHost], report_s: float) -> None:
    while True:
        await asyncio.sleep(report_s)
        _log(hosts)


def _log(hosts: Sequence[PartitionHost]) -> None:
    for stream in dict.fromkeys(host.stream for host in hosts):
        same = [host for host in hosts if host.stream == stream]
        counts = sum((host.counts for host in same), Counter())
        log.event(_logger, "counts", stream=stream, open=sum(host.open for host in same), **counts)
