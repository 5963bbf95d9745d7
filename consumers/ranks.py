"""The trainer on several processes: rank 0 reads, decides and commits; the others only compute with it.

    rank 0: run_step(...) ── state if theirs is another, records, settings ──► ranks 1..: run_step(...)
                     ◄──────────── sums of gradients and reports (trainer.ranks) ────────────►

A helping rank has no log and no store, and keeps nothing but the state that it computed itself: killed, it is
missed at the next exchange, the trainer ends with an error and all begin again from the ledger. Not here: the
exchange (`trainer.ranks`), the step (`trainer.step`).
"""

import contextlib
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Final

import msgspec
import torch

from headrace.consumers.replay import Compute, RunStep
from headrace.errors import TrainingError, WireError
from headrace.kernels import invariant
from headrace.policy.model import ModelConfig
from headrace.trainer import checkpoint
from headrace.trainer.admission import Entry
from headrace.trainer.config import StepSettings, TrainerConfig
from headrace.trainer.ranks import Gloo
from headrace.trainer.state import State
from headrace.trainer.step import StepResult, run_step
from headrace.wire.records import Consumed, Experience

RUN: Final = "-"
"""The name under which states travel between ranks: they are of no run's checkpoints."""
END: Final = b"end"
STOP_S: Final = 10.0


class _Entry(msgspec.Struct, frozen=True):
    consumed: Consumed
    experience: Experience | None
    error: str = ""


class _Order(msgspec.Struct, frozen=True):
    """What rank 0 says of one step. `state` is a checkpoint, empty when the others have it already."""

    state: bytes
    root: str
    entries: list[_Entry]
    positions: dict[str, int]
    model: ModelConfig
    settings: StepSettings


class Leader:
    """Rank 0. `run_step` is `trainer.step.run_step` with the others' help; call it from one thread."""

    def __init__(self, gloo: Gloo) -> None:
        self._gloo = gloo
        self._theirs: State | None = None
        self._in_step = False

    def run_step(
        self,
        state: State,
        entries: Sequence[Entry],
        positions: dict[str, int],
        *,
        model: ModelConfig,
        settings: StepSettings,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> StepResult:
        """As `trainer.step.run_step`. Raises TrainingError too when a rank is lost or has other numbers."""
        order = _Order(
            state=b"" if state is self._theirs else checkpoint.encode(state, RUN),
            root=state.root,
            entries=[_packed(entry) for entry in entries],
            positions=positions,
            model=model,
            settings=settings,
        )
        self._theirs, self._in_step = None, True
        self._gloo.tell(msgspec.msgpack.encode(order))
        result = run_step(
            state,
            entries,
            positions,
            model=model,
            settings=settings,
            cancelled=cancelled,
            ranks=self._gloo,
        )
        self._theirs, self._in_step = result.state, False
        return result

    def close(self) -> None:
        """Lets the others go. In a step that was abandoned they wait for sums: then they only lose the
        line."""
        if not self._in_step:
            with contextlib.suppress(TrainingError):  # they may be gone already
                self._gloo.tell(END)
        self._gloo.close()


@asynccontextmanager
async def step_runner(config: TrainerConfig, compute: Compute) -> AsyncIterator[RunStep]:
    """`run_step`, with the help of `config.ranks - 1` processes on this machine. Raises TrainingError when
    they don't come together."""
    if config.ranks == 1:
        yield run_step
        return
    with hired(config.ranks, config.threads) as address:
        leader: Leader = await compute(lambda: Leader(Gloo(address, 0, config.ranks)))
        try:
            yield leader.run_step
        finally:
            await compute(leader.close)


def help_out(address: str, rank: int, size: int, threads: int) -> None:
    """Rank `rank` of `size`, until rank 0 ends. Raises TrainingError when rank 0 is lost."""
    torch.set_num_threads(threads)
    invariant.warm_up()
    gloo = Gloo(address, rank, size)
    state: State | None = None
    while (said := gloo.tell(None)) != END:
        order = msgspec.msgpack.decode(said, type=_Order)
        if order.state:
            state = checkpoint.decode(order.state, RUN, "rank 0")
        if state is None or state.root != order.root:
            raise TrainingError(f"rank {rank}: expected to hold the state of root {order.root}")
        entries = [_unpacked(entry) for entry in order.entries]
        result = run_step(
            state, entries, order.positions, model=order.model, settings=order.settings, ranks=gloo
        )
        state = result.state
    gloo.close()


@contextmanager
def hired(size: int, threads: int) -> Iterator[str]:
    """`size - 1` helping processes on this machine, gone afterwards whatever happens; the address at which
    rank 0 meets them."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    words = [sys.executable, "-m", "headrace", "rank", "--address", address, "--threads", str(threads)]
    children = [
        subprocess.Popen([*words, "--rank", str(rank), "--size", str(size)], stdin=subprocess.DEVNULL)
        for rank in range(1, size)
    ]
    try:
        yield address
    finally:
        for child in children:
            child.terminate()
        for child in children:
            try:
                child.wait(STOP_S)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


def _packed(entry: Entry) -> _Entry:
    if isinstance(entry.experience, WireError):
        return _Entry(entry.consumed, None, str(entry.experience))
    return _Entry(entry.consumed, entry.experience)


def _unpacked(entry: _Entry) -> Entry:
    return Entry(entry.consumed, WireError(entry.error) if entry.experience is None else entry.experience)
