"""Questions about a Kafka cluster: topics and their settings, where partitions begin and end, committed
positions.

Not here: reading records (`reading`), sending (`sending`).
"""

import asyncio
from collections.abc import Sequence

from aiokafka import AIOKafkaConsumer
from aiokafka import TopicPartition as KafkaPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.errors import TopicAlreadyExistsError, UnknownTopicOrPartitionError, for_code

from headrace.bus.kafka.connection import Connection
from headrace.bus.kafka.reading import consumer_of, stop
from headrace.bus.protocol import Difference, PartitionInfo, TopicPartition
from headrace.errors import TopicMismatch
from headrace.wire.topics import FOR_EVER, Topic

BATCH_BYTES_MAX = 1_048_588
TOMBSTONE_MS = 86_400_000
SETTLE_S = 3.0  # a commit's markers take a few ms, after a restart of the broker some hundreds
SETTLE_LOOKS = 20  # where the broker itself stood still for SETTLE_S, the markers have yet to come


def settings_of(topic: Topic) -> dict[str, str]:
    """What a topic is created with, by Kafka's names."""
    retention = {
        "cleanup.policy": "compact",
        "delete.retention.ms": str(TOMBSTONE_MS),
    }
    if not topic.compacted:
        retention = {"cleanup.policy": "delete", "retention.ms": str(topic.retention_ms)}
        if topic.retention_ms == FOR_EVER:
            retention["retention.bytes"] = "-1"
    return {
        **retention,
        "message.timestamp.type": "LogAppendTime",
        "max.message.bytes": str(BATCH_BYTES_MAX),
    }


class Admin:
    """Short-lived questions over three long-lived clients."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._client = AIOKafkaAdminClient(**connection.settings)
        self._committed_view = consumer_of(connection)
        self._written_view = consumer_of(connection, isolation_level="read_uncommitted")
        self._counts: dict[str, int] = {}
        self._tracked: set[str] = set()

    async def start(self) -> None:
        await self._connection.opened(self._client, self._client.start)
        for view in (self._committed_view, self._written_view):
            await self._connection.opened(view, view.start)

    async def stop(self) -> None:
        for view in (self._committed_view, self._written_view):
            await stop(view)
        await self._client.close()

    async def partitions(self, topic: str) -> int:
        """Number of partitions, remembered. Raises TopicMismatch."""
        if topic not in self._counts:
            self._counts = await self._connection.call("topics", self._describe)
        if topic not in self._counts:
            raise TopicMismatch(
                f"{topic}: expected a topic of kafka:{self._connection.address}, there is none"
                " (headrace topics create)"
            )
        return self._counts[topic]

    async def create(self, topics: Sequence[Topic]) -> list[Difference]:
        found = await self._connection.call("topics", self._describe)
        missing = [topic for topic in topics if topic.name not in found]
        if missing:
            await self._connection.call("create topics", lambda: self._create(missing))
        differences = await self._connection.call("settings of topics", lambda: self._compare(topics))
        return [
            difference for topic in topics for difference in differences if difference.topic == topic.name
        ]

    async def topics(self) -> dict[str, list[PartitionInfo]]:
        self._counts = await self._connection.call("topics", self._describe)
        names = sorted(self._counts)
        begins, ends = await self.begins(names), await self.ends(names)
        infos: dict[str, list[PartitionInfo]] = {name: [] for name in names}
        for tp in sorted(begins):
            infos[tp.topic].append(PartitionInfo(begins[tp], ends[tp], ends[tp] - begins[tp], None))
        return infos

    async def begins(self, topics: Sequence[str]) -> dict[TopicPartition, int]:
        partitions = await self._all(topics)
        return await self._connection.call(
            "begins", lambda: _offsets(self._committed_view.beginning_offsets, partitions)
        )

    async def ends(self, topics: Sequence[str]) -> dict[TopicPartition, int]:
        """Ends of the committed log, after transactions that are just being committed have settled.

        A commit is acknowledged before its markers are in the partitions: a reader would see it a moment
        later. So this waits until the committed end reaches what was written when the question came. A
        transaction left open by a dead process is not committed: after SETTLE_S, and SETTLE_LOOKS, the end
        before it is the answer.
        """
        partitions = await self._all(topics)
        written = await self._connection.call(
            "ends", lambda: _offsets(self._written_view.end_offsets, partitions)
        )
        loop = asyncio.get_running_loop()
        deadline_s, looks = None, 0
        while True:
            ends = await self._connection.call(
                "ends", lambda: _offsets(self._committed_view.end_offsets, partitions)
            )
            deadline_s = deadline_s or loop.time() + SETTLE_S
            looks += 1
            late = looks > SETTLE_LOOKS and loop.time() > deadline_s
            if late or all(ends[tp] >= written[tp] for tp in written):
                return ends
            await asyncio.sleep(0.005)

    async def offsets_at(self, topic: str, timestamp_ms: int) -> dict[TopicPartition, int]:
        partitions = await self._all([topic])
        ends = await self.ends([topic])
        found = await self._connection.call(
            "offsets by time",
            lambda: self._committed_view.offsets_for_times(dict.fromkeys(partitions, timestamp_ms)),
        )
        return {
            TopicPartition(*tp): ends[TopicPartition(*tp)] if at is None else at.offset
            for tp, at in found.items()
        }

    async def committed(self, group: str, topics: Sequence[str]) -> dict[TopicPartition, int]:
        partitions = await self._all(topics)
        found = await self._connection.call(
            f"positions of {group}",
            lambda: self._client.list_consumer_group_offsets(group, partitions=partitions),
        )
        return {TopicPartition(*tp): at.offset for tp, at in found.items() if at.offset >= 0}

    async def retention_ms(self, topic: str) -> int:
        await self.partitions(topic)
        found = await self._connection.call("settings of topics", lambda: self._settings([topic]))
        by_age = "delete" in found[topic]["cleanup.policy"]
        return int(found[topic]["retention.ms"]) if by_age else FOR_EVER

    async def groups(self) -> dict[str, dict[TopicPartition, int]]:
        async def attempt() -> dict[str, dict[TopicPartition, int]]:
            found: dict[str, dict[TopicPartition, int]] = {}
            for name, *_ in sorted(await self._client.list_consumer_groups()):
                positions = await self._client.list_consumer_group_offsets(name)
                found[name] = {
                    TopicPartition(*tp): at.offset for tp, at in sorted(positions.items()) if at.offset >= 0
                }
            return found

        return await self._connection.call("groups", attempt)

    async def _all(self, topics: Sequence[str]) -> list[KafkaPartition]:
        """Partitions of `topics`, whose leaders both views know. Raises TopicMismatch."""
        counts = {topic: await self.partitions(topic) for topic in topics}
        if not self._tracked.issuperset(topics):
            self._tracked.update(topics)
            for view in (self._committed_view, self._written_view):
                # Without it aiokafka learns one topic per question and waits 100 ms after each.
                await view._client.set_topics(self._tracked)
        return [KafkaPartition(topic, partition) for topic in topics for partition in range(counts[topic])]

    async def _describe(self) -> dict[str, int]:
        """Partitions by topic, without Kafka's own. Asks for all: asking for one by name may create it."""
        topics = await self._client.describe_topics()
        return {topic["topic"]: len(topic["partitions"]) for topic in topics if not topic["is_internal"]}

    async def _create(self, topics: Sequence[Topic]) -> None:
        new = [NewTopic(t.name, t.partitions, 1, topic_configs=settings_of(t)) for t in topics]
        for created in new:
            created.replication_factor = -1  # the broker's default; NewTopic refuses it as an argument
        response = await self._client.create_topics(new)
        for name, code, *_ in response.topic_errors:
            error = for_code(code)
            if code and error is not TopicAlreadyExistsError:
                raise error(name)
        described = await self._describe()
        if any(described.get(topic.name, 0) == 0 for topic in topics):
            raise UnknownTopicOrPartitionError("created, not yet known to every broker")
        self._counts = described

    async def _compare(self, topics: Sequence[Topic]) -> list[Difference]:
        described = await self._describe()
        differences = [
            Difference(topic.name, "partitions", str(topic.partitions), str(described.get(topic.name, 0)))
            for topic in topics
            if described.get(topic.name) != topic.partitions
        ]
        wanted = {topic.name: settings_of(topic) for topic in topics}
        for name, found in (await self._settings(list(wanted))).items():
            differences += [
                Difference(name, setting, expected, str(found.get(setting)))
                for setting, expected in wanted[name].items()
                if found.get(setting) != expected
            ]
        return differences

    async def _settings(self, topics: Sequence[str]) -> dict[str, dict[str, str]]:
        """What the broker says of each topic, by Kafka's names."""
        responses = await self._client.describe_configs(
            [ConfigResource(ConfigResourceType.TOPIC, topic) for topic in topics]
        )
        settings = {}
        for response in responses:
            for code, message, _, name, entries in response.resources:
                if code:
                    raise for_code(code)(message)
                settings[name] = {entry[0]: entry[1] for entry in entries}
        return settings


async def _offsets(
    ask: "AIOKafkaConsumer", partitions: Sequence[KafkaPartition]
) -> dict[TopicPartition, int]:
    return {TopicPartition(*tp): offset for tp, offset in (await ask(partitions)).items()}
