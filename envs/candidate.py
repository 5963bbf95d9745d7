"""Inside the child: runs each candidate program against each check and reports what it printed or raised.

It judges nothing: the expected text never enters this process (`checks.verdicts` compares, in the worker).
Runs after every wall of `isolation` stands. Standard library only.
"""

import __future__

import io
import json
import os
import signal
import struct
import sys
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType
from typing import Any

FRAME_BYTES_MAX = 1 << 16
Report = Callable[[int, int, str, str], None]


class TimeUp(BaseException):
    """The processor time of one check is used up."""


class Flood(BaseException):
    """A check printed more than it may."""


def reporter(pipe: int) -> Report:
    """Writes `[candidate, check, kind, text]` frames: four bytes of length, then JSON."""

    def report(candidate: int, check: int, kind: str, text: str) -> None:
        body = json.dumps([candidate, check, kind, text]).encode()
        frame = memoryview(struct.pack("!I", len(body)) + body)
        while frame:
            frame = frame[os.write(pipe, frame) :]

    return report


def run(job: dict[str, Any], first: int, report: Report, check_cpu_ms: int, output_bytes: int) -> None:
    """Every candidate from `first` on: a frame for its definition (check -1), then one for each check.

    Kinds: `loaded`; `out` (text printed), `exc` (exception line), `setup` (exception before the check
    itself); and, last for the candidate, `load` (exception line of the definition), `time`, `memory`,
    `flood`.
    """
    timer = _Timer(check_cpu_ms)
    module = sys.modules[job["module"]]
    pristine = vars(module)[job["function"]]
    future = vars(module).get("annotations") is __future__.annotations
    flags = __future__.annotations.compiler_flag if future else 0
    homes = list(_homes(pristine, job["module"].partition(".")[0]))
    for number in range(first, len(job["candidates"])):
        space = dict(vars(module))
        output = _Output(output_bytes)
        source = job["candidates"][number]
        kind, text = timer.guard(partial(_execute, [source], space, "exec", flags), output, "load")
        report(number, -1, "loaded" if kind == "out" else kind, text)
        if kind != "out":
            continue
        for home, name in homes:
            home[name] = space[job["function"]]
        for index, check in enumerate(job["checks"]):
            kind, text = _check(check, dict(space), timer, output_bytes)
            report(number, index, kind, text)
            if kind in ("time", "memory", "flood"):
                break


def _check(
    check: dict[str, Any], space: dict[str, Any], timer: "_Timer", output_bytes: int
) -> tuple[str, str]:
    output = _Output(output_bytes)
    kind, text = timer.guard(partial(_execute, check["setup"], space, "single"), output, "setup")
    if kind != "out":
        return kind, text
    output = _Output(output_bytes)
    return timer.guard(partial(_execute, [check["source"]], space, "single"), output, "exc")


def _execute(sources: list[str], space: dict[str, Any], mode: str, flags: int = 0) -> None:
    for source in sources:
        exec(compile(source, "<candidate>", mode, flags, dont_inherit=True), space)


def _homes(pristine: object, package: str) -> Iterator[tuple[dict[str, Any], str]]:
    """Wherever the package holds the function, so that a check that imports it gets the candidate."""
    for path, module in list(sys.modules.items()):
        space = vars(module) if path.partition(".")[0] == package else {}
        yield from [(space, name) for name, value in list(space.items()) if value is pristine]


class _Output(io.StringIO):
    def __init__(self, bytes_max: int) -> None:
        super().__init__()
        self._left = bytes_max

    def write(self, text: str) -> int:
        self._left -= len(text.encode("utf-8", "surrogatepass"))
        if self._left < 0:
            raise Flood
        return super().write(text)


class _Timer:
    """Raises TimeUp in code that used `cpu_ms` of processor time. A hang without work, or one that swallows
    TimeUp, is left to the fork server's wall clock."""

    def __init__(self, cpu_ms: int) -> None:
        self._seconds = cpu_ms / 1000
        self._armed = False
        signal.signal(signal.SIGPROF, self._ring)

    def guard(self, act: Callable[[], None], output: _Output, raised: str) -> tuple[str, str]:
        """(`out`, what was printed), or (`raised`, exception line), or which limit was met."""
        sys.stdout, sys.displayhook = output, _display
        try:
            try:
                self._armed = True
                signal.setitimer(signal.ITIMER_PROF, self._seconds, self._seconds)
                act()
            finally:
                self._armed = False
                signal.setitimer(signal.ITIMER_PROF, 0)
            return "out", output.getvalue()
        except TimeUp:
            return "time", ""
        except Flood:
            return "flood", ""
        except MemoryError:
            return "memory", ""
        except BaseException as error:  # whatever a candidate raises is its result
            return raised, _exception_line(error)

    def _ring(self, number: int, frame: FrameType | None) -> None:
        if self._armed:
            raise TimeUp


def _display(value: object) -> None:
    if value is not None:
        sys.stdout.write(f"{value!r}\n")


def _exception_line(error: BaseException) -> str:
    """As doctest sees it: `ValueError: no such thing`. Survives exceptions whose own text raises."""
    try:
        return traceback.format_exception_only(type(error), error)[-1][-2000:]
    except BaseException:
        return f"{type(error).__name__}\n"
