"""Trainers as their own processes: `python training_process.py BUS BLOBS SETTINGS_JSON POINT:COUNT...`. Not
tests.

One trainer after the other, each forked from this process (which has imported torch and runs nothing). It
kills itself with SIGKILL at the COUNT-th passing of POINT: `put` (a blob is stored), `before` (a transaction
is about to begin), `after` (it is committed, nobody knows yet), `never`. Prints the exit codes, minus the
signal for one that was killed. One that stops itself (a failpoint) is `asleep`, and is woken when the others
have ended: its exit code is the last.
"""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from trainer_records import MODEL

from headrace.bus import open_bus
from headrace.bus.protocol import Bus
from headrace.consumers import training
from headrace.errors import HeadraceError
from headrace.policy.model import Weights, initial_weights
from headrace.store.blobs import Blob, Blobs
from headrace.trainer.config import StepSettings


class Delegate:
    """Behaves like another object, but for what a subclass changes."""

    def __init__(self, other: Any) -> None:
        self._other = other

    def __getattr__(self, name: str) -> Any:
        return getattr(self._other, name)


class Fuse:
    """Burns down at the COUNT-th passing of POINT."""

    def __init__(self, point: str, count: int) -> None:
        self._point, self._left = point, count

    def passing(self, point: str) -> None:
        if point == self._point:
            self._left -= 1
            if self._left == 0:
                self.burn(point)

    def burn(self, point: str) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class FusedBlobs(Delegate):
    def __init__(self, other: Blobs, fuse: Fuse) -> None:
        super().__init__(other)
        self._fuse = fuse

    async def put(self, data: bytes, **kwargs: Any) -> Blob:
        blob: Blob = await self._other.put(data, **kwargs)
        self._fuse.passing("put")
        return blob


class FusedTransactor(Delegate):
    def __init__(self, other: Any, fuse: Fuse) -> None:
        super().__init__(other)
        self._fuse = fuse

    async def commit(self, messages: Any, **kwargs: Any) -> list[int]:
        self._fuse.passing("before")
        offsets: list[int] = await self._other.commit(messages, **kwargs)
        self._fuse.passing("after")
        return offsets


class FusedBus(Delegate):
    def __init__(self, other: Bus, fuse: Fuse) -> None:
        super().__init__(other)
        self._fuse = fuse

    @asynccontextmanager
    async def transactor(self, transactional_id: str) -> AsyncIterator[FusedTransactor]:
        async with self._other.transactor(transactional_id) as transactor:
            yield FusedTransactor(transactor, self._fuse)


def seed() -> tuple[Any, Weights]:
    """The tiny model that all these tests begin with."""
    weights = initial_weights(MODEL, 1)
    for name in weights:
        if name.endswith((".out", ".down")):
            weights[name] = weights[name] + 0.05
    return MODEL, weights


async def main(address: str, store: str, settings: StepSettings, fuse: Fuse) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    async with open_bus(address) as bus:
        fused: Any = FusedBus(bus, fuse)
        blobs: Any = FusedBlobs(Blobs.open(store), fuse)
        await training.run(fused, settings.run, settings.trainer, blobs, stop, seed=seed())


def start(address: str, store: str, settings: StepSettings, fuse: Fuse) -> int:
    """Pid of a trainer in a process of its own."""
    pid = os.fork()
    if pid:
        return pid
    try:
        asyncio.run(main(address, store, settings, fuse))
    except HeadraceError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        os._exit(error.exit_code)
    os._exit(0)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    settings = msgspec.json.decode(sys.argv[3], type=StepSettings)
    sleepers = []
    for fuse in sys.argv[4:]:
        point, _, count = fuse.partition(":")
        pid = start(sys.argv[1], sys.argv[2], settings, Fuse(point, int(count or 1)))
        status = os.waitpid(pid, os.WUNTRACED)[1]
        if os.WIFSTOPPED(status):
            sleepers.append(pid)
            print("asleep", flush=True)
        else:
            print(os.waitstatus_to_exitcode(status), flush=True)
    for pid in sleepers:
        os.kill(pid, signal.SIGCONT)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
