"""A real Redis server for one test, on a free port, without persistence. Not tests."""

import os
import signal
import socket
import subprocess
import time
from pathlib import Path

DEADLINE_S = 20.0


class LocalRedis:
    def __init__(self, binary: str, directory: Path) -> None:
        self._binary = binary
        self._directory = directory
        self._process: subprocess.Popen[bytes] | None = None
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port: int = probe.getsockname()[1]

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self._port}/0"

    def start(self) -> None:
        """Returns when it answers. What it held before a `kill` is gone."""
        self._directory.mkdir(exist_ok=True)
        settings = ["--port", str(self._port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        log = self._directory / "redis.log"
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [self._binary, *settings, "--dir", self._directory], stdout=output, stderr=output
            )
        deadline_s = time.monotonic() + DEADLINE_S
        while not self._answers():
            ended = self._process.poll() is not None
            assert not ended and time.monotonic() < deadline_s, f"redis-server: {log.read_text()}"
            time.sleep(0.01)

    def kill(self) -> None:
        """`kill -9`; a second one does nothing."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def freeze(self) -> None:
        """Takes connections, answers nothing, until `thaw`."""
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGCONT)

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self._port), timeout=1) as connection:
                connection.sendall(b"PING\r\n")
                return connection.recv(7) == b"+PONG\r\n"
        except OSError:
            return False
