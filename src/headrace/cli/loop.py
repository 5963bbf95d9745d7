"""The phases of `headrace demo`: which processes run when, and what each phase waits for.

Every wait has a deadline and ends at once when a process died or the demo was asked to stop. Not here: how a
process is kept (`supervisor`), settings and report (`demo`).
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import msgspec

from headrace import log
from headrace.bus.protocol import Bus
from headrace.cli import settings as tree
from headrace.cli.options import Place
from headrace.cli.run_view import Follower, RunView
from headrace.cli.screen import Screen
from headrace.cli.supervisor import Crew
from headrace.errors import BusUnavailable, ProcessDied
from headrace.wire.topics import TOPICS

STEPS_NO_LIMIT = 1_000_000
"""For a demo that ends by time."""
QUICK_STEPS = 20
"""A demo of fewer steps shows that everything works, not that the model learns: small rounds do."""
QUICK_TASKS = 48
QUICK_SAMPLES = 2
ROUND_S = 1200.0
"""A held-out round takes seconds; on a slow machine minutes."""
FIRST_STEP_S = 240.0
STALLED_S = 180.0
"""Without a new step for so long the loop is stuck: a fault, not patience."""
SERVED_S = 15.0
REFRESH_S = 1.0

logger = logging.getLogger(__name__)


class Loop:
    """One demo on an opened bus; `run` once."""

    def __init__(
        self,
        bus: Bus,
        where: Place,
        screen: Screen,
        stop: asyncio.Event,
        *,
        restarts_max: int = 0,
        steps_max: int | None = None,
    ) -> None:
        """`steps_max`: the run's last step, if it has one."""
        self._bus = bus
        self._where = where
        self._screen = screen
        self._stop = stop
        self._follower = Follower(bus, where.settings.run.name)
        self._crew = Crew(
            where.home,
            stop_s=where.settings.demo.stop_s,
            restarts_max=restarts_max,
            nice_of=self._nice_of,
        )
        self._note = ""
        self._drawer: asyncio.Task[None] | None = None
        self._quick = False
        self._steps_max = steps_max

    @property
    def view(self) -> RunView:
        return self._follower.view

    async def run(self, steps: int | None) -> bool:
        """Before, train, stop, after; False when asked to stop on the way. `steps`: how many to train; by
        time if None. Raises ProcessDied, BusUnavailable."""
        self._quick = steps is not None and steps < QUICK_STEPS
        differences = await self._bus.create_topics(list(TOPICS.values()))
        for found in differences:
            self._screen.say(
                f"{found.topic}: {found.setting}: expected {found.expected}, found {found.found}"
            )
        await self._follower.refresh()
        first_step = self.view.step
        self._save(first_step + steps if steps is not None else self._steps_max)
        async with self._crew, self._drawing():
            done = (
                await self._start()
                and await self._round("before", 0)
                and await self._train(first_step, steps)
                and await self._halt()
                and await self._round("after", self.view.step)
            )
            self._screen.phase("stopping" if not done else "writing the report")
        return done

    def _save(self, steps_max: int | None) -> None:
        """The run's settings, where its processes read them."""
        settings = self._where.settings
        run = msgspec.structs.replace(settings.run, steps_max=steps_max or STEPS_NO_LIMIT)
        tree.save(msgspec.structs.replace(settings, run=run), self._where.home)

    async def _start(self) -> bool:
        """Everything but the prompt feed: version 0 is announced and served when it returns."""
        self._screen.phase("starting: trainer, inference, relay, join, rollout workers")
        demo = self._where.settings.demo
        for name in ("trainer", "inference-0"):
            await self._crew.start(name, name.partition("-")[0], *self._told(name))
        if not await self._until(
            lambda: self.view.version is not None, demo.ready_s, "the trainer to announce its weights"
        ):
            return False
        for name in ("relay", "experience"):
            await self._crew.start(name, name)
        for number in range(demo.workers):
            await self._crew.start(f"rollouts-{number}", "rollouts")
        return True

    def _feeding(self) -> tuple[str, ...]:
        """What starts the flow. A few steps show no curve, so the small held-out rounds would only cost
        time."""
        return ("prompts",) if self._quick else ("prompts", "watch")

    def _nice_of(self, name: str) -> int:
        """How far a process stands back from the processor."""
        return 0

    def _told(self, name: str) -> tuple[str, ...]:
        """More words on the command line of a process."""
        return ()

    async def _round(self, name: str, version: int) -> bool:
        """One held-out round, unless the log has it whole already."""
        tasks, samples = self._round_size()
        tried = sum(
            tally.tried
            for (round, _, at), tally in self.view.rounds.items()
            if (round, at) == (name, version)
        )
        if tried >= tasks * (samples + 1):
            return True
        self._screen.phase(f"held-out round `{name}`: version {version}, {tasks} tasks never trained on")
        await self._crew.start(
            f"evaluate-{name}",
            *("evaluate", "--round", name, "--version", str(version)),
            *("--tasks", str(tasks), "--samples", str(samples)),
        )
        return await self._crew.finish(f"evaluate-{name}", deadline_s=ROUND_S, stop=self._stop)

    def _round_size(self) -> tuple[int, int]:
        """Tasks, and sampled tries of each beside the greedy one."""
        config = self._where.settings.evaluation
        if self._quick:
            return min(config.tasks, QUICK_TASKS), min(config.samples, QUICK_SAMPLES)
        return config.tasks, config.samples

    async def _train(self, first_step: int, steps: int | None) -> bool:
        minutes = self._where.settings.demo.minutes
        length = f"{steps} steps" if steps is not None else f"{minutes:g} minutes"
        self._screen.phase(f"training: {length}")
        if not await self._until(
            lambda: bool(self.view.replicas), self._where.settings.demo.ready_s, "a replica that serves"
        ):
            return False
        for name in self._feeding():
            await self._crew.start(name, name)
        trainer = self._crew.children["trainer"].ended  # it ends by itself at `run.steps_max`
        if not await self._until(
            lambda: self.view.step > first_step or trainer.is_set(), FIRST_STEP_S, "a first training step"
        ):
            return False
        end = time.monotonic() + 60 * minutes
        seen, seen_at = self.view.step, time.monotonic()
        while not self._stop.is_set():
            self._check()
            if self.view.step > seen:
                seen, seen_at = self.view.step, time.monotonic()
            if trainer.is_set() or (steps is None and time.monotonic() > end):
                return True
            if time.monotonic() - seen_at > STALLED_S:
                raise ProcessDied(
                    f"training: expected a step after step {seen} within {STALLED_S:.0f} s; see "
                    f"{self._where.home / 'logs'}"
                )
            await asyncio.sleep(0.2)
        return False

    async def _halt(self) -> bool:
        self._screen.phase("stopping the loop")
        await self._last_served()
        await self._crew.stop()
        await self._follower.refresh()
        return not self._stop.is_set()

    async def _last_served(self) -> None:
        """A relay that is behind has SERVED_S for the weights of a trainer that has ended. Where they can't
        be served the run ends all the same."""
        if not self._crew.children["trainer"].ended.is_set():
            return
        end = time.monotonic() + SERVED_S
        while self.view.served < self.view.step and time.monotonic() < end and not self._stop.is_set():
            self._check()
            await asyncio.sleep(0.1)

    async def _until(self, true: Callable[[], bool], deadline_s: float, expected: str) -> bool:
        async def what() -> bool:
            self._check()
            return true()

        return await self._crew.wait(what, deadline_s=deadline_s, expected=expected, stop=self._stop)

    @asynccontextmanager
    async def _drawing(self) -> AsyncIterator[None]:
        """Keeps the view and the screen fresh meanwhile."""
        self._drawer = asyncio.ensure_future(self._draw())
        try:
            yield
        finally:
            self._drawer.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._drawer

    def _check(self) -> None:
        """Raises what ended a process, or the drawing, before its time."""
        self._crew.check()
        if self._drawer is not None and self._drawer.done():
            self._drawer.result()

    async def _draw(self) -> None:
        while True:
            try:
                await self._follower.refresh()
                self._note = ""
            except BusUnavailable as error:
                self._note = str(error)
                log.event(logger, "bus_unavailable", level=logging.WARNING, error=error)
            alive = [child.name for child in self._crew.children.values() if not child.ended.is_set()]
            restarted = [
                f"{c.name} restarted x{c.restarts}" for c in self._crew.children.values() if c.restarts
            ]
            self._screen.show(self.view, alive, self._note or ", ".join(restarted))
            await asyncio.sleep(REFRESH_S)
