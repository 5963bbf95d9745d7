"""A table as the looking commands print it: one line a row where it can be, whole numbers, nothing obeyed.

Cells are plain text: no markup of a record is interpreted, control characters are shown. Not here: what
stands in a table.
"""

from collections.abc import Iterable, Sequence

from headrace.cli import shown


def draw(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """The lines of a table. A column whose name begins with `>` stands right; the last one that begins with
    `~` is broken over lines where the terminal ends."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in columns:
        name = column.lstrip(">~")
        table.add_column(
            Text(name),
            justify="right" if column.startswith(">") else "left",
            no_wrap=not column.startswith("~"),
            overflow="fold",
        )
    for row in rows:
        table.add_row(*(Text(shown.printable(_text(cell))) for cell in row))
    console = Console(color_system=None)
    narrowest = console.measure(table).minimum
    console = Console(color_system=None, width=max(console.width, narrowest))
    with console.capture() as captured:
        console.print(table)
    return [line.rstrip() for line in captured.get().splitlines()]


def _text(cell: object) -> str:
    if cell is None:
        return "-"
    return f"{cell:,}" if isinstance(cell, int) else str(cell)
