"""The crew of child processes: deaths are told, nothing outlives the supervisor, every stop is bounded."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.bus import open_bus
from headrace.cli import settings as tree
from headrace.cli.process import living
from headrace.cli.supervisor import Crew, how, only_supervisor, tail
from headrace.errors import ConfigError, ProcessDied
from headrace.wire.topics import TOPICS

DEADLINE_S = 30.0


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run with its topics made, so that `headrace experience` works in it: the lightest process."""
    settings = tree.load(tmp_path, environment={})
    tree.save(settings, tmp_path)

    async def create() -> None:
        async with open_bus(settings.bus.address) as bus:
            await bus.create_topics(list(TOPICS.values()))

    asyncio.run(create())
    return tmp_path


async def ready(crew: Crew, name: str) -> int:
    """Pid of an `experience` that works: its pid file is there before it can be asked to stop."""
    log_path = crew.children[name].log_path
    await crew.wait(
        lambda: _true(name in living(crew.run_dir) and b" ready " in log_path.read_bytes()),
        deadline_s=DEADLINE_S,
        expected=name,
    )
    return living(crew.run_dir)[name]


async def _true(value: bool) -> bool:
    return value


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


def until(what: Callable[[], bool]) -> bool:
    end = time.monotonic() + DEADLINE_S
    while not what() and time.monotonic() < end:
        time.sleep(0.05)
    return what()


def test_a_crew_starts_and_stops(run_dir: Path) -> None:
    """A child that is asked to stop ends by itself, with exit code 0 and an empty pid file place."""

    async def act() -> int | None:
        async with Crew(run_dir) as crew:
            await crew.start("experience", "experience")
            await ready(crew, "experience")
            await crew.stop()
            crew.check()
            return crew.children["experience"].process.returncode

    assert asyncio.run(act()) == 0
    assert living(run_dir) == {}
    assert "end" in tail(run_dir / "logs" / "experience.log")


def test_a_death_is_told_with_its_log(run_dir: Path) -> None:
    """A child killed with SIGKILL ends every wait with its name, how it died, and the end of its log."""

    async def act() -> None:
        async with Crew(run_dir) as crew:
            await crew.start("experience", "experience")
            os.kill(await ready(crew, "experience"), signal.SIGKILL)
            await crew.wait(lambda: _true(False), deadline_s=DEADLINE_S, expected="nothing")

    with pytest.raises(ProcessDied, match=r"(?s)experience .* died: SIGKILL; its log .*start pid="):
        asyncio.run(act())


def test_a_failure_is_told_with_its_reason(run_dir: Path) -> None:
    """A child that refuses to start dies with the exit code of its error."""

    async def act() -> None:
        async with Crew(run_dir) as crew:
            await crew.start("experience", "experience", "--experience.share", "5/4")
            await crew.wait(lambda: _true(False), deadline_s=DEADLINE_S, expected="nothing")

    with pytest.raises(ProcessDied, match=r"(?s)exit code 2; .*expected i/n.*got '5/4'"):
        asyncio.run(act())


def test_background_stands_back(run_dir: Path) -> None:
    """A named child has its niceness from the start, and again after a restart; the others have the usual."""

    async def act() -> list[int]:
        async with Crew(run_dir, restarts_max=1, nice_of=lambda name: 7 * (name == "experience")) as crew:
            child = await crew.start("experience", "experience")
            first = await ready(crew, "experience")
            told = [os.getpriority(os.PRIO_PROCESS, first)]
            os.kill(first, signal.SIGKILL)
            await crew.wait(lambda: _true(child.pid != first), deadline_s=DEADLINE_S, expected="a restart")
            told.append(os.getpriority(os.PRIO_PROCESS, child.pid))
            await crew.start("relay", "relay")
            return [*told, os.getpriority(os.PRIO_PROCESS, crew.children["relay"].pid)]

    usual = os.getpriority(os.PRIO_PROCESS, 0)
    assert asyncio.run(act()) == [7, 7, usual]


def test_a_stop_during_a_restart_reaches_the_new_process(run_dir: Path) -> None:
    """Asked while the next process is being made, it is told as soon as it lives, and not killed as late."""

    async def act() -> int | None:
        async with Crew(run_dir, restarts_max=1, stop_s=60) as crew:
            child = await crew.start("experience", "experience")
            first = await ready(crew, "experience")
            spawn, making, go_on = crew._spawn, asyncio.Event(), asyncio.Event()

            async def slow(name: str, words: tuple[str, ...]) -> asyncio.subprocess.Process:
                made = await spawn(name, words)
                making.set()
                await go_on.wait()
                return made

            crew._spawn = slow  # type: ignore[method-assign]
            os.kill(first, signal.SIGKILL)
            await making.wait()
            await crew.wait(
                lambda: _true(living(run_dir).get("experience", first) != first),
                deadline_s=DEADLINE_S,
                expected="a second process",
            )
            stopping = asyncio.create_task(crew.stop())
            await asyncio.sleep(0)
            go_on.set()
            async with asyncio.timeout(DEADLINE_S):
                await stopping
            return child.process.returncode

    assert asyncio.run(act()) in (0, -signal.SIGTERM)


def test_restarts_are_counted(run_dir: Path) -> None:
    """With one restart allowed, the first death is mended and the second one told."""

    async def act() -> None:
        async with Crew(run_dir, restarts_max=1) as crew:
            child = await crew.start("experience", "experience")
            first = await ready(crew, "experience")
            os.kill(first, signal.SIGKILL)
            await crew.wait(
                lambda: _true(living(run_dir).get("experience", first) != first),
                deadline_s=DEADLINE_S,
                expected="another",
            )
            assert child.restarts == 1
            os.kill(living(run_dir)["experience"], signal.SIGKILL)
            await crew.wait(lambda: _true(False), deadline_s=DEADLINE_S, expected="nothing")

    with pytest.raises(ProcessDied, match="died: SIGKILL"):
        asyncio.run(act())


def test_a_child_that_does_not_stop_is_killed(run_dir: Path) -> None:
    """A child that can't react to SIGTERM is killed after the bound, not waited for."""

    async def act() -> int | None:
        async with Crew(run_dir, stop_s=0.3) as crew:
            await crew.start("experience", "experience")
            os.kill(await ready(crew, "experience"), signal.SIGSTOP)
            await asyncio.wait_for(crew.stop(), 60)
            return crew.children["experience"].process.returncode

    assert asyncio.run(act()) == -signal.SIGKILL


def test_no_child_outlives_a_killed_supervisor(run_dir: Path) -> None:
    """SIGKILL to the supervisor takes its child along, even one that is stopped."""
    program = (
        "import asyncio, sys\n"
        "from pathlib import Path\n"
        "from headrace.cli.supervisor import Crew\n"
        "async def act():\n"
        "    async with Crew(Path(sys.argv[1])) as crew:\n"
        "        await crew.start('experience', 'experience')\n"
        "        await asyncio.sleep(60)\n"
        "asyncio.run(act())\n"
    )
    supervisor = subprocess.Popen([sys.executable, "-c", program, str(run_dir)])
    try:
        assert until(lambda: "experience" in living(run_dir))
        child = living(run_dir)["experience"]
        os.kill(child, signal.SIGSTOP)
    finally:
        supervisor.kill()
        supervisor.wait()
    assert until(lambda: gone(child))


def test_one_supervisor_a_run_directory(tmp_path: Path) -> None:
    """A second demo in the same directory is refused; after the first has gone it may start."""
    with only_supervisor(tmp_path), pytest.raises(ConfigError, match="no other"), only_supervisor(tmp_path):
        pass
    with only_supervisor(tmp_path):
        pass


def test_how_and_tail(tmp_path: Path) -> None:
    """Exit codes and signals in words; only the last lines of a long log."""
    assert (how(3), how(-9), how(-200)) == ("exit code 3", "SIGKILL", "signal 200")
    path = tmp_path / "log"
    path.write_text("".join(f"line {n}\n" for n in range(5000)))
    assert tail(path, lines=2) == "    line 4998\n    line 4999"
    assert "not readable" in tail(tmp_path / "none")
