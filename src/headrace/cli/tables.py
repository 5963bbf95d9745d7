"""A table as the looking commands print it: one line a row where it can be, whole numbers, nothing obeyed.

Cells are plain text: no markup of a record is interpreted, control characters are shown. Not here: what
stands in a table.
"""

from collections.abc import Iterable, Sequence

from headrace.cli import shown

WIDTH_MAX = 10_000
"""Of a table whose columns together need more than the terminal has."""


def draw(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """The lines of a table. A column whose name begins with `>` stands right; the last one that begins with
    `~` is broken over lines where the terminal ends."""
    from rich.cells import cell_len
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    told = [[shown.printable(_text(cell)) for cell in row] for row in rows]
    for number, column in enumerate(columns):
        name = column.lstrip(">~")
        whole = not column.startswith("~")
        table.add_column(
            Text(name),
            justify="right" if column.startswith(">") else "left",
            no_wrap=whole,
            overflow="fold",
            min_width=max(map(cell_len, (name, *(row[number] for row in told)))) if whole else None,
        )
    for row in told:
        table.add_row(*map(Text, row))
    console = Console(color_system=None)
    narrowest = console.measure(table, options=console.options.update(width=WIDTH_MAX)).minimum
    console = Console(color_system=None, width=max(console.width, narrowest))
    with console.capture() as captured:
        console.print(table)
    return [line.rstrip() for line in captured.get().splitlines()]


def _text(cell: object) -> str:
    if cell is None:
        return "-"
    return f"{cell:,}" if isinstance(cell, int) else str(cell)
