"""The bus on Apache Kafka keeps the contract of every bus."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator

import pytest
from aiokafka import TopicPartition as KafkaPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.admin.records_to_delete import RecordsToDelete
from contract import BusContract

from headrace.bus import open_bus
from headrace.wire.topics import Topic

pytestmark = pytest.mark.kafka


@contextlib.asynccontextmanager
async def operator(address: str) -> AsyncIterator[AIOKafkaAdminClient]:
    client = AIOKafkaAdminClient(bootstrap_servers=address.removeprefix("kafka:"))
    await client.start()
    try:
        yield client
    finally:
        await client.close()


class TestKafka(BusContract):
    SESSION_MS = (
        6000 if os.environ.get("HEADRACE_KAFKA") else 2000
    )  # a broker's own minimum is 6 s; ours allows less

    @pytest.fixture
    def address(self, kafka: str) -> str:
        return f"kafka:{kafka}"

    async def shorten(self, address: str, topic: Topic, before: int) -> None:
        async with operator(address) as client:
            await client.delete_records({KafkaPartition(topic.name, 0): RecordsToDelete(before)})

    async def recreate(self, address: str, topic: Topic) -> None:
        async with operator(address) as client:
            await client.delete_topics([topic.name])
            while topic.name in await client.list_topics():  # noqa: ASYNC110 - the broker deletes
                await asyncio.sleep(0.02)
        async with open_bus(address) as bus:
            await bus.create_topics([topic])
