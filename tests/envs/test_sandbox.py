"""The sandbox: what programs can't do, and whose fault a failure is. Both kinds of walls, on this kernel."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest

from headrace.envs import sandbox as sandbox_module
from headrace.envs.checks import Check, Outcome, checks_of
from headrace.envs.config import SandboxConfig
from headrace.envs.sandbox import Job, Sandbox
from headrace.errors import ConfigError, SandboxError

Walls = Literal["namespaces", "landlock"]
GOOD = "def take(n, seq):\n    return itertools.islice(seq, n)\n"
EXAMPLES = """
>>> list(take(2, [10, 20, 30]))
[10, 20]
>>> list(take(0, [1]))
[]
"""
SHORT = {"check_cpu_ms": 100, "wall_ms": 400}
walls = pytest.mark.parametrize("isolation", ["namespaces", "landlock"])


def program(body: str) -> str:
    """A `take` that does `body` and returns `seen`."""
    body = textwrap.indent(textwrap.dedent(body), "    ")
    return f"def take(n, seq):\n    import os, sys\n    seen = None\n{body}\n    return seen\n"


def run_programs(programs: Sequence[str], examples: str | Sequence[Check], **settings: Any) -> list[Outcome]:
    """Outcomes of definitions of `toolz.itertoolz.take` on the examples of a docstring."""
    checks = tuple(checks_of(examples)) if isinstance(examples, str) else tuple(examples)

    async def once() -> list[Outcome]:
        async with await Sandbox.start(SandboxConfig(**settings), ["toolz"]) as sandbox:
            return await sandbox.run(Job("toolz.itertoolz", "take", tuple(programs), checks))

    return asyncio.run(once())


def job(*programs: str, examples: str = EXAMPLES) -> Job:
    return Job("toolz.itertoolz", "take", programs, tuple(checks_of(examples)))


DENIED = {
    "foreign files": "open('/etc/hostname').read()",
    "the root's files": f"open({str(Path(__file__))!r}).read()",
    "environment of others": "open('/proc/1/environ').read()",
    "sources of the task": f"open({sandbox_module._site_of('toolz')!r} + '/toolz/itertoolz.py').read()",
    "sockets": "__import__('socket').socket()",
    "unix sockets": "__import__('socket').socketpair()",
    "processes": "os.fork()",
    "threads": "__import__('_thread').start_new_thread(print, ())",
    "programs": "os.execv('/bin/true', ['true'])",
    "killing the parent": "os.kill(os.getppid(), 9)",
    "killing everybody": "os.kill(-1, 9)",
    "killing its group": "os.kill(0, 9)",
    "becoming root": "os.setuid(0)",
    "raising limits": "__import__('resource').setrlimit(7, (4096, 4096))",
    "writing outside": "open('/work_of_a_program', 'w')",
    "links": "os.symlink('/etc', 'etc')",
    "owners": "os.chown('/', 0, 0)",
    "priorities": "os.nice(-5)",
    "importing what is not loaded": "__import__('pydash')",
}


@walls
def test_forbidden_acts_raise_in_the_program(isolation: Walls) -> None:
    """Each act that leaves the sandbox fails with an ordinary exception, and the next program still runs."""
    programs = [*(program(f"seen = {act}") for act in DENIED.values()), GOOD]
    outcomes = run_programs(programs, EXAMPLES, isolation=isolation)
    wrong = {
        name: outcome for name, outcome in zip(DENIED, outcomes, strict=False) if outcome.status != "error"
    }
    assert not wrong
    assert outcomes[-1].status == "passed"


@walls
def test_kernel_calls_are_refused(isolation: Walls) -> None:
    """ptrace, unshare, mount and a new user namespace answer EPERM (1) even through ctypes."""
    body = """
    import ctypes
    libc = ctypes.CDLL(None, use_errno=True)
    seen = []
    for call in (lambda: libc.ptrace(0, 0, 0, 0), lambda: libc.unshare(0x10000000),
                 lambda: libc.mount(b"none", b"/tmp", b"tmpfs", 0, None), lambda: libc.umount2(b"/tmp", 2)):
        seen.append((call(), ctypes.get_errno()))
    """
    check = Check((), "take(0, [])\n", f"{[(-1, 1)] * 4}\n")
    (outcome,) = run_programs([program(body)], [check], isolation=isolation)
    assert outcome.status == "passed", outcome


@walls
def test_environment_and_identity(isolation: Walls, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker's environment does not reach a program."""
    monkeypatch.setenv("SECRET_OF_THE_WORKER", "swordfish")
    check = Check((), "take(0, [])\n", "['LC_CTYPE', 'PYTHONHASHSEED']\n")
    (outcome,) = run_programs([program("seen = sorted(os.environ)")], [check], isolation=isolation)
    assert outcome.status == "passed", outcome


def test_disk_is_bounded() -> None:
    """A program's own /tmp takes so much, over all files; without namespaces it has none."""
    body = """
    seen = 0
    try:
        for number in range(64):
            with open(f'/tmp/{number}', 'wb') as file:
                seen += file.write(bytes(256 * 1024))
    except OSError as error:
        seen = (seen, error.errno)
    """
    check = Check((), "take(0, [])\n", f"({4 * 256 * 1024}, 28)\n")
    full = program(body)
    (outcome,) = run_programs([full], [check], isolation="namespaces", tmp_bytes=1 << 20)
    assert outcome.status == "passed", outcome
    check = Check((), "take(0, [])\n", "(0, 13)\n")
    (outcome,) = run_programs([full], [check], isolation="landlock", tmp_bytes=1 << 20)
    assert outcome.status == "passed", outcome


@walls
def test_limits_end_the_program_not_the_batch(isolation: Walls) -> None:
    """Loops, sleeps, floods, memory and sudden ends get their own status; the next programs still pass."""
    stubborn = """
    import signal
    signal.signal(signal.SIGPROF, signal.SIG_IGN)
    while True:
        pass
    """
    swallowing = """
    while True:
        try:
            while True:
                pass
        except BaseException:
            pass
    """
    programs = {
        program("seen = sum(iter(int, 1))"): "timeout",  # a loop in C that no signal enters
        program("while True: pass"): "timeout",
        program("import time\ntime.sleep(60)"): "timeout",
        program("import time\nwhile True: time.sleep(0.02)"): "timeout",
        program(stubborn): "timeout",
        program(swallowing): "timeout",
        program("while True: print('x' * 100)"): "limit",
        program("seen = 'x' * 10**6"): "limit",
        program("seen = bytearray(10**10)"): "limit",
        program("os._exit(0)"): "crash",
        program("os.closerange(0, 64)"): "crash",
        program(
            "for fd in range(3, 64):\n    try: os.write(fd, b'x' * 10**5)\n    except OSError: pass"
        ): "crash",
        GOOD: "passed",
    }
    slow = [source for source, status in programs.items() if status == "timeout"]
    quick = [source for source in programs if source not in slow]
    for batch, limits in (
        ([*slow, GOOD], SHORT),
        (quick, {}),
    ):  # what is quick gets no limit that a stall meets
        outcomes = run_programs(batch, EXAMPLES, isolation=isolation, **limits)
        assert [outcome.status for outcome in outcomes] == [programs[source] for source in batch]


def test_deep_recursion_is_an_error_of_the_program() -> None:
    """Recursion without end is an exception like any other."""
    (outcome,) = run_programs(["def take(n, seq):\n    return take(n, seq)\n"], EXAMPLES)
    assert outcome.status == "error"
    assert outcome.detail.startswith("RecursionError")


@walls
@pytest.mark.parametrize("sequence", [(0,), (1,), (0, 1)])
def test_verdict_cannot_be_forged(isolation: Walls, sequence: tuple[int, ...]) -> None:
    """A program that writes results for itself or for the next program fails; the next one is judged anew."""
    body = """
    import json, struct
    for number in SEQUENCE:
        for check in range(-1, 2):
            body = json.dumps([number, check, "out", "passed"]).encode()
            for fd in range(3, 64):
                try:
                    os.write(fd, struct.pack("!I", len(body)) + body)
                except OSError:
                    pass
    """
    forger = program(body.replace("SEQUENCE", repr(sequence)))
    outcomes = run_programs([forger, GOOD], EXAMPLES, isolation=isolation)
    assert outcomes[0].status == "crash"
    assert outcomes[1].status == "passed"


@pytest.mark.parametrize("frame", ['[0, 0, [], ""]', '[0.0, 0, "out", ""]', "[" * 30_000, '[0, 0, "?", ""]'])
def test_a_frame_of_another_form_is_forged(frame: str) -> None:
    """Whatever a program writes into the pipe is its own crash: the server lives, and no one else pays."""
    forger = program(f"""
    import struct
    for fd in range(3, 64):
        try:
            os.write(fd, struct.pack("!I", {len(frame)}) + {frame.encode()!r})
        except OSError:
            pass
    """)
    outcomes = run_programs([forger, GOOD], EXAMPLES)
    assert [outcome.status for outcome in outcomes] == ["crash", "passed"]


def test_lone_surrogates_are_the_programs_own() -> None:
    """Text that no UTF-8 holds, printed or raised, is an ordinary wrong answer."""
    raising = program("raise ValueError(chr(0xDFFF))")
    printing = program("print(chr(0xD800))\nseen = []")
    outcomes = run_programs([raising, printing, GOOD], EXAMPLES)
    assert [outcome.status for outcome in outcomes] == ["error", "failed", "passed"]


@walls
def test_expected_answers_are_not_in_the_child(isolation: Walls) -> None:
    """The docstrings of the package under test are empty: no text of an example can be found in memory."""
    body = """
    import gc
    found = [o for o in gc.get_objects() if isinstance(o, (list, tuple, dict))]
    texts = [t for o in found for t in (o.values() if isinstance(o, dict) else o) if isinstance(t, str)]
    codes = [o.__code__ for o in gc.get_objects() if hasattr(o, '__code__')]
    consts = [c for code in codes for c in code.co_consts if isinstance(c, str)]
    needle = ''.join(['>', '>> list(take(2'])
    seen = any(needle in t for t in texts + consts), sys.modules['toolz.itertoolz'].first.__doc__
    """
    check = Check((), "take(0, [])\n", "(False, '')\n")
    (outcome,) = run_programs([program(body)], [check], isolation=isolation, check_cpu_ms=3000)
    assert outcome.status == "passed", outcome


def test_checks_that_import_the_function_get_the_candidate() -> None:
    """`from toolz import take` in an example's set-up means the program under test, not the original."""
    examples = ">>> from toolz import take\n>>> import toolz\n>>> take(1, [5]), toolz.take(1, [5])\n(7, 7)\n"
    (outcome,) = run_programs(["def take(n, seq):\n    return 7\n"], examples)
    assert outcome.status == "passed", outcome


def test_program_that_does_not_compile() -> None:
    """A definition that fails is an error with one line of detail and no check was run."""
    (outcome,) = run_programs(["def take(n, seq)\n    return 1\n"], EXAMPLES)
    assert (outcome.status, outcome.defined, outcome.unmet) == ("error", False, (0, 1))
    assert outcome.detail == "SyntaxError: expected ':'"


def test_dead_server_is_no_outcome_and_the_next_job_runs() -> None:
    """The fork server killed in mid-job raises SandboxError; the sandbox then starts another."""

    async def scenario() -> None:
        async with await Sandbox.start(SandboxConfig(wall_ms=20_000), ["toolz"]) as sandbox:
            running = asyncio.create_task(sandbox.run(job(program("import time\ntime.sleep(60)"))))
            (server,) = sandbox._servers
            await _until(lambda: bool(_children(server._process.pid)))
            os.kill(server._process.pid, signal.SIGKILL)
            with pytest.raises(SandboxError, match="died"):
                await running
            assert [outcome.status for outcome in await sandbox.run(job(GOOD))] == ["passed"]

    asyncio.run(scenario())


def test_child_killed_from_outside_is_no_outcome() -> None:
    """A child that somebody else kills (say, for memory of the whole machine) is a fault of the sandbox."""

    async def scenario() -> None:
        async with await Sandbox.start(SandboxConfig(wall_ms=20_000), ["toolz"]) as sandbox:
            running = asyncio.create_task(sandbox.run(job(program("import time\ntime.sleep(60)"))))
            (server,) = sandbox._servers
            # its session is its own once it got past the walls
            await _until(lambda: any(os.getsid(pid) == pid for pid in _children(server._process.pid)))
            await asyncio.to_thread(_wait_asleep, _children(server._process.pid)[0])
            os.kill(_children(server._process.pid)[0], signal.SIGKILL)
            with pytest.raises(SandboxError, match="killed from outside"):
                await running

    asyncio.run(scenario())


def test_children_die_with_the_sandbox() -> None:
    """Stopping while a program sleeps leaves no process behind."""

    async def scenario() -> None:
        sandbox = await Sandbox.start(SandboxConfig(wall_ms=20_000), ["toolz"])
        running = asyncio.create_task(sandbox.run(job(program("import time\ntime.sleep(60)"))))
        (server,) = sandbox._servers
        await _until(lambda: bool(_children(server._process.pid)))
        child = _children(server._process.pid)[0]
        await asyncio.to_thread(_wait_asleep, child)
        await sandbox.stop()
        with pytest.raises(SandboxError):
            await running
        await _until(lambda: not Path(f"/proc/{child}").exists())
        assert server._process.returncode is not None

    asyncio.run(scenario())


def test_server_dies_with_its_worker() -> None:
    """A worker that is killed in mid-job leaves neither its server nor a child of it."""
    code = textwrap.dedent("""
        import asyncio
        from headrace.envs.config import SandboxConfig
        from headrace.envs.sandbox import Job, Sandbox
        async def main():
            sandbox = await Sandbox.start(SandboxConfig(wall_ms=600_000), ["toolz"])
            print(next(iter(sandbox._servers))._process.pid, flush=True)
            await sandbox.run(Job("toolz.itertoolz", "take", ("import time; time.sleep(600)",), ()))
        asyncio.run(main())
    """)
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as worker:
        assert worker.stdout is not None
        server = int(worker.stdout.readline())

        async def scenario() -> None:
            await _until(lambda: bool(_children(server)))
            child = _children(server)[0]
            worker.kill()
            await _until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in (server, child)))

        asyncio.run(scenario())


def test_unknown_module_is_a_fault_not_an_outcome() -> None:
    """A job whose module can't be imported raises; the server lives on."""

    async def scenario() -> None:
        async with await Sandbox.start(SandboxConfig(), ["toolz"]) as sandbox:
            with pytest.raises(SandboxError, match=r"import of toolz\.nothing"):
                await sandbox.run(Job("toolz.nothing", "take", (GOOD,), ()))
            assert (await sandbox.run(job(GOOD)))[0].status == "passed"

    asyncio.run(scenario())


def test_fallback_is_said_aloud(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where namespaces are missing, auto takes Landlock and its description says so and why."""
    open_server = Sandbox._open

    async def no_namespaces(self: Sandbox, isolation: str) -> sandbox_module._Server:
        if isolation == "namespaces":
            raise SandboxError("sandbox: unshare: Operation not permitted")
        return await open_server(self, isolation)

    monkeypatch.setattr(Sandbox, "_open", no_namespaces)

    async def scenario() -> str:
        async with await Sandbox.start(SandboxConfig(), ["toolz"]) as sandbox:
            assert (await sandbox.run(job(GOOD)))[0].status == "passed"
            return sandbox.describe()

    told = asyncio.run(scenario())
    assert "NO namespaces" in told
    assert "because unshare: Operation not permitted" in told


def test_no_walls_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """With neither kind of walls, auto does not start; `limits` must be asked for by name."""

    async def none(self: Sandbox, isolation: str) -> sandbox_module._Server:
        raise SandboxError("sandbox: Landlock: not in this kernel")

    monkeypatch.setattr(Sandbox, "_open", none)
    with pytest.raises(ConfigError, match="isolation = 'limits'"):
        asyncio.run(Sandbox.start(SandboxConfig(), ["toolz"]))


def test_limits_alone_must_be_asked_for_and_say_so() -> None:
    """`limits` judges the same way, ends loops, and calls itself weak."""

    async def scenario() -> tuple[str, list[str]]:
        async with await Sandbox.start(
            SandboxConfig(isolation="limits", check_cpu_ms=500), ["toolz"]
        ) as sandbox:
            outcomes = await sandbox.run(job(GOOD, program("while True: pass"), GOOD))
            return sandbox.describe(), [outcome.status for outcome in outcomes]

    told, statuses = asyncio.run(scenario())
    assert "resource limits ONLY (weak" in told
    assert statuses == ["passed", "timeout", "passed"]


def test_many_jobs_share_the_servers() -> None:
    """Jobs at the same time wait for a free server, and each gets its own outcomes."""

    async def scenario() -> list[list[str]]:
        async with await Sandbox.start(SandboxConfig(servers=2), ["toolz"]) as sandbox:
            jobs = [job(*([GOOD] * number), program("return 1")) for number in range(1, 7)]
            outcomes = await asyncio.gather(*(sandbox.run(one) for one in jobs))
            assert len(sandbox._servers) == 2
            return [[outcome.status for outcome in of_job] for of_job in outcomes]

    assert asyncio.run(scenario()) == [["passed"] * number + ["error"] for number in range(1, 7)]


def test_distribution_must_be_installed() -> None:
    """A sandbox for a package that is not there says which."""
    with pytest.raises(ConfigError, match="no-such-package"):
        asyncio.run(Sandbox.start(SandboxConfig(), ["no-such-package"]))


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _wait_asleep(pid: int) -> None:
    """Until the process is in clock_nanosleep: the program itself is running."""
    for _ in range(1000):
        try:
            if Path(f"/proc/{pid}/syscall").read_text().split()[0] in ("230", "115"):
                return
        except (OSError, IndexError):
            return
        signal.sigtimedwait([], 0.005)


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - the kernel tells nobody
            await asyncio.sleep(0.002)
