"""The real processes of a chaos run, and its broker: started, hit, started again, and never left behind.

The processes are kept by the product's own supervisor (`headrace.cli.supervisor.Crew`), which starts each
that dies again. The broker lives in a session of its own; a guard with a pipe to us ends it when we are gone.
"""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from chaos.faults import PROCESSES
from faulty_run import quiet
from headrace.bus import local_kafka
from headrace.cli.supervisor import Child, Crew

RESTARTS_MAX = 1_000_000
RESTART_S_MAX = 0.5
ALIVE_S = 60.0
"""A process that died is started again within this time."""
READY = {
    "trainer": "trainer_start ",
    "experience": "ready ",
    "inference": "serving ",
    "rollouts": "worker_start ",
    "relay": "start ",
    "prompts": "feed_start ",
}
"""What a process says in its log once it works."""
_GUARD = """
import sys, time
from pathlib import Path
from headrace.bus import local_kafka
sys.stdin.read()
for _ in range(20):
    local_kafka.down(Path(sys.argv[1]), kill=True)
    time.sleep(0.1)
"""


def crew_of(run_dir: Path) -> Crew:
    return Crew(run_dir, restarts_max=RESTARTS_MAX, restart_s_max=RESTART_S_MAX)


async def start_all(crew: Crew) -> None:
    """Every process of the loop, at once: each waits for what it needs."""
    for name in PROCESSES:
        await crew.start(name, name.partition("-")[0])


async def alive(child: Child) -> None:
    """Waits until the supervisor has started the process again. Raises TimeoutError."""
    async with asyncio.timeout(ALIVE_S):
        while child.process.returncode is not None:  # noqa: ASYNC110 - the supervisor tells nobody
            await asyncio.sleep(0.02)


def send(child: Child, number: signal.Signals) -> None:
    """A signal to the process itself; its children find out by themselves."""
    with suppress(ProcessLookupError):
        child.process.send_signal(number)


class ProcessLog:
    """The log of one process, from a point on."""

    def __init__(self, child: Child) -> None:
        self._path = child.log_path
        self._ready = READY[child.name.partition("-")[0]]
        self._from = self._path.stat().st_size if self._path.exists() else 0

    def ready(self) -> bool:
        """Whether the process has said since that it works."""
        return self.has(self._ready)

    def has(self, event: str) -> bool:
        with self._path.open("rb") as source:
            source.seek(self._from)
            return f" {event}".encode() in source.read()


class Broker:
    """An Apache Kafka of this run's own."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    @property
    def address(self) -> str:
        return f"kafka:{local_kafka.status(self._directory).address}"

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    @property
    def pid(self) -> int:
        pid = local_kafka.status(self._directory).pid
        assert pid is not None, "the broker is down"
        return pid

    async def kill(self, clients: Sequence[Child], settled: Callable[[], Awaitable[object]]) -> None:
        """-9 while `clients` are `quiet` and `settled` has returned."""
        async with quiet([child.pid for child in clients if child.process.returncode is None]):
            await settled()
            await asyncio.to_thread(local_kafka.down, self._directory, kill=True)

    async def restart(self) -> None:
        """Down, unless it was killed, and up again; it answers on return."""
        await asyncio.to_thread(local_kafka.down, self._directory)
        await asyncio.to_thread(local_kafka.up, self._directory)


@asynccontextmanager
async def broker(directory: Path) -> AsyncIterator[Broker]:
    """Started, and down when left, or when this process dies."""
    guard = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", _GUARD, str(directory)), stdin=asyncio.subprocess.PIPE, start_new_session=True
    )
    try:
        await asyncio.to_thread(local_kafka.up, directory)
        yield Broker(directory)
    finally:
        await asyncio.to_thread(local_kafka.down, directory)
        guard.kill()
        await guard.wait()


def left_behind(sessions: set[int]) -> list[int]:
    """Pids of living processes in one of `sessions`, which ours and their children are in."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, _, session, *_ = path.read_text().rpartition(") ")[2].split()
            if state != "Z" and int(session) in sessions:
                found.append(int(path.parent.name))
    return found
