"""The Faust host: the same processors as a Faust app, at least once. Needs Kafka.

A batch is folded; then, in this order, its outputs and dead letters are sent and acknowledged, its states go
into a Faust table, and only then its events are acknowledged. A crash between two of these repeats work on
newer state, which changes nothing, and may send an output again under the same id: readers drop it. Faust has
no fencing and reads uncommitted records; where that matters, use `hosts.bus` (docs/adr/0006-stream-hosts.md).

The agent never lets an exception out, because Faust commits past it: a bad record is dead-lettered, any other
fault ends the process at once, with nothing acknowledged.
"""

import logging
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import faust
from faust.app import BootStrategy

from headrace import log
from headrace.bus import open_bus
from headrace.bus.protocol import Bus
from headrace.clock import Clock, SystemClock
from headrace.store.blobs import Blobs
from headrace.streams.hosts.faust.host import FaustConfig, FaustHost
from headrace.streams.processor import Processor
from headrace.wire.topics import TOPICS

__all__ = ["FaustConfig", "FaustHost", "StreamApp", "stream_app"]

_logger = logging.getLogger(__name__)


def stream_app(
    processor: Processor,
    brokers: str,
    blobs: Blobs,
    config: FaustConfig,
    *,
    clock: Clock | None = None,
    security: Mapping[str, str] | None = None,
    **settings: Any,
) -> "StreamApp":
    """A Faust app that runs `processor` on Kafka at `brokers` (`host:port[,host:port]`).

    `settings` are Faust's own and win (`broker_credentials` for TLS and SASL); `security` is the same for the
    bus that makes the topics first.
    """
    name = f"headrace-streams-{processor.name}"
    app = StreamApp(
        name,
        **{
            "broker": [f"kafka://{address}" for address in brokers.split(",")],
            "store": f"{config.store}://",
            "datadir": config.directory,
            "consumer_group_instance_id": config.instance or None,
            "consumer_auto_offset_reset": "earliest",
            "autodiscover": False,
            "web_enabled": False,
            "broker_commit_interval": 1.0,
            "broker_session_timeout": 10.0,
            "broker_rebalance_timeout": 20.0,
            "broker_request_timeout": 30.0,  # 1200 s by default: it would wait in silence for a broker
            "topic_partitions": processor.state_topic.partitions,
            "worker_redirect_stdouts": False,
            **settings,
        },
    )
    app.bus = lambda: open_bus(f"kafka:{brokers}", security=security)
    host = FaustHost(app, processor, blobs, clock or SystemClock(), config)
    topic = app.topic(
        *(topic.name for topic in processor.inputs), key_serializer="raw", value_serializer="raw"
    )

    @app.agent(topic, name=processor.name)
    async def agent(stream: Any) -> AsyncIterator[None]:
        async for events in stream.noack_take(config.records_max, within=config.within_ms / 1000):
            await host.batch(events)
            yield

    @app.timer(1.0)  # type: ignore[untyped-decorator]  # Faust's own
    async def timers() -> None:
        await host.tick()

    @app.timer(10.0)  # type: ignore[untyped-decorator]
    async def report() -> None:
        log.event(_logger, "counts", stream=processor.name, open=host.open, **host.counts)

    return app


class _Boot(BootStrategy):
    enable_web = (
        False  # the worker's command line turns the server on, whatever the settings say: it shows tables
    )


class StreamApp(faust.App):
    BootStrategy = _Boot
    bus: Callable[[], Bus]

    async def on_first_start(self) -> None:
        # A missing output topic would block the agent for ever, with an error line every 100 ms.
        async with self.bus() as bus:
            for difference in await bus.create_topics(list(TOPICS.values())):
                log.event(_logger, "topic differs", level=logging.WARNING, difference=difference)
        await super().on_first_start()
