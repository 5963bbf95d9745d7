"""The warm process that forks a walled-off child for every batch of candidate programs.

Started by `sandbox.Sandbox` with an empty environment; talks length-prefixed JSON over one socket; holds no
secrets. It walls itself off, imports each package under test once (without docstrings: those hold the
expected answers), then for each job clones a child, relays the child's frames in the one order that is
possible, and kills whatever hangs. It judges nothing. Standard library only.
"""

import base64
import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import struct
import sys
import time
from importlib.machinery import EXTENSION_SUFFIXES, ExtensionFileLoader, FileFinder
from pathlib import Path
from typing import Any, NoReturn

from headrace.envs import candidate, isolation
from headrace.envs.blind import BlindLoader

REQUEST_BYTES_MAX = 8 << 20
_LAST = {"load", "time", "memory", "flood"}  # kinds after which a candidate has no more frames
_KINDS = {"ready", "loaded", "out", "exc", "setup", *_LAST}
_LOOK_S = 0.05  # how often a silent child is looked at
_PASSED_S_MAX = 4 * _LOOK_S  # the machine stood still where more passed between two looks
_WALLS_MAX = 5  # a child that moves, but slowly, has this many times as long as one that doesn't
_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64")


class Fault(Exception):
    """The sandbox itself failed, not the program in it."""


def main() -> None:
    """Arguments: a socket's file descriptor and the configuration as JSON. Ends when the socket closes."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    config = json.loads(sys.argv[2])
    try:
        _prepare(config)
        _send(channel, {"ready": os.getpid()})
    except OSError as error:
        _send(channel, {"fault": str(error)})
        return
    while (request := _receive(channel)) is not None:
        try:
            _send(channel, {"frames": _run(request, config, channel)})
        except Fault as fault:
            _send(channel, {"fault": str(fault)})


def _prepare(config: dict[str, Any]) -> None:
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the worker's to handle
    own = str(Path(sys.modules["headrace"].__file__ or "").parent.parent)
    sys.path[:] = [path for path in sys.path if path != own] + config["packages"]
    sys.dont_write_bytecode = True
    finder = FileFinder.path_hook((ExtensionFileLoader, EXTENSION_SUFFIXES), (BlindLoader, [".py"]))
    for path in config["packages"]:
        sys.path_importer_cache[path] = finder(path)
    sys.path_hooks.insert(0, lambda path: _blind_hook(path, config["packages"], finder))
    if config["isolation"] == "namespaces":
        libraries = [path for path in _LIBRARIES if os.path.exists(path)]
        isolation.enter_namespaces([*config["standard"], *libraries, *config["packages"]])
    elif config["isolation"] == "landlock" and isolation.landlock_abi() == 0:
        raise OSError("Landlock: not in this kernel")


def _blind_hook(path: str, packages: list[str], finder: Any) -> Any:
    """Folders of packages, at any depth, are read through BlindLoader."""
    if any(path == package or path.startswith(package + "/") for package in packages):
        return finder(path)
    raise ImportError(path)


def _run(job: dict[str, Any], config: dict[str, Any], channel: socket.socket) -> list[list[Any]]:
    if job["module"] not in sys.modules:
        try:
            importlib.import_module(job["module"])
        except Exception as error:
            raise Fault(f"import of {job['module']}: {type(error).__name__}: {error}") from error
        gc.collect()
        gc.freeze()  # children then share these pages for longer
    frames: list[list[Any]] = []
    first = 0
    while first < len(job["candidates"]):
        readable, writable = os.pipe()
        pid = isolation.clone_child(config["isolation"] == "namespaces")
        if pid == 0:
            _child(job, first, writable, config)
        os.close(writable)
        try:
            first = _Supervision(job, first, frames, config).follow(readable, pid, channel)
        finally:
            os.close(readable)
    return frames


def _child(job: dict[str, Any], first: int, pipe: int, config: dict[str, Any]) -> NoReturn:
    report = candidate.reporter(pipe)
    try:
        os.setsid()
        isolation_kind = config["isolation"]
        for standard in (1, 2):
            os.dup2(0, standard)  # /dev/null, opened by the worker
        os.closerange(3, pipe)
        os.closerange(pipe + 1, 256)
        if isolation_kind == "namespaces":
            isolation.furnish_child(config["packages"], config["tmp_bytes"])
        else:
            os.chdir("/")
        isolation.limit(config["memory_bytes"], config["tmp_bytes"], 32, config["cpu_s"])
        if sys.platform == "linux":
            isolation.drop_privileges(own_id=isolation_kind == "namespaces")
            isolation.die_with_parent()
        if isolation_kind == "landlock":
            isolation.landlock(path for path in (*config["standard"], *_LIBRARIES) if os.path.exists(path))
        if isolation_kind != "limits":
            isolation.load_seccomp(base64.b64decode(config["seccomp"]))
        report(first, -2, "ready", "")
    except BaseException as error:
        report(first, -2, "fault", f"{type(error).__name__}: {error}")
        os._exit(1)
    try:
        candidate.run(job, first, report, config["check_cpu_ms"], config["output_bytes"])
    finally:
        os._exit(0)


class _Supervision:
    """Reads one child's frames until it is through, dead, silent for too long, or out of order."""

    def __init__(
        self, job: dict[str, Any], first: int, frames: list[list[Any]], config: dict[str, Any]
    ) -> None:
        self._ends = len(job["checks"]) - 1, len(job["candidates"])
        self._first = first
        self._next = (first, -2)
        self._frames = frames
        self._config = config
        self._buffer = b""

    def follow(self, pipe: int, pid: int, channel: socket.socket) -> int:
        """The candidate to go on with in a new child; the number of candidates when all are through. Ends the
        server when the worker hangs up."""
        end = ""
        patience = _Patience(pid, self._config)
        while not end and self._next[0] < self._ends[1]:
            ready = select.select([pipe, channel.fileno()], [], [], _LOOK_S)[0]
            if channel.fileno() in ready:  # during a job a worker says nothing: it is gone
                _bury(pid, patience_s=0)
                raise SystemExit
            if not ready:
                end = patience.end()
            elif not (chunk := os.read(pipe, 1 << 16)):
                end = "crash"
            else:
                self._buffer += chunk
                progressed = len(self._frames)
                end = self._take_frames()
                if len(self._frames) != progressed:
                    patience = _Patience(pid, self._config)
        killed = _bury(pid, patience_s=0.5 if end == "crash" else 0.0)
        number, check = self._next
        if number == self._ends[1]:
            return number
        if check == -2:
            raise Fault(f"child: ended before its first candidate ({end})")
        if end == "crash" and killed == signal.SIGKILL:
            raise Fault("child: killed from outside")
        if check == -1 and number > self._first:  # not begun: what came between is its predecessor's doing
            if end == "forged":
                self._frames[:] = [frame for frame in self._frames if frame[0] != number - 1]
                self._frames.append([number - 1, -1, end, ""])
            return number
        self._frames.append([number, check, end, ""])
        return number + 1

    def _take_frames(self) -> str:
        while len(self._buffer) >= 4:
            (size,) = struct.unpack_from("!I", self._buffer)
            if size > candidate.FRAME_BYTES_MAX:
                return "forged"
            if len(self._buffer) < 4 + size:
                break
            try:
                number, check, kind, text = json.loads(self._buffer[4 : 4 + size])
            except (ValueError, TypeError, RecursionError):
                return "forged"
            if check == -2 and kind == "fault" and self._next[1] == -2:
                raise Fault(f"child: {text}")
            types = [type(part) for part in (number, check, kind, text)]  # 0.0 and False would equal 0
            if types != [int, int, str, str] or (number, check) != self._next or kind not in _KINDS:
                return "forged"  # a frame out of order was not written by us
            self._buffer = self._buffer[4 + size :]
            # a lone surrogate can't be sent: what a program prints must not look like a fault of ours
            self._advance(number, check, kind, text.encode(errors="replace").decode())
        return ""

    def _advance(self, number: int, check: int, kind: str, text: str) -> None:
        if check > -2:
            self._frames.append([number, check, kind, text])
        through = check == self._ends[0] or kind in _LAST
        self._next = (number + 1, -1) if through and check > -2 else (number, check + 1)


class _Patience:
    """How long a silent child may go on, by its processor time, so that a busy machine fails nobody.

    Time in which this process did not look, because the machine stood still, is not held against the child.
    """

    def __init__(self, pid: int, config: dict[str, Any]) -> None:
        self._pid = pid
        self._wall_s = config["wall_ms"] / 1000
        self._cpu_s = 2 * config["check_cpu_ms"] / 1000  # by then the child's own timer should have rung
        self._looked_s = time.monotonic()
        self._silent_s = self._still_s = 0.0
        self._first = self._used = _cpu_s(pid)

    def end(self) -> str:
        """`time` if its processor time is used up, `hang` if it does nothing or takes for ever, else ``."""
        now_s, used = time.monotonic(), _cpu_s(self._pid)
        passed_s = min(now_s - self._looked_s, _PASSED_S_MAX)
        self._looked_s = now_s
        self._silent_s += passed_s
        self._still_s += passed_s
        if used - self._used > 0.001:
            self._still_s, self._used = 0.0, used
        if used - self._first > self._cpu_s:
            return "time"
        forever = self._silent_s > _WALLS_MAX * self._wall_s
        return "hang" if forever or self._still_s > self._wall_s else ""


def _cpu_s(pid: int) -> float:
    """Processor time of a process so far; 0 where the system doesn't tell."""
    try:
        return time.clock_gettime((~pid << 3) | 2)  # its CPUCLOCK_SCHED, as clock_getcpuclockid(3) makes it
    except OSError:
        return 0.0


def _bury(pid: int, patience_s: float) -> int:
    """Kills and reaps the child's whole group; the signal that it died of within `patience_s`, else 0."""
    deadline = time.monotonic() + patience_s
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        if time.monotonic() >= deadline:
            break
        time.sleep(0.001)
    for kill in (os.killpg, os.kill):  # a child that has not reached setsid has no group of its own yet
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return 0


def _send(channel: socket.socket, message: dict[str, Any]) -> None:
    body = json.dumps(message).encode()
    channel.sendall(struct.pack("!I", len(body)) + body)


def _receive(channel: socket.socket) -> dict[str, Any] | None:
    head = _exactly(channel, 4)
    size = struct.unpack("!I", head)[0] if head else 0
    body = _exactly(channel, size) if 0 < size <= REQUEST_BYTES_MAX else b""
    message: dict[str, Any] | None = json.loads(body) if body else None
    return message


def _exactly(channel: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = channel.recv(size - len(parts))
        if not part:
            return b""
        parts += part
    return bytes(parts)
