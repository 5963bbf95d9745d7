"""A crew of child processes: started, watched, restarted if allowed, stopped within a bound.

Each child is `headrace COMMAND` in a process group of its own, with its own log file, tied to this process by
a pipe and by the kernel (`cli.process`), so that none outlives it. Not here: which processes make a run and
when (`cli.demo`).
"""

import asyncio
import contextlib
import fcntl
import logging
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from headrace import log
from headrace.cli.process import SUPERVISOR_VARIABLE
from headrace.errors import ConfigError, ProcessDied

TAIL_LINES = 15
TAIL_BYTES = 8192
KILL_WAIT_S = 5.0
RESTART_S = 0.2
"""Pause before the first restart; it doubles."""
RESTART_S_MAX = 5.0

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Child:
    """One process of the crew, over its restarts."""

    name: str
    words: tuple[str, ...]
    log_path: Path
    process: asyncio.subprocess.Process
    watcher: "asyncio.Task[None]"
    stopping: bool = False
    restarts: int = 0
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    """It came to its end and won't be restarted."""

    @property
    def pid(self) -> int:
        return self.process.pid


class Crew:
    """`async with Crew(run_dir) as crew`: on leaving, every child is stopped."""

    def __init__(
        self,
        run_dir: Path,
        *,
        stop_s: float = 20.0,
        restarts_max: int = 0,
        restart_s_max: float = RESTART_S_MAX,
        nice_of: Callable[[str], int] = lambda _: 0,
    ) -> None:
        """`nice_of`: how far the child of a name stands back from the processor, 0 to 19."""
        self.run_dir = run_dir
        self.children: dict[str, Child] = {}
        self._stop_s = stop_s
        self._restarts_max = restarts_max
        self._restart_s_max = restart_s_max
        self._nice_of = nice_of
        self._died: asyncio.Future[ProcessDied] = asyncio.get_running_loop().create_future()

    async def __aenter__(self) -> Self:
        (self.run_dir / "logs").mkdir(parents=True, exist_ok=True)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def start(self, name: str, *words: str) -> Child:
        """Starts `headrace WORDS --run-dir DIR --name NAME`; returns at once."""
        child = Child(
            name=name,
            words=words,
            log_path=self.run_dir / "logs" / f"{name}.log",
            process=await self._spawn(name, words),
            watcher=asyncio.ensure_future(asyncio.sleep(0)),
        )
        self.children[name] = child
        child.watcher = asyncio.ensure_future(self._watch(child))
        return child

    async def wait(
        self,
        what: Callable[[], Awaitable[bool]],
        *,
        deadline_s: float,
        expected: str,
        every_s: float = 0.2,
        stop: asyncio.Event | None = None,
    ) -> bool:
        """Waits until `what()` is true, or `stop` is set (then False).

        Raises ProcessDied as soon as a child has died, ProcessDied that says what was `expected` at the
        deadline.
        """
        end = time.monotonic() + deadline_s
        while not (stop is not None and stop.is_set()):
            self.check()
            if await what():
                return True
            if time.monotonic() > end:
                raise ProcessDied(f"{self.run_dir}: expected {expected} within {deadline_s:.0f} s")
            await asyncio.sleep(every_s)
        return False

    async def finish(self, name: str, *, deadline_s: float, stop: asyncio.Event | None = None) -> bool:
        """Waits for the end of a child that ends by itself; False when `stop` came first."""

        async def ended() -> bool:
            return self.children[name].ended.is_set()

        return await self.wait(ended, deadline_s=deadline_s, expected=f"{name} to end", stop=stop)

    def check(self) -> None:
        """Raises ProcessDied if a child has died and was not restarted."""
        if self._died.done():
            raise self._died.result()

    async def stop(self, *names: str) -> None:
        """Asks the named children (all by default) to stop, all at once; kills the group of each that hasn't
        after `stop_s`. Safe to call twice."""
        chosen = [self.children[name] for name in names or tuple(self.children) if name in self.children]
        alive = [child for child in chosen if not child.ended.is_set()]
        for child in alive:
            child.stopping = True
            _signal(child, signal.SIGTERM)
        await _all_ended(alive, self._stop_s)
        late = [child for child in alive if not child.ended.is_set()]
        for child in late:
            log.event(logger, "killed", level=logging.WARNING, process=child.name, after_s=self._stop_s)
            _signal(child, signal.SIGKILL)
        await _all_ended(late, KILL_WAIT_S)

    async def _spawn(self, name: str, words: tuple[str, ...]) -> asyncio.subprocess.Process:
        path = self.run_dir / "logs" / f"{name}.log"
        environment = os.environ | {SUPERVISOR_VARIABLE: str(os.getpid()), "PYTHONUNBUFFERED": "1"}
        with path.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "headrace", *words, "--run-dir", str(self.run_dir), "--name", name),
                stdin=asyncio.subprocess.PIPE,
                stdout=output,
                stderr=output,
                env=environment,
                start_new_session=True,
            )
        if nice := self._nice_of(name):
            _stand_back(process.pid, nice)
        return process

    async def _watch(self, child: Child) -> None:
        while True:
            code = await child.process.wait()
            if child.stopping or code == 0:
                break
            if child.restarts >= self._restarts_max:
                self._report_death(child, code)
                break
            child.restarts += 1
            log.event(
                logger,
                "restart",
                level=logging.WARNING,
                process=child.name,
                ended=how(code),
                restart=child.restarts,
            )
            await asyncio.sleep(min(RESTART_S * 2 ** min(child.restarts - 1, 10), self._restart_s_max))
            if child.stopping:
                break
            child.process = await self._spawn(child.name, child.words)
            if child.stopping:  # asked while there was nobody to hear it
                _signal(child, signal.SIGTERM)
        # Whatever the child left behind in its group goes with it.
        _signal(child, signal.SIGKILL)
        child.ended.set()

    def _report_death(self, child: Child, code: int) -> None:
        """The first death is the one that is told: others follow from it."""
        if not self._died.done():
            self._died.set_result(
                ProcessDied(
                    f"{child.name} (pid {child.pid}) died: {how(code)}; its log {child.log_path} ends:\n"
                    + tail(child.log_path)
                )
            )


def _stand_back(pid: int, nice: int) -> None:
    """Before it has threads or children, which inherit it. Linux may share the processor out by session
    (sched(7), autogroup), and each child has one: then only the session's own value counts."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, pid, nice)
    with contextlib.suppress(OSError):
        Path(f"/proc/{pid}/autogroup").write_text(str(nice))


def how(code: int) -> str:
    """`exit code 3`, or `SIGKILL` for a process that a signal ended."""
    if code >= 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):
        return signal.Signals(-code).name
    return f"signal {-code}"


def tail(path: Path, lines: int = TAIL_LINES) -> str:
    """The last lines of a log, indented; a note when there are none."""
    try:
        with path.open("rb") as source:
            source.seek(max(0, path.stat().st_size - TAIL_BYTES))
            text = source.read().decode(errors="replace")
    except OSError as error:
        return f"    (not readable: {error.strerror})"
    return "\n".join(f"    {line}" for line in text.splitlines()[-lines:]) or "    (empty)"


@contextmanager
def only_supervisor(run_dir: Path) -> Iterator[None]:
    """Holds the run directory for one supervisor. Raises ConfigError when another has it."""
    run_dir.mkdir(parents=True, exist_ok=True)
    with (run_dir / "supervisor.lock").open("w") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(
                f"{run_dir}: expected no other `headrace demo` in this run directory, found one"
            ) from error
        yield


def _signal(child: Child, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, number)


async def _all_ended(children: list[Child], deadline_s: float) -> None:
    waits = [asyncio.ensure_future(child.ended.wait()) for child in children]
    if waits:
        _, late = await asyncio.wait(waits, timeout=deadline_s)
        for wait in late:
            wait.cancel()
