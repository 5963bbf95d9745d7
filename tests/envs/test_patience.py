"""How long a silent child may go on: its own time, not the machine's."""

import time

import pytest

from headrace.envs import forkserver
from headrace.envs.forkserver import _Patience

CONFIG = {"wall_ms": 400, "check_cpu_ms": 1000}


class Machine:
    """Clock and the child's processor time, moved by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s, self.used_s = 100.0, 0.5
        monkeypatch.setattr(time, "monotonic", lambda: self.now_s)
        monkeypatch.setattr(forkserver, "_cpu_s", lambda pid: self.used_s)

    def looks(self, patience: _Patience, times: int, *, used_s: float = 0.0, each_s: float = 0.05) -> str:
        """What is said first, within so many looks."""
        for _ in range(times):
            self.now_s += each_s
            self.used_s += used_s
            if said := patience.end():
                return said
        return ""


def test_a_child_that_does_nothing_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """No processor time in 0.4 s of looks 0.05 s apart: the ninth says so, the seventh not yet."""
    machine = Machine(monkeypatch)
    patience = _Patience(1, CONFIG)
    assert machine.looks(patience, 7) == ""
    assert machine.looks(patience, 2) == "hang"


def test_a_machine_that_stood_still_is_not_held_against_the_child(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten seconds without a look count as four looks; a child that goes on then is left alone."""
    machine = Machine(monkeypatch)
    patience = _Patience(1, CONFIG)
    assert machine.looks(patience, 1, each_s=10.0) == ""
    assert machine.looks(patience, 20, used_s=0.01) == ""


def test_a_child_that_moves_slowly_has_longer_and_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two milliseconds of processor time between looks: five times as long, 2 s, and then no more."""
    machine = Machine(monkeypatch)
    patience = _Patience(1, CONFIG)
    assert machine.looks(patience, 39, used_s=0.002) == ""
    assert machine.looks(patience, 2, used_s=0.002) == "hang"


def test_processor_time_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child that computes all the time ends after twice the processor time of a check."""
    machine = Machine(monkeypatch)
    assert machine.looks(_Patience(1, CONFIG), 45, used_s=0.05) == "time"
