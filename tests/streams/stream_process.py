"""A join as its own process: `python stream_process.py ADDRESS BLOBS [COMMIT | slow | settled]`. Not tests.

Stops on SIGTERM. With COMMIT, it stops itself (SIGSTOP) right before it makes that commit, as a machine that
hangs between its read and its commit. With `slow` it is the feedback join, with `settled` one that closes
what is judged at once.
"""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from headrace.bus import open_bus
from headrace.bus.protocol import Bus, Transactor
from headrace.errors import HeadraceError
from headrace.store.blobs import Blobs
from headrace.streams.feedback import FeedbackConfig
from headrace.streams.hosts.bus import HostConfig
from headrace.streams.run import FeedbackStreamConfig, StreamConfig, run, run_feedback


class Delegate:
    """A bus that behaves like another one, but for what a subclass changes."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bus, name)


class HangingBus(Delegate):
    def __init__(self, bus: Bus, commit: int) -> None:
        super().__init__(bus)
        self._left = commit
        # One commit at a time: a process stopped while another of its partitions is inside a transaction of
        # the embedded log would keep the file locked for everybody, which is not what is tested.
        self._one = asyncio.Lock()

    @asynccontextmanager
    async def transactor(self, transactional_id: str) -> AsyncIterator["HangingTransactor"]:
        async with self._bus.transactor(transactional_id) as transactor:
            yield HangingTransactor(self, transactor)

    async def commit(self, transactor: Transactor, messages: Any, **kwargs: Any) -> list[int]:
        async with self._one:
            self._left -= 1
            if self._left == 0:
                print("hanging", flush=True)
                os.kill(os.getpid(), signal.SIGSTOP)
            return await transactor.commit(messages, **kwargs)


class HangingTransactor:
    def __init__(self, bus: HangingBus, transactor: Transactor) -> None:
        self._bus = bus
        self._transactor = transactor

    async def commit(self, messages: Any, **kwargs: Any) -> list[int]:
        return await self._bus.commit(self._transactor, messages, **kwargs)


FEEDBACK = {
    "slow": FeedbackConfig(window_ms=6_000, orphan_ms=4_000),
    "settled": FeedbackConfig(window_ms=60_000, settle_ms=0),
}


async def main(address: str, blobs: str, mode: str) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    async with open_bus(address) as bus:
        if mode in FEEDBACK:
            # A kill needs many transactions to fall between. With a window that ends, every transaction of a
            # busy machine is time that what is sent on to another suggestion has not got.
            host = HostConfig(records_max=20 if mode == "settled" else 500, clock_skew_ms=0)
            config = FeedbackStreamConfig(join=FEEDBACK[mode], host=host)
            await run_feedback(bus, config, stop, blobs=Blobs.open(blobs))
            return
        joined: Any = HangingBus(bus, int(mode)) if mode else bus
        await run(joined, StreamConfig(host=HostConfig(records_max=20)), stop, blobs=Blobs.open(blobs))


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    try:
        asyncio.run(main(sys.argv[1], sys.argv[2], sys.argv[3] if len(sys.argv) > 3 else ""))
    except HeadraceError as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        sys.exit(error.exit_code)
