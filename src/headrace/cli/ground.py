"""What a command needs to compute steps of a run again: its ledger and blobs, the model it began with, a
thread that computes, and what this machine is.

It writes nothing and joins no consumer group: a run that is going on does not notice. Not here: what is
computed (`consumers.replay`), who asks (`replay`, `what_if`).
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headrace.bus.protocol import Bus
from headrace.cli import shown
from headrace.cli.options import Place
from headrace.errors import ConfigError
from headrace.wire.topics import WEIGHTS

if TYPE_CHECKING:
    from headrace.consumers.ledger import Ledger
    from headrace.consumers.replay import Compute, Source
    from headrace.trainer.provenance import Provenance
    from headrace.trainer.state import State


@dataclass(frozen=True, slots=True)
class Ground:
    """`cancelled` turns true when the command is leaving: a step under way then ends soon."""

    source: "Source"
    now: "Provenance"
    cancelled: Callable[[], bool]
    notes: list[str]
    """What a person should know of how the start was found."""

    async def newest_state(self, step: int) -> "State":
        """As `consumers.replay.newest_state`; checkpoints that were passed over are a note."""
        from headrace.consumers import replay

        refused: list[tuple[int, Exception]] = []
        state = await replay.newest_state(self.source, step, refused=lambda at, e: refused.append((at, e)))
        if refused:
            at, reason = refused[0]
            more = f" (nor {len(refused) - 1} older)" if len(refused) > 1 else ""
            self.notes.append(
                f"the checkpoint of step {at} can't be used{more}: {reason}; from {self.origin(state)}"
            )
        return state

    def origin(self, state: "State") -> str:
        """What `newest_state` found, in words."""
        if state.step and state.step == self.source.begin - 1:
            return f"the pack's state after step {state.step}"
        if state.step:
            return f"the checkpoint of step {state.step}"
        announced = self.source.ledger.published.get(0)
        from_file = announced is not None and announced.checkpoint is not None
        return "the checkpoint that the run began with" if from_file else "the seed"


@asynccontextmanager
async def ground(
    bus: Bus, where: Place, run_name: str | None = None, *, threads: int | None = None
) -> AsyncIterator[Ground]:
    """The run `run_name` on the bus (that of the settings if None), computed with `threads` (as its newest
    step was if None). Raises ConfigError for a run without a ledger, TrainingError for a broken one."""
    from headrace.cli.processes import blobs
    from headrace.consumers.replay import Source
    from headrace.policy.checkpoint import load_seed

    name = run_name or where.settings.run.name
    ledger = await read_run(bus, name)
    recorded = ledger.steps[-1].threads if ledger.steps else 1
    async with computing(threads or recorded) as (compute, now, cancelled):
        model, weights, _ = await compute(load_seed)
        source = Source(bus, blobs(where), ledger, name, f"trainer-{name}", (model, weights), compute)
        yield Ground(source, now, cancelled, [])


@asynccontextmanager
async def computing(threads: int) -> "AsyncIterator[tuple[Compute, Provenance, Callable[[], bool]]]":
    """A thread that computes with `threads`, what this machine is, and what turns true when it is left."""
    from headrace.trainer import provenance

    leaving = False
    with ThreadPoolExecutor(1, "replay", _prepare, (threads,)) as executor:

        async def compute(call: Callable[[], Any]) -> Any:
            return await asyncio.get_running_loop().run_in_executor(executor, call)

        try:
            yield compute, await compute(provenance.collect), lambda: leaving
        finally:
            leaving = True


async def read_run(bus: Bus, name: str) -> "Ledger":
    """The ledger of a run. Raises ConfigError that names the runs on this log when it isn't one of them,
    TrainingError when its ledger is broken."""
    from headrace.consumers.ledger import read_ledger

    ledger = await read_ledger(bus, name)
    if not ledger.steps and not ledger.published:
        known = await run_names(bus)
        raise ConfigError(f"--run: {shown.unknown('run', name, known)} (on this log: {_named(known)})")
    return ledger


async def run_names(bus: Bus) -> list[str]:
    """The runs that have announced weights on this log."""
    keys = set()
    begins, ends = await bus.begins([WEIGHTS.name]), await bus.ends([WEIGHTS.name])
    for tp, end in ends.items():
        async for delivery in bus.read_range(tp, begins[tp], end):
            keys.add((delivery.key or b"").decode(errors="replace"))
    return sorted(keys - {""})


def _named(runs: list[str]) -> str:
    return (", ".join(runs[:20]) or "no run") + (" ..." if len(runs) > 20 else "")


def _prepare(threads: int) -> None:
    import torch

    from headrace.kernels import invariant

    torch.set_num_threads(threads)  # counted per thread: has to be said in the one that computes
    invariant.warm_up()
