"""One process of a run: its log, its pid file, its signals and its end.

A process stops when it is asked to (SIGTERM, Ctrl-C), when its work is done, or when its supervisor is gone.
It never waits longer than `stop_s` for itself. Not here: which processes there are (`processes`), who starts
them (`supervisor`).
"""

import asyncio
import ctypes
import importlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from headrace import log
from headrace.errors import HeadraceError

SUPERVISOR_VARIABLE = "HEADRACE_SUPERVISOR"
"""Pid of the supervisor that started this process, whose pipe is its standard input."""
STOP_S = 15.0
PR_SET_PDEATHSIG = 1

logger = logging.getLogger(__name__)


def run_process(
    name: str,
    run_dir: Path | None,
    body: Callable[[asyncio.Event], Awaitable[object]],
    *,
    module: str,
    level: str = "info",
    stop_s: float = STOP_S,
) -> int:
    """Runs `body(stop)` till it ends or `stop` is set; the exit code.

    `module`, what the body needs, is imported first: seconds in which a signal simply ends the process.

    The one place of a process where errors end: an error that Headrace names is one line of the log, any
    other is a bug and leaves its traceback there.
    """
    log.configure(name, level=level)
    end_with_supervisor(stop_s)
    with pid_file(name, run_dir):
        log.event(logger, "start", pid=os.getpid(), run_dir=run_dir or "-")
        try:
            importlib.import_module(module)
            asyncio.run(_stoppable(body, stop_s))
        except HeadraceError as error:
            log.event(logger, "failed", level=logging.ERROR, error=type(error).__name__, reason=str(error))
            return error.exit_code
        except Exception:
            logger.exception("failed")
            return 1
        except KeyboardInterrupt:
            return 130
        log.event(logger, "end")
        return 0


async def _stoppable(body: Callable[[asyncio.Event], Awaitable[object]], stop_s: float) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _ask_to_stop, stop, stop_s)
    task = asyncio.ensure_future(body(stop))
    asked = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({task, asked}, return_when=asyncio.FIRST_COMPLETED)
        done, _ = await asyncio.wait({task}, timeout=stop_s)
        if not done:
            log.event(logger, "stop took too long", level=logging.WARNING, after_s=stop_s)
            task.cancel()
            await asyncio.wait({task}, timeout=1.0)
        if task.done() and not task.cancelled():
            task.result()
    finally:
        asked.cancel()


def _ask_to_stop(stop: asyncio.Event, stop_s: float) -> None:
    if not stop.is_set():
        log.event(logger, "stopping")
        stop.set()
        _exit_after(stop_s + 3.0)


def _exit_after(seconds: float) -> None:
    """Ends this process for certain, even when its event loop or a thread of it hangs."""
    timer = threading.Timer(seconds, os._exit, args=(1,))
    timer.daemon = True
    timer.start()


def end_with_supervisor(stop_s: float = STOP_S) -> None:
    """Ties this process to the supervisor that started it, if one did: when that is gone, killed or not, this
    one ends too.

    On Linux the kernel kills it at once, which the log makes safe; elsewhere the closed pipe on standard
    input stops it like SIGTERM.
    """
    supervisor = os.environ.pop(SUPERVISOR_VARIABLE, "")
    if not supervisor:
        return
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(supervisor):
        os._exit(1)  # it died before the tie was made

    def watch() -> None:
        while os.read(0, 4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)
        _exit_after(stop_s + 3.0)

    threading.Thread(target=watch, name="supervisor-watch", daemon=True).start()


@contextmanager
def pid_file(name: str, run_dir: Path | None) -> Iterator[None]:
    """`DIR/<name>.pid` while this process lives; a process that was killed leaves its file behind."""
    if run_dir is None:
        yield
        return
    path = run_dir / f"{name}.pid"
    path.write_text(f"{os.getpid()}\n")
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def living(run_dir: Path) -> dict[str, int]:
    """Name to pid of the run's processes that are alive on this machine."""
    found: dict[str, int] = {}
    for path in sorted(run_dir.glob("*.pid")):
        try:
            pid = int(path.read_text())
            os.kill(pid, 0)
        except (ValueError, OSError):
            continue
        found[path.stem] = pid
    return found
