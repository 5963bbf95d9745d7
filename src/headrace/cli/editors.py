"""`headrace editors`: simulated editors on a run's first replica and its gateway, as real ones would be: they
ask in the live lane, and report through the feedback client with its buffer on disk.

Not here: what the people do (`producers.editors`). For a laptop, a demo, a load: not for production.
"""

import argparse
import asyncio
import logging
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from headrace import log
from headrace.cli import gateway, options, processes
from headrace.cli.options import Place
from headrace.cli.process import run_process
from headrace.errors import ConfigError

if TYPE_CHECKING:
    from headrace.producers.client import FeedbackClient
    from headrace.wire.records import Feedback

DETAIL = "Settings: --editors.users, --editors.pace. They stop at editors.suggestions_max, or when told to."
GATEWAY_WAIT_S = 60.0
FLUSH_S = 5.0

_logger = logging.getLogger(__name__)


def arguments(parser: argparse.ArgumentParser) -> None:
    options.process_arguments(parser, "editors")


def run(args: argparse.Namespace) -> int:
    where = options.place(args)
    return run_process(
        args.name,
        where.run_dir,
        lambda stop: _type(where, args.name, stop),
        module="headrace.producers.editors",
        level=args.log_level,
    )


async def _type(where: Place, name: str, stop: asyncio.Event) -> None:
    from headrace.policy import checkpoint
    from headrace.producers import editors
    from headrace.producers.client import FeedbackClient
    from headrace.rpc.client import InferenceClient

    settings = where.settings
    addresses = await processes.replicas(where, [], stop)
    http = await _gateway_of(where, stop)
    if not addresses or not http:
        return
    async with AsyncExitStack() as stack:
        replica = await stack.enter_async_context(InferenceClient(addresses[0]))
        client = FeedbackClient(f"http://{http}", buffer=where.home / f"{name}.feedback.db")
        stack.callback(client.close, FLUSH_S)
        counts = await editors.run(
            replica,
            lambda events: _publish(client, events),
            settings.run,
            settings.editors,
            stop,
            codec=checkpoint.load_seed()[2],
            session=f"live{int(time.time()):x}",
        )
        log.event(_logger, "editors_end", asked=counts.asked, shown=counts.shown, silent=counts.silent)


async def _publish(client: "FeedbackClient", events: "list[Feedback]") -> None:
    from headrace.rpc.feedback import Event

    for event in events:
        client.publish_event(
            Event(
                event_id=event.event_id,
                suggestion_id=event.suggestion_id,
                kind=event.kind,
                editor_ms=event.editor_ms,
                view_id=event.view_id,
                user=event.user,
                client=event.client,
                accepted_length=event.accepted_length,
                superseded_by=event.superseded_by,
                continues=event.continues,
                persisted_s=event.persisted_s,
                difference=event.difference,
            )
        )


async def _gateway_of(where: Place, stop: asyncio.Event) -> str:
    """The HTTP address of the run's gateway, once it is there; empty when `stop` came first."""
    end = time.monotonic() + GATEWAY_WAIT_S
    while not stop.is_set():
        try:
            return gateway.addresses_of(Path(where.home))[1]
        except ConfigError:
            if time.monotonic() > end:
                raise
        await asyncio.sleep(0.1)
    return ""
