"""The loop that cannot start."""

import socket
import time
from pathlib import Path

import pytest

from headrace.bus.kafka import connection
from headrace.cli import main
from headrace.cli.process import living


@pytest.mark.parametrize("silent", [False, True])
def test_demo_without_its_broker(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, silent: bool
) -> None:
    """Nothing listens, or something listens and never answers: within ten seconds one line with the address,
    exit code 4, and no process was started."""
    assert connection.CONNECT_S <= 7
    monkeypatch.setattr(connection, "CONNECT_S", 1.0)  # the rest of the ten is for a crowded machine
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        if silent:
            listener.listen()
        address = f"localhost:{listener.getsockname()[1]}"
        started_s = time.monotonic()
        code = main(
            [
                "demo",
                "--steps",
                "1",
                "--plain",
                "--run-dir",
                str(tmp_path / "run"),
                "--bus",
                f"kafka:{address}",
            ]
        )
        took_s = time.monotonic() - started_s
    told = capsys.readouterr().err
    assert code == 4
    assert f"headrace: kafka:{address}: expected a broker" in told and "Traceback" not in told
    assert took_s < 10
    assert living(tmp_path / "run") == {}
