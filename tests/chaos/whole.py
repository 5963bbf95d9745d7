"""A chaos run from the first start to the last check, on either log.

Not here: the command line (`chaos.__main__`), the parts (`chaos.play`, `chaos.verdict`).
"""

from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chaos import faults, verdict
from chaos.crew import Broker, broker
from chaos.play import ChaosRun, Story, started
from chaos.verdict import Verdict
from checker import Log, read_log
from headrace.bus import open_bus


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a chaos run is to be. It ends after `kills` SIGKILLs, or, if that is 0, after `minutes`."""

    run_dir: Path
    """Not there yet. The run's name is the directory's."""
    seed: int
    kafka: bool = False
    kills: int = 0
    minutes: float = 2.0
    delay_s: float = 3.0

    def enough(self, run: ChaosRun) -> bool:
        return run.story.kills >= self.kills if self.kills else run.elapsed_s >= 60 * self.minutes

    def left_s(self, run: ChaosRun) -> float:
        """About how long the faults will go on."""
        if not self.kills:
            return 60 * self.minutes - run.elapsed_s
        kills = max(run.story.kills, 1)
        return (self.kills - kills) * run.elapsed_s / kills


Act = Callable[[ChaosRun], Coroutine[Any, Any, None]]


async def nothing(run: ChaosRun) -> None:
    return


@dataclass(frozen=True, slots=True)
class Outcome:
    story: Story
    at_cut: Verdict
    at_end: Verdict
    log: Log
    """As it was in the end."""

    @property
    def wrong(self) -> list[str]:
        return [*self.story.wrong, *self.at_cut.wrong, *self.at_end.wrong]


async def run_through(
    wanted: Wanted, *, say: Callable[[str], None], before: Act = ChaosRun.first_step, meanwhile: Act = nothing
) -> Outcome:
    """Plays it, and checks. `before` starts the run; `meanwhile` runs beside the faults. Raises
    `play.Stuck`."""
    name = wanted.run_dir.name
    async with log_for(wanted) as (address, server), open_bus(address) as bus:
        async with started(wanted.run_dir, bus, address, server) as run:
            await before(run)
            drawn = faults.draw(wanted.seed, broker=wanted.kafka, delay_s=wanted.delay_s)
            await run.hurt(drawn, wanted.enough, meanwhile)
            say("the cut: SIGTERM to all")
            await run.cut()
            at_cut = await verdict.of_log(bus, name)
            say("the drain: all again, to the end of what was issued")
            await run.drain()
        if left := await run.left():
            run.story.wrong.append(f"left behind: processes {left}")
        say("the verdict: every step again, from the seed")
        at_end = await verdict.of_end(bus, name, wanted.run_dir / "store")
        return Outcome(run.story, at_cut, at_end, await read_log(bus))


@asynccontextmanager
async def log_for(wanted: Wanted) -> AsyncIterator[tuple[str, Broker | None]]:
    """Makes the run's directory, and its log: the address, and the broker if it has one."""
    wanted.run_dir.mkdir(parents=True)
    if not wanted.kafka:
        yield f"sqlite:{wanted.run_dir}/bus.sqlite", None
        return
    async with broker(wanted.run_dir.with_name(f"{wanted.run_dir.name}-broker")) as server:
        yield server.address, server
