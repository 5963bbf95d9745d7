"""Runs model-written programs behind walls, from the worker's side.

A pool of warm fork servers (`forkserver`), one job at a time each. An outcome is about the program; whatever
goes wrong with the sandbox itself is a SandboxError, which may be retried and is never a reward. It knows
neither tasks nor rewards. Which walls stand, and against what: docs/sandbox.md.
"""

import asyncio
import base64
import importlib.metadata
import os
import signal
import socket
import struct
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

import headrace
from headrace.envs import syscalls
from headrace.envs.checks import Check, Outcome, outcomes
from headrace.envs.config import SandboxConfig
from headrace.errors import ConfigError, SandboxError

REPLY_BYTES_MAX = 64 << 20
_BOOT = "import sys; sys.path.insert(0, sys.argv.pop()); from headrace.envs.forkserver import main; main()"
_START_S_MAX = 20.0
_STOP_S_MAX = 30.0


class Job(msgspec.Struct, frozen=True):
    """Candidate definitions of `function`, a module-level name of `module`, each to be run on `checks`."""

    module: str
    function: str
    candidates: tuple[str, ...]
    checks: tuple[Check, ...]


class Sandbox:
    """`async with await Sandbox.start(config) as sandbox: outcomes = await sandbox.run(job)`."""

    def __init__(self, config: SandboxConfig, distributions: Sequence[str]) -> None:
        """Use `start`. `distributions` are those whose modules a job may name."""
        self._config = config
        self._packages = sorted({_site_of(name) for name in distributions})
        self._idle: asyncio.Queue[_Server | None] = asyncio.Queue()
        self._servers: set[_Server] = set()
        self._isolation = config.isolation
        self._why_fallback = ""

    @classmethod
    async def start(cls, config: SandboxConfig, distributions: Sequence[str]) -> "Sandbox":
        """A sandbox with its servers warm. Raises ConfigError where no strict isolation is possible and the
        configuration asks for one, SandboxError when a server does not come up."""
        sandbox = cls(config, distributions)
        await sandbox._open_first()
        for _ in range(config.servers - 1):
            sandbox._idle.put_nowait(None)  # opened when first needed
        return sandbox

    async def __aenter__(self) -> "Sandbox":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    def describe(self) -> str:
        """One line for people: which walls stand, and why not better ones."""
        walls = {
            "namespaces": "namespaces (mount, pid, net, ipc) + seccomp + limits",
            "landlock": "Landlock + seccomp + limits, NO namespaces (weaker: nothing of its own to write to)",
            "limits": "resource limits ONLY (weak: programs can read files and use the network)",
            "auto": "not started",
        }[self._isolation]
        reason = f" because {self._why_fallback}" if self._why_fallback else ""
        return f"sandbox: {walls}{reason}; {self._config.servers} fork server(s)"

    async def run(self, job: Job) -> list[Outcome]:
        """The outcome of each candidate, in order. Raises SandboxError (retriable) when the sandbox failed:
        then there is no outcome for any."""
        if not 0 < len(job.candidates) <= self._config.candidates_max:
            raise SandboxError(
                f"sandbox: expected 1..{self._config.candidates_max} candidates, got {len(job.candidates)}"
            )
        server = await self._idle.get()
        try:
            if server is None or not server.alive:
                server = await self._open(self._isolation)
            reply = await server.ask(_request(job), self._deadline_s(len(job.candidates)))
        except BaseException:
            if server is not None:
                await self._close(server)
            server = None
            raise
        finally:
            self._idle.put_nowait(server)
        return outcomes(job.checks, len(job.candidates), _frames(reply))

    async def stop(self) -> None:
        """Ends every server and its children. Calling it twice is safe."""
        for server in list(self._servers):
            await self._close(server)

    async def _open_first(self) -> None:
        wanted = self._config.isolation
        for isolation in ("namespaces", "landlock") if wanted == "auto" else (wanted,):
            try:
                self._idle.put_nowait(await self._open(isolation))
                self._isolation = isolation
                return
            except SandboxError as error:
                self._why_fallback = str(error).removeprefix("sandbox: ")
                if wanted != "auto":
                    raise
        raise ConfigError(
            f"sandbox: no strict isolation on this machine ({self._why_fallback}); "
            "envs.sandbox.isolation = 'limits' runs model-written code all the same, which is weak"
        )

    async def _open(self, isolation: str) -> "_Server":
        server = await _Server.open(self._config, isolation, self._packages)
        self._servers.add(server)
        return server

    async def _close(self, server: "_Server") -> None:
        self._servers.discard(server)
        await server.close()

    def _deadline_s(self, candidates: int) -> float:
        # each candidate may use up the server's patience once (forkserver._WALLS_MAX); then a child starts
        return 10.0 + candidates * 6 * self._config.wall_ms / 1000


class _Server:
    """One fork server process and the socket to it."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter

    @classmethod
    async def open(cls, config: SandboxConfig, isolation: str, packages: list[str]) -> "_Server":
        ours, theirs = socket.socketpair()
        with theirs:
            arguments = [str(theirs.fileno()), _server_config(config, isolation, packages)]
            home = str(Path(headrace.__file__).parent.parent)
            process = subprocess.Popen(  # noqa: ASYNC220 - a fork, not a wait
                [sys.executable, "-s", "-S", "-P", "-B", "-c", _BOOT, *arguments, home],
                env={"PYTHONHASHSEED": str(config.hash_seed)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                cwd="/",
            )
        server = cls(process)
        server._reader, server._writer = await asyncio.open_unix_connection(sock=ours)
        try:
            await server._answer(_START_S_MAX)
        except BaseException:
            await server.close()
            raise
        return server

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    async def ask(self, request: bytes, deadline_s: float) -> dict[str, Any]:
        try:
            self._writer.write(struct.pack("!I", len(request)) + request)
            async with asyncio.timeout(deadline_s):
                await self._writer.drain()
        except (OSError, TimeoutError) as error:
            raise SandboxError(f"sandbox: the fork server does not listen: {error}") from error
        return await self._answer(deadline_s)

    async def _answer(self, deadline_s: float) -> dict[str, Any]:
        try:
            async with asyncio.timeout(deadline_s):
                (size,) = struct.unpack("!I", await self._reader.readexactly(4))
                if size > REPLY_BYTES_MAX:
                    raise SandboxError(
                        f"sandbox: expected a reply of {REPLY_BYTES_MAX} bytes at most, got {size}"
                    )
                reply = msgspec.json.decode(await self._reader.readexactly(size), type=dict[str, Any])
        except TimeoutError as error:
            raise SandboxError(f"sandbox: the fork server gave no answer in {deadline_s:.0f} s") from error
        except (asyncio.IncompleteReadError, OSError, msgspec.DecodeError) as error:
            raise SandboxError(f"sandbox: the fork server died: {error}") from error
        if "fault" in reply:
            raise SandboxError(f"sandbox: {reply['fault']}")
        return reply

    async def close(self) -> None:
        self._writer.close()
        for kill in (None, signal.SIGKILL):
            if kill is not None and self._process.poll() is None:
                self._process.send_signal(kill)  # its children die with it
            if await _ended(self._process, _STOP_S_MAX if kill else 0.2):
                break


async def _ended(process: subprocess.Popen[bytes], within_s: float) -> bool:
    try:
        await asyncio.to_thread(process.wait, within_s)
    except subprocess.TimeoutExpired:
        return False
    return True


def _server_config(config: SandboxConfig, isolation: str, packages: list[str]) -> str:
    try:
        seccomp = syscalls.allowed_filter() if isolation != "limits" else b""
    except OSError as error:
        raise SandboxError(f"sandbox: {error}") from error
    standard = {sysconfig.get_path("stdlib"), str(sysconfig.get_config_var("DESTSHARED"))}
    settings = msgspec.to_builtins(config) | {
        "isolation": isolation,
        "packages": packages,
        "standard": sorted(path for path in standard if os.path.isdir(path)),
        "seccomp": base64.b64encode(seccomp).decode(),
    }
    return msgspec.json.encode(settings).decode()


def _request(job: Job) -> bytes:
    """What the server may know of a job: everything but the expected results."""
    checks = [{"setup": check.setup, "source": check.source} for check in job.checks]
    return msgspec.json.encode(
        {"module": job.module, "function": job.function, "candidates": job.candidates, "checks": checks}
    )


def _frames(reply: dict[str, Any]) -> list[list[Any]]:
    frames = reply.get("frames")
    if not isinstance(frames, list):
        raise SandboxError("sandbox: expected frames from the fork server")
    return frames


def _site_of(distribution: str) -> str:
    try:
        return os.path.realpath(str(importlib.metadata.distribution(distribution).locate_file("")))
    except importlib.metadata.PackageNotFoundError as error:
        raise ConfigError(f"sandbox: expected the distribution {distribution!r} to be installed") from error
