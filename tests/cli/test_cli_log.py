"""What reaches a process's log."""

import logging

from headrace.log import QUIET_S, OnceInAWhile


def record(name: str, text: str, at_s: float) -> logging.LogRecord:
    made = logging.LogRecord(name, logging.ERROR, "", 0, text, ("x",), None)
    made.created = at_s
    return made


def test_a_client_that_repeats_itself_is_heard_once_in_a_while() -> None:
    """Of 1,000 equal lines within 9.99 s two pass, whatever they are about; another line, and our own, pass
    each time."""
    once = OnceInAWhile("aiokafka")
    repeated = [record("aiokafka.conn", "Unable connect to %s", i * 2 * QUIET_S / 1000) for i in range(1000)]
    assert sum(map(once.filter, repeated)) == 2
    assert once.filter(record("aiokafka.conn", "Something else about %s", 1.0))
    assert all(once.filter(record("headrace.trainer", "step %s", 1.0)) for _ in range(3))
