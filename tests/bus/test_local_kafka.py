"""A local broker's process: one at a time, and never mistaken for another. Without a broker."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.bus import local_kafka
from headrace.errors import BusUnavailable


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """What looks like a broker, at work in `tmp_path`; it answers nobody."""
    command = [sys.executable, "-c", "import time; time.sleep(600)", "kafka.Kafka"]
    with subprocess.Popen(command) as process:
        (tmp_path / "address").write_text("localhost:1")
        (tmp_path / "kafka.pid").write_text(str(process.pid))
        yield process
        process.kill()


def no_second(*_: object) -> int:
    raise AssertionError("expected no second broker on the same data")


def test_a_broker_that_is_slow_to_answer_is_waited_for(
    tmp_path: Path, broker: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter([False, False, False, True])
    monkeypatch.setattr(local_kafka, "_answers", lambda address: next(answers))
    monkeypatch.setattr(local_kafka, "_spawn", no_second)
    assert local_kafka.up(tmp_path) == "localhost:1"
    assert next(answers, None) is None
    assert broker.poll() is None


def test_a_broker_that_never_answers_is_named_and_left_alone(
    tmp_path: Path, broker: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kafka.log").write_text("its last words")
    monkeypatch.setattr(local_kafka, "START_S", 0.1)
    monkeypatch.setattr(local_kafka, "_spawn", no_second)
    with pytest.raises(BusUnavailable, match=r"expected a broker .* its log ends: its last words"):
        local_kafka.up(tmp_path)
    assert broker.poll() is None


def test_the_number_of_a_dead_broker_may_be_anybody_s(tmp_path: Path) -> None:
    """After a restart of the machine: the process that has its number now is not stopped in its place."""
    (tmp_path / "address").write_text("localhost:1")
    (tmp_path / "kafka.pid").write_text(str(os.getpid()))
    assert local_kafka.status(tmp_path).pid is None
    local_kafka.down(tmp_path)
