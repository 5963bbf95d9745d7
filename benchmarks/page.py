"""What every benchmark page carries: the machine, the date, the command, the table.

`python -m benchmarks.<what>` prints its page; `benchmarks/<what>.md` holds that output and what is to be said
of it.
"""

import os
import platform
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path


def machine(*distributions: str) -> str:
    """One line: processor, cores, system, Python and the versions of the named distributions."""
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in distributions)
    cores = len(os.sched_getaffinity(0))
    line = f"{_processor()}, {cores} cores, {platform.system()} {platform.release().split('-')[0]}"
    return f"{line}, Python {platform.python_version()}" + (f", {versions}" if versions else "")


def header(title: str, *distributions: str) -> str:
    """The head of a page, as Markdown."""
    command = "python -m " + (sys.modules["__main__"].__spec__ or _NO_SPEC).name
    arguments = " ".join(sys.argv[1:])
    return (
        f"# {title}\n\n"
        f"- Machine: {machine(*distributions)}\n"
        f"- Date: {datetime.now(UTC):%Y-%m-%d}\n"
        f"- Command: `{command}{' ' + arguments if arguments else ''}`\n"
    )


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table with aligned columns; numbers to the right."""
    cells = [[_text(cell) for cell in row] for row in rows]
    widths = [max(len(columns[i]), *(len(row[i]) for row in cells)) for i in range(len(columns))]
    numeric = [all(isinstance(row[i], int | float) for row in rows) for i in range(len(columns))]

    def line(row: Sequence[str]) -> str:
        padded = (
            text.rjust(width) if right else text.ljust(width)
            for text, width, right in zip(row, widths, numeric, strict=True)
        )
        return "| " + " | ".join(padded) + " |"

    rule = ["-" * (w - 1) + ":" if right else "-" * w for w, right in zip(widths, numeric, strict=True)]
    return "\n".join([line(columns), line(rule), *(line(row) for row in cells)]) + "\n"


class _NoSpec:
    name = "benchmarks"


_NO_SPEC = _NoSpec()


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _text(cell: object) -> str:
    if isinstance(cell, float):
        return f"{cell:,.3f}" if abs(cell) < 10 else f"{cell:,.1f}" if abs(cell) < 1000 else f"{cell:,.0f}"
    return f"{cell:,}" if isinstance(cell, int) else str(cell)
