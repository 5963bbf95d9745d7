"""How long a process waits for a log that is away."""

import logging

import pytest

from headrace.bus.outage import Outage
from headrace.errors import BusUnavailable

ERROR = BusUnavailable("log: away")


class Hand:
    """A clock that is set by hand."""

    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_outage_counts_from_its_first_failure() -> None:
    """Up to `ms_max` after it nothing is raised, and the error itself a little later."""
    clock = Hand()
    outage = Outage(2_000, now_s=clock)
    outage.failed(ERROR)
    assert outage.away_ms == 0
    clock.now_s += 2.0
    outage.failed(ERROR)
    assert outage.away_ms == 2_000
    clock.now_s += 0.25
    with pytest.raises(BusUnavailable) as caught:
        outage.failed(ERROR)
    assert caught.value is ERROR


def test_answer_ends_an_outage() -> None:
    """What failed before it does not count, nor does the time in which nothing was asked."""
    clock = Hand()
    outage = Outage(2_000, now_s=clock)
    outage.failed(ERROR)
    clock.now_s += 1.5
    outage.alive()
    assert outage.away_ms == 0
    clock.now_s += 3_600.0
    outage.failed(ERROR)
    clock.now_s += 1.5
    outage.failed(ERROR)
    assert outage.away_ms == 1_500


def test_outage_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """One line when it begins and one when it is over, however often it was tried."""
    clock = Hand()
    outage = Outage(60_000, now_s=clock)
    with caplog.at_level(logging.INFO):
        outage.alive()
        for _ in range(3):
            outage.failed(ERROR)
            clock.now_s += 0.5
        outage.alive()
        outage.alive()
    assert [record.getMessage() for record in caplog.records] == [
        "unavailable reason='log: away'",
        "available after_ms=1500",
    ]
