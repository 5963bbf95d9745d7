"""Logging as key=value events: one line a decision, never one a record.

    2026-11-30T00:56:41.123Z INFO trainer step step=3 loss=0.012

Here: how a line looks and where it goes. Not here: what is worth a line (the processes decide).
"""

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_bound: ContextVar[tuple[tuple[str, object], ...]] = ContextVar("headrace_log_bound", default=())

LEVELS = ("debug", "info", "warning", "error")
QUIET_S = 5.0
KINDS_MAX = 256


def event(logger: logging.Logger, name: str, *, level: int = logging.INFO, **fields: object) -> None:
    """One line `name key=value ...`, the fields of the surrounding `bound` first."""
    if logger.isEnabledFor(level):
        logger.log(level, "%s", line(name, **dict(_bound.get()), **fields))


def line(name: str, **fields: object) -> str:
    """`name key=value ...`; a value with spaces, quotes or line breaks is quoted, so that a line stays one
    line."""
    return " ".join([name, *(f"{key}={_shown(value)}" for key, value in fields.items())])


@contextmanager
def bound(**fields: object) -> Iterator[None]:
    """Every `event` inside carries `fields` (topic, partition, weights version ...)."""
    token = _bound.set((*((k, v) for k, v in _bound.get() if k not in fields), *fields.items()))
    try:
        yield
    finally:
        _bound.reset(token)


def configure(process: str, *, level: str = "info") -> None:
    """Sends every logger's lines to standard error, under the name of this process. Safe to call twice."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter(process))
    handler.addFilter(OnceInAWhile("aiokafka"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for noisy in ("aiokafka", "asyncio", "grpc", "matplotlib"):
        logging.getLogger(noisy).setLevel(max(logging.WARNING, root.level))


class OnceInAWhile(logging.Filter):
    """Lets one line of a kind pass in `QUIET_S` from the loggers below `name`, and all of other loggers. A
    client whose broker is away says so a hundred times a second, and would bury what the process decides."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._until_s: dict[tuple[str, str], float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if not super().filter(record):
            return True
        kind = (record.name, str(record.msg)[:40])
        if record.created < self._until_s.get(kind, 0.0):
            return False
        if len(self._until_s) >= KINDS_MAX:
            self._until_s.clear()
        self._until_s[kind] = record.created + QUIET_S
        return True


class _Formatter(logging.Formatter):
    def __init__(self, process: str) -> None:
        super().__init__(f"%(asctime)s.%(msecs)03dZ %(levelname)s {process} %(message)s", "%Y-%m-%dT%H:%M:%S")

    converter = staticmethod(time.gmtime)


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)
    return (
        repr(text)
        if not text or any(c.isspace() or c in "\"'=" or not c.isprintable() for c in text)
        else text
    )
