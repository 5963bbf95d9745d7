"""One chaos run: started, hurt until it is enough, cut off in mid-work, and brought to its end.

    start     every process at once; the first steps are waited for
    faults    as drawn; each is recorded with what its victim was at
    cut       SIGTERM to all; the log is looked at as it is, with work in flight
    drain     all start again, with a last step that closes what was issued, and end

Not here: what must hold in the end (`chaos.verdict`).
"""

import asyncio
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from chaos.crew import ALIVE_S, Broker, ProcessLog, alive, crew_of, left_behind, send, start_all
from chaos.faults import BROKER, Fault
from faulty_run import GROUP_SIZE, GROUPS_PER_STEP, Watch
from headrace.bus.protocol import Bus
from headrace.cli import settings as tree
from headrace.cli.loop import STEPS_NO_LIMIT
from headrace.cli.supervisor import Crew, tail
from headrace.wire.topics import TOPICS

FIRST_STEP_S = 240.0
STALLED_S = 300.0
"""Without a step for so long, faults or not, the run is stuck: a bug of it."""
BREATH_S = 60.0
DRAIN_S = 420.0
"""The deadline of a group, and some: a group whose records are lost closes then."""
OBSERVE_S = 0.1
WATCH_S = 1.0
SETTINGS = {
    "run.groups_per_step": str(GROUPS_PER_STEP),
    "run.group_size": str(GROUP_SIZE),
    "run.steps_max": str(STEPS_NO_LIMIT),
    "trainer.checkpoint_every": "3",
    "evaluation.tasks": "0",
}


@dataclass(slots=True)
class Done:
    """A fault, and what came of it."""

    fault: Fault
    at_s: float
    """Since the first step."""
    pid: int
    doing: str
    step: int
    """In the ledger just then."""
    working_s: float | None = None
    """Until the victim said again that it works; None if it was hit again before."""
    step_s: float | None = None
    """Until the next step was in the ledger."""


@dataclass(slots=True)
class Story:
    """What happened in a run."""

    done: list[Done] = field(default_factory=list)
    breaths: int = 0
    """How often faults waited for a step, as none had come for BREATH_S."""
    own_deaths: list[str] = field(default_factory=list)
    """Processes that ended with an error and were started again, with nobody's hand in it."""
    faults_s: float = 0.0
    """From the first step to the cut."""
    steps_at_cut: int = 0
    drain_s: float = 0.0
    wrong: list[str] = field(default_factory=list)

    @property
    def kills(self) -> int:
        return sum(done.fault.kind == "kill" for done in self.done)


class Stuck(AssertionError):
    """The run does not go on; the message ends with the logs of its processes."""


class ChaosRun:
    """A run in `run_dir`; use `started`."""

    def __init__(self, run_dir: Path, bus: Bus, crew: Crew, broker: Broker | None) -> None:
        self.run_dir = run_dir
        self.bus = bus
        self.crew = crew
        self.broker = broker
        self.watch = Watch(bus, run_dir.name)
        self.story = Story()
        self._looking = asyncio.Lock()
        self._begun_s = self._stepped_s = time.monotonic()
        self._logs: dict[str, ProcessLog] = {}
        self._paused: dict[str, asyncio.Task[None]] = {}
        self._stillness = asyncio.Lock()
        """While the broker is killed: nobody paused goes on."""
        self._kills: Counter[str] = Counter()
        self._hit: dict[str, Done] = {}
        """By process: its last kill, until it works again."""
        self._sessions: set[int] = set()

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._begun_s

    async def first_step(self) -> None:
        """Starts everything and waits for a step."""
        await start_all(self.crew)
        self._logs = {name: ProcessLog(child) for name, child in self.crew.children.items()}
        await self.until(lambda: self.watch.step > 0, FIRST_STEP_S, "a first step")
        self.begin()

    def begin(self) -> None:
        """Times and deaths are counted from here."""
        self._begun_s = self._stepped_s = time.monotonic()
        self._kills = Counter({name: child.restarts for name, child in self.crew.children.items()})

    async def hurt(
        self,
        faults: Iterator[Fault],
        enough: Callable[["ChaosRun"], bool],
        meanwhile: Callable[["ChaosRun"], Coroutine[Any, Any, None]],
    ) -> None:
        """Inflicts `faults` until it is `enough`, and runs `meanwhile` beside them. Raises Stuck."""
        observer = asyncio.create_task(self._observe())
        beside = asyncio.create_task(meanwhile(self))
        try:
            for fault in faults:
                if enough(self):
                    break
                await asyncio.wait({observer}, timeout=fault.delay_s)
                await self._let_it_breathe(observer)
                await self._inflict(fault)
        finally:
            for task in (observer, beside):
                task.cancel()
            await asyncio.gather(observer, beside, return_exceptions=True)
            await asyncio.gather(*self._paused.values())
        await self.look()
        self.story.faults_s = self.elapsed_s
        self.story.steps_at_cut = self.watch.step

    async def _let_it_breathe(self, observer: "asyncio.Task[None]") -> None:
        """After BREATH_S without a step waits for one: processes that are hit faster than a crowded machine
        starts them prove nothing. Raises Stuck."""
        if time.monotonic() - self._stepped_s > BREATH_S:
            self.story.breaths += 1
            while time.monotonic() - self._stepped_s > BREATH_S and not observer.done():
                await asyncio.wait({observer}, timeout=OBSERVE_S)
        if observer.done():
            observer.result()

    async def cut(self) -> None:
        """Stops every process, whatever it is at."""
        self._count_own_deaths()
        lived = [child for child in self.crew.children.values() if child.process.returncode is None]
        await self.crew.stop()
        for child in lived:
            if child.process.returncode == -signal.SIGKILL:
                self.story.wrong.append(f"{child.name}: did not stop when asked to")

    async def drain(self) -> None:
        """Starts all again, to end at the first step that closes all that was issued. Raises Stuck."""
        begun_s = time.monotonic()
        await self.look()
        settings = tree.load(self.run_dir)
        per_step = settings.run.groups_per_step
        last = max(self.watch.step, -(-len(self.watch.issued) // per_step))
        run = msgspec.structs.replace(settings.run, steps_max=last)
        tree.save(msgspec.structs.replace(settings, run=run), self.run_dir)
        await start_all(self.crew)
        ended = [self.crew.children[name].ended for name in ("trainer", "prompts")]
        await self.until(
            lambda: all(one.is_set() for one in ended), DRAIN_S, f"trainer and feed to end at step {last}"
        )
        await self.until(
            lambda: max((ack.version for ack in self.watch.serving), default=0) >= last,
            ALIVE_S,
            f"version {last} to be served",
        )
        await self.cut()
        await self.look()
        self.story.drain_s = time.monotonic() - begun_s

    async def until(self, what: Callable[[], bool], deadline_s: float, expected: str) -> None:
        """Waits until `what()` holds of a fresh watch. Raises Stuck at the deadline."""
        end = time.monotonic() + deadline_s
        while True:
            await self.look()
            if what():
                return
            if time.monotonic() > end:
                raise Stuck(f"expected {expected} within {deadline_s:.0f} s\n{self.told()}")
            await asyncio.sleep(OBSERVE_S)

    def told(self) -> str:
        """The ends of all logs."""
        return "\n".join(f"-- {path}\n{tail(path)}" for path in sorted((self.run_dir / "logs").glob("*.log")))

    async def left(self) -> list[int]:
        """Pids of what outlived the run; a sandbox needs a moment to see that its worker is gone."""
        for _ in range(50):
            if not (found := left_behind(self._sessions)):
                break
            await asyncio.sleep(0.1)
        return found

    async def look(self) -> None:
        """Reads what is new on the log."""
        self._sessions.update(child.pid for child in self.crew.children.values())
        async with self._looking:
            await self.watch.refresh()

    async def _inflict(self, fault: Fault) -> None:
        if fault.target in self._paused:
            await self._paused[fault.target]
        if fault.target != BROKER:
            await self._hit_process(fault)
        elif self.broker is not None:
            await self._hit_broker(self.broker, fault)

    async def _hit_process(self, fault: Fault) -> None:
        child = self.crew.children[fault.target]
        await alive(child)
        await self.look()
        if child.process.returncode is not None:  # died meanwhile, by itself
            await alive(child)
        self._record(fault, child.pid, self._doing(fault.target))
        if fault.kind == "pause":
            send(child, signal.SIGSTOP)
            self._go_on_later(fault, lambda: send(child, signal.SIGCONT))
            return
        self._logs[fault.target] = ProcessLog(child)
        self._kills[fault.target] += 1
        self._hit[fault.target] = self.story.done[-1]
        victim = child.process
        send(child, signal.SIGKILL)
        await victim.wait()  # known to be dead before anything is asked of it

    async def _hit_broker(self, broker: Broker, fault: Fault) -> None:
        await self.look()
        self._record(fault, broker.pid, "serving")
        done = self.story.done[-1]
        if fault.kind == "pause":
            broker.signal(signal.SIGSTOP)
            self._go_on_later(fault, lambda: broker.signal(signal.SIGCONT))
            return
        begun_s = time.monotonic()
        if fault.kind == "kill":
            async with self._stillness:
                clients = [child for name, child in self.crew.children.items() if name not in self._paused]
                # the ends are told once the markers of what was committed are in the log
                await broker.kill(clients, lambda: self.bus.ends(list(TOPICS)))
        await broker.restart()
        done.working_s = time.monotonic() - begun_s

    def _go_on_later(self, fault: Fault, go_on: Callable[[], None]) -> None:
        async def later() -> None:
            try:
                await asyncio.sleep(fault.pause_s)
            finally:
                async with self._stillness:
                    go_on()
                self._paused.pop(fault.target, None)

        self._paused[fault.target] = asyncio.create_task(later())

    def _record(self, fault: Fault, pid: int, doing: str) -> None:
        self.story.done.append(Done(fault, self.elapsed_s, pid, doing, self.watch.step))

    def _doing(self, name: str) -> str:
        """What the process is at, as far as log and topics tell."""
        watch = self.watch
        said = self._logs[name]
        if not said.ready():
            return "computing steps again" if said.has("replayed") else "starting"
        works = {
            "trainer": ("a step", watch.training),
            "experience": ("joining", watch.joining),
            "inference-0": ("generating", watch.generating),
            "rollouts-0": ("rolling out", lambda: watch.rolling("rollouts-0")),
            "rollouts-1": ("rolling out", lambda: watch.rolling("rollouts-1")),
            "relay": ("a new version", lambda: watch.served < watch.step),
            "prompts": ("feeding", lambda: False),
        }
        word, working = works[name]
        return word if working() else "waiting"

    async def _observe(self) -> None:
        """Fills in how long each victim took, and raises Stuck when no step comes."""
        seen, looked_s = self.watch.step, 0.0
        while True:
            await asyncio.sleep(OBSERVE_S)
            now_s = time.monotonic()
            if now_s - looked_s > WATCH_S:
                await self.look()
                looked_s = time.monotonic()
            if self.watch.step > seen:
                seen, self._stepped_s = self.watch.step, time.monotonic()
            if now_s - self._stepped_s > STALLED_S:
                raise Stuck(f"expected a step after step {seen} within {STALLED_S:.0f} s\n{self.told()}")
            self._note_recoveries()
            for done in self.story.done:
                if done.step_s is None and self.watch.step > done.step:
                    done.step_s = self.elapsed_s - done.at_s

    def _note_recoveries(self) -> None:
        for name, done in list(self._hit.items()):
            if self._logs[name].ready():
                done.working_s = self.elapsed_s - done.at_s
                del self._hit[name]

    def _count_own_deaths(self) -> None:
        for name, child in self.crew.children.items():
            more = child.restarts - self._kills[name]
            if more > 0:
                errors = [line for line in child.log_path.read_text().splitlines() if " ERROR " in line]
                self.story.own_deaths.append(f"{name}: {more} times, last: {(errors or ['?'])[-1]}")
        self._kills.clear()


@asynccontextmanager
async def started(
    run_dir: Path, bus: Bus, address: str, broker: Broker | None = None
) -> AsyncIterator[ChaosRun]:
    """A new run, in small, with nothing started yet; nothing of it outlives the block."""
    flags = {**SETTINGS, "run.name": run_dir.name, "bus.address": address}
    tree.save(tree.load(run_dir, flags=flags), run_dir)
    await bus.create_topics(list(TOPICS.values()))
    async with crew_of(run_dir) as crew:
        yield ChaosRun(run_dir, bus, crew, broker)
