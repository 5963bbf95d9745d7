"""What a record may not do to the terminal of whoever looks at it."""

import pytest

from headrace import log
from headrace.bus.protocol import Delivery
from headrace.cli import shown

ESCAPE = "\x1b]0;title\x07\x1b[2J"


@pytest.mark.parametrize("colour", [False, True])
def test_control_characters_are_shown_not_obeyed(colour: bool) -> None:
    """Escape sequences in a key, a type or a field come out quoted."""
    value = b"\x81\xa1a\xae" + ESCAPE.encode()
    headers = (("ce_type", ESCAPE.encode()),)
    line = shown.line(Delivery("foreign", 0, 0, 0, ESCAPE.encode(), value, headers), colour=colour)
    assert "\x1b]" not in line and "\x1b[2J" not in line and "\x07" not in line
    assert line.count("title") == 3


def test_control_characters_stay_out_of_logs() -> None:
    """A reason taken from a record is quoted in a log line."""
    assert "\x1b" not in log.line("failed", reason=ESCAPE)
