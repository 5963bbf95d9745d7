"""What `headrace demo` shows while it runs: one live screen on a terminal, plain lines into a pipe.

It draws a `RunView` and a few words about the phase; it reads nothing itself.
"""

import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from headrace.cli import status
from headrace.cli.run_view import IDLE, LAG, REWARD, TOKENS, RunView

BARS = "▁▂▃▄▅▆▇█"
PLAIN_EVERY_S = 5.0
NARROW_COLUMNS = 60


class Screen(Protocol):
    """Where a demo shows itself; entered once."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
    def say(self, text: str) -> None:
        """A sentence that stays, above the live part."""
        ...

    def phase(self, text: str) -> None:
        """What is going on now."""
        ...

    def show(self, view: RunView, processes: Sequence[str], note: str = "") -> None: ...


def screen(plain: bool) -> Screen:
    """The live screen, or plain lines when asked for or when standard output is no terminal."""
    console = Console()
    return (
        PlainScreen() if plain or not console.is_terminal or console.is_dumb_terminal else LiveScreen(console)
    )


class PlainScreen:
    """A line for each phase, and one with the numbers every few seconds."""

    def __init__(self, every_s: float = PLAIN_EVERY_S) -> None:
        self._every_s = every_s
        self._next_s = 0.0
        self._phase = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        sys.stdout.flush()

    def say(self, text: str) -> None:
        print(text, flush=True)

    def phase(self, text: str) -> None:
        if text != self._phase:
            self._phase = text
            print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)

    def show(self, view: RunView, processes: Sequence[str], note: str = "") -> None:
        if time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + self._every_s
            print(plain_line(view, note), flush=True)


class LiveScreen:
    """One panel, redrawn in place."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._phase = ""
        # Drawn only by `show`: no thread of its own that a signal could hit in the middle.
        self._live = Live(console=console, auto_refresh=False, transient=True)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False)

    def phase(self, text: str) -> None:
        self._phase = text

    def show(self, view: RunView, processes: Sequence[str], note: str = "") -> None:
        self._live.update(panel(view, self._phase, processes, note, self._console.width), refresh=True)


def panel(view: RunView, phase: str, processes: Sequence[str], note: str, width: int) -> Panel:
    """The whole screen; under `NARROW_COLUMNS` names and values stand on lines of their own."""
    rows = status.lines(view, int(time.time() * 1000))
    narrow = width < NARROW_COLUMNS
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=not narrow)
    grid.add_column(overflow="fold")
    for name, text in rows:
        grid.add_row(name, Text(text))
    columns = max(8, min(40, width - 30))
    for name, values in curves(view):
        if len(values) > 1:
            grid.add_row(name, Text(f"{sparkline(values, columns)} {values[0]:.2f} -> {values[-1]:.2f}"))
    parts: list[RenderableType] = [Text(phase, style="bold"), grid]
    if processes:
        parts.append(Text(" ".join(processes), style="dim"))
    if note:
        parts.append(Text(note, style="yellow"))
    return Panel(Group(*parts), title=f"headrace · {view.run}", border_style="blue", padding=(0, 1))


def curves(view: RunView) -> list[tuple[str, list[float]]]:
    """The two curves of the screen, with their names."""
    rewards = [point.metrics[REWARD] for point in view.steps if REWARD in point.metrics]
    held_out = [rate for _, rate, _ in view.held_out("sampled", ("before", "watch"))]
    return [("reward by step", rewards), ("held-out by version", held_out)]


def sparkline(values: Sequence[float], columns: int) -> str:
    """`values` as bars between their least and most; averaged into at most `columns` of them."""
    count = min(columns, len(values))
    edges = [index * len(values) // count for index in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    span = (high - low) or 1.0
    return "".join(BARS[round((value - low) / span * (len(BARS) - 1))] for value in means)


def plain_line(view: RunView, note: str = "") -> str:
    """The numbers on one line of key=value, for a log or a pipe."""
    fields = {
        "step": str(view.step),
        "reward": status.number(view.recent(REWARD)),
        "held_out": status.held_out_text(view).partition(" (")[0].replace(" ", ""),
        "lag": status.number(view.recent(LAG), 2),
        "tokens_s": status.number(view.per_second(TOKENS), 0).replace(",", ""),
        "in_flight": str(view.in_flight),
        "trained": str(view.trained),
        "dropped": ",".join(f"{reason}:{count}" for reason, count in view.drops.most_common()) or "0",
        "idle": status.percent(view.recent(IDLE)).replace(" ", ""),
        "serving": ",".join(f"{name}@v{ack.version}" for name, ack in sorted(view.replicas.items())) or "-",
    }
    return " ".join(f"{name}={text}" for name, text in fields.items()) + (f" note={note!r}" if note else "")
