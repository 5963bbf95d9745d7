"""Tables of the looking commands on a narrow terminal."""

import pytest

from headrace.cli.tables import draw


def test_only_the_wide_column_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """At 20 columns every cell and name of the other columns is whole, spaces or not."""
    monkeypatch.setenv("COLUMNS", "20")
    table = draw(
        ("unit", ">share %", "state", "~why"),
        [("on1-live-7", 12345, "stable: all users", "no sign of harm"), ("b", None, "-", "-")],
    )
    assert table[0].split() == ["unit", "share", "%", "state", "why"]
    assert table[1].startswith("on1-live-7   12,345  stable: all users  ")
    assert " ".join(line[39:].strip() for line in table[1:4]) == "no sign of"
