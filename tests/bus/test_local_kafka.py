"""A local broker's process: one at a time, and never mistaken for another."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.bus import local_kafka
from headrace.errors import BusUnavailable

needs_broker = pytest.mark.skipif(bool(local_kafka.missing()), reason=local_kafka.missing())


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
    """It runs, and answers the fourth question: its address is given, and no second one is started."""
    answers = iter([False, False, False, True])
    monkeypatch.setattr(local_kafka, "_answers", lambda address: next(answers))
    monkeypatch.setattr(local_kafka, "_spawn", no_second)
    assert local_kafka.up(tmp_path) == "localhost:1"
    assert next(answers, None) is None
    assert broker.poll() is None


def test_a_broker_that_never_answers_is_named_and_left_alone(
    tmp_path: Path, broker: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error tells its address and the end of its log; it may be somebody's, and goes on."""
    (tmp_path / "kafka.log").write_text("its last words")
    monkeypatch.setattr(local_kafka, "START_S", 0.1)
    monkeypatch.setattr(local_kafka, "_spawn", no_second)
    with pytest.raises(BusUnavailable, match=r"expected a broker .* its log ends: its last words"):
        local_kafka.up(tmp_path)
    assert broker.poll() is None


@needs_broker
def test_a_port_that_another_took_is_chosen_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The free port is taken while the broker's machine starts: it comes up on the next one; a port that was
    asked for is not changed."""
    free_port = local_kafka._free_port
    with socket.create_server(("localhost", 0)) as other:
        taken = other.getsockname()[1]
        ports = iter([taken])
        monkeypatch.setattr(local_kafka, "_free_port", lambda: next(ports, None) or free_port())
        try:
            address = local_kafka.up(tmp_path / "any")
            assert local_kafka.status(tmp_path / "any").running
            assert address != f"localhost:{taken}"
        finally:
            local_kafka.down(tmp_path / "any")
        with pytest.raises(BusUnavailable, match=f"expected a broker at localhost:{taken}"):
            local_kafka.up(tmp_path / "this", taken)
    assert local_kafka.status(tmp_path / "this").pid is None


def test_the_number_of_a_dead_broker_may_be_anybody_s(tmp_path: Path) -> None:
    """After a restart of the machine: the process that has its number now is not stopped in its place."""
    (tmp_path / "address").write_text("localhost:1")
    (tmp_path / "kafka.pid").write_text(str(os.getpid()))
    assert local_kafka.status(tmp_path).pid is None
    local_kafka.down(tmp_path)
