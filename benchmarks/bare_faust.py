"""The least that a Faust agent with a table can be: each event's bytes become the value of its key.
`benchmarks.streams` runs it."""

import os
from typing import Any

import faust

from headrace.wire.topics import PARTITIONS, PROMPTS, REWARDS, ROLLOUT_STEPS

ID = "bare-faust"

app = faust.App(
    ID,
    broker=f"kafka://{os.environ.get('HEADRACE_BUS__ADDRESS', 'kafka:localhost:9092').partition(':')[2]}",
    store="memory://",
    autodiscover=False,
    consumer_auto_offset_reset="earliest",
    broker_commit_interval=1.0,
    broker_request_timeout=30.0,
    broker_session_timeout=10.0,
    topic_partitions=PARTITIONS,
    worker_redirect_stdouts=False,
)
table: Any = app.Table("latest", key_type=bytes, value_type=bytes, partitions=PARTITIONS)


@app.agent(
    app.topic(PROMPTS.name, ROLLOUT_STEPS.name, REWARDS.name, key_serializer="raw", value_serializer="raw")
)
async def latest(stream: Any) -> None:
    async for event in stream.events():
        table[event.key] = event.value
