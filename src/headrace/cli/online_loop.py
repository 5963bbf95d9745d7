"""The phases of `headrace demo --online`: the loop of the demo, and beside it people who use the model.

    topics -> the demo's processes, gateway, feedback join, canary -> rounds "before": simulated tasks, and
    what suggestions are worth to users -> prompts and editors, training -> the same without rollouts, for the
    latency -> stop -> rounds "after" -> report

The times of the phases are written to `DIR/measures/phases.json`. Not here: the phases of the demo itself
(`cli.loop`), what is reported (`cli.online_report`).
"""

import asyncio
import math
import time
from pathlib import Path

import msgspec

from headrace.cli import measure, planting
from headrace.cli.files import write_whole
from headrace.cli.loop import ROUND_S, Loop
from headrace.errors import ConfigError
from headrace.wire.topics import ROLLOUT_STEPS

PHASES_FILE = "phases.json"
START_FILE = "start.ckpt"
TAKEN_BACK_S = 180.0
"""How long a demo goes on after its time, for the canary to see enough of a planted version."""
BACKGROUND = ("trainer", "rollouts", "prompts")
WARM_S = 5.0
"""At the start of a phase: what was asked before it still comes."""


class Phases(msgspec.Struct, kw_only=True):
    """When editors typed, in ms of this machine's clock: with rollouts beside them, and without."""

    with_rollouts: tuple[int, int] = (0, 0)
    without_rollouts: tuple[int, int] = (0, 0)
    planted: str = ""
    """What was announced in mid-run, in place of what was learned."""


def phases_of(home: Path) -> Phases:
    """Those of the newest demo of the run. Raises ConfigError."""
    path = home / "measures" / PHASES_FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=Phases)
    except FileNotFoundError:
        return Phases()
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{path}: expected the phases of a demo: {error}") from error


class OnlineLoop(Loop):
    """One online demo on an opened bus; `run` once. `plant`: what a version in mid-run is replaced with."""

    plant = ""
    _phases: Phases

    async def _start(self) -> bool:
        self._phases = Phases(planted=self.plant)
        self._write()
        planting.forget(self._where.home)
        if not (await self._silence() and await super()._start()):
            return False
        await self._crew.start("gateway", "gateway")
        await self._crew.start("feedback-join", "feedback-join")
        if self._where.settings.release.mode == "gradual":
            await self._crew.start("canary", "canary")
        return True

    async def _silence(self) -> bool:
        """A new run begins with a seed that is able to stay silent."""
        start, run_file = self._where.settings.trainer.start_from, self._where.home / START_FILE
        if start != str(run_file) or self.view.version is not None or run_file.is_file():
            return True
        self._screen.phase("preparing the start: a seed that is able to stay silent")
        share = str(self._where.settings.demo.silence_share)
        await self._crew.start("silence", "silence", str(run_file), "--share", share)
        return await self._crew.finish("silence", deadline_s=ROUND_S, stop=self._stop)

    def _feeding(self) -> tuple[str, ...]:
        """No small rounds beside: the cores belong to the users."""
        return ("prompts",)

    def _nice_of(self, name: str) -> int:
        """Live first: no user waits for what trains and rolls out."""
        nobody_waits = name.partition("-")[0] in BACKGROUND
        return self._where.settings.demo.background_nice if nobody_waits else 0

    def _told(self, name: str) -> tuple[str, ...]:
        return ("--plant", self.plant) if self.plant and name == "trainer" else ()

    async def _round(self, name: str, version: int) -> bool:
        return await super()._round(name, version) and await self._measured(name, version)

    async def _measured(self, name: str, version: int) -> bool:
        """What suggestions of `version` are worth, unless that is known."""
        known = measure.read(self._where.home, name)
        if known is not None and known.version == version:
            return True
        trials = self._where.settings.demo.trials_quick if self._quick else self._where.settings.demo.trials
        self._screen.phase(
            f"round `{name}`: version {version}, {trials} suggestions on files never trained on"
        )
        await self._crew.start(
            f"measure-{name}",
            *("measure", "--round", name, "--version", str(version), "--trials", str(trials)),
        )
        return await self._crew.finish(f"measure-{name}", deadline_s=ROUND_S, stop=self._stop)

    async def _train(self, first_step: int, steps: int | None) -> bool:
        if not await self._typing():
            return False
        began = _now_ms()
        planting_ = asyncio.ensure_future(self._plant(first_step, steps))
        try:
            if not await super()._train(first_step, steps):
                return False
            await asyncio.wait({planting_}, timeout=TAKEN_BACK_S)
        finally:
            planting_.cancel()
            await asyncio.gather(planting_, return_exceptions=True)
            (self._where.home / planting.ORDER_FILE).unlink(missing_ok=True)
        self._phases.with_rollouts = (began + round(WARM_S * 1000), _now_ms())
        return await self._alone()

    async def _typing(self) -> bool:
        """Starts the editors; true once one of them has got an answer."""

        async def written() -> int:
            return sum((await self._bus.ends([ROLLOUT_STEPS.name])).values())

        before = await written()
        await self._crew.start("editors", "editors")

        async def answered() -> bool:
            self._check()
            return await written() > before

        ready_s = self._where.settings.demo.ready_s
        return await self._crew.wait(
            answered, deadline_s=ready_s, expected="an answer to an editor", stop=self._stop
        )

    async def _plant(self, first_step: int, steps: int | None) -> None:
        """Half-way bad weights are announced, until the canary takes one of them back; then until good ones
        serve everybody."""
        if not self.plant:
            return
        half = first_step + max(1, (steps or 0) // 2)
        begun = await self._until(lambda: self.view.step > first_step, math.inf, "a first training step")
        if steps is None:
            await asyncio.sleep(30.0 * self._where.settings.demo.minutes)
        if not begun or not await self._until(lambda: self.view.step >= half, math.inf, "half of the steps"):
            return
        order = self._where.home / planting.ORDER_FILE
        order.touch()
        self._screen.phase(f"training: {self.plant} announced from now on, until the canary takes it back")
        if not await self._until(lambda: bool(self._taken_back()), math.inf, "the canary to take it back"):
            return
        order.unlink(missing_ok=True)
        versions = ", ".join(map(str, self._taken_back()))
        self._screen.phase(f"training: version {versions} taken back; good weights again")
        if await self._until(self._healed, math.inf, "a good version to serve everybody"):
            self._screen.phase(
                f"training: version {self.view.release.stable[-1]}, a good one, serves everybody"
            )

    def _taken_back(self) -> list[int]:
        """Versions planted in this start that no user has any more, in order."""
        return sorted(set(planting.planted(self._where.home)) & set(self.view.release.revoked))

    def _healed(self) -> bool:
        """Whether everybody has a version that came after the one taken back, and is not itself planted."""
        stable = self.view.release.stable[-1:]
        return stable > self._taken_back()[:1] and stable[0] not in planting.planted(self._where.home)

    async def _alone(self) -> bool:
        """Editors without rollouts, for as long as `demo.alone_s` says."""
        alone_s = self._where.settings.demo.alone_s
        self._screen.phase(f"{alone_s:g} s without rollouts, for the latency of suggestions")
        workers = [name for name in self._crew.children if name.startswith("rollouts-")]
        await self._crew.stop("prompts", *workers)
        began = _now_ms()
        if not await self._passed(WARM_S + alone_s):
            return False
        self._phases.without_rollouts = (began + round(WARM_S * 1000), _now_ms())
        await self._crew.stop("editors")
        settle_ms = self._where.settings.feedback_join.join.settle_ms or 0
        self._write()
        return await self._passed(1.0 + settle_ms / 1000)

    async def _passed(self, seconds: float) -> bool:
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self._stop.is_set():
            self._check()
            await asyncio.sleep(0.2)
        return not self._stop.is_set()

    def _write(self) -> None:
        write_whole(self._where.home / "measures" / PHASES_FILE, msgspec.json.encode(self._phases))


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
