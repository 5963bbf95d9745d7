"""A one-node Apache Kafka on this machine, for tests and local runs: `up`, `down`, `status`.

Not for production, and no part of the bus: it needs Java and, the first time, Maven to fetch the jars. One
directory holds all of a broker: `data/`, `server.properties`, `kafka.log`, `kafka.pid`, `address`. Its data
survives `down`, and a `kill -9`.
"""

import contextlib
import os
import shutil
import signal
import socket
import struct
import subprocess
import time
import uuid
from base64 import urlsafe_b64encode
from collections.abc import Iterator
from dataclasses import dataclass
from fcntl import LOCK_EX, flock
from pathlib import Path

from headrace.errors import BusUnavailable

VERSION = "4.3.1"
_MAIN = "kafka.Kafka"
PORT_TRIES = 3
START_S = 60.0  # 2.4 s on an idle machine
STOP_S = 20.0
FETCH_S = 600.0
_JVM = (
    *("-Xmx512m", "-Xms64m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"),
    *("-Dorg.slf4j.simpleLogger.defaultLogLevel=warn", "-Dorg.slf4j.simpleLogger.showDateTime=true"),
)
_POM = """<project>
<modelVersion>4.0.0</modelVersion><groupId>headrace</groupId><artifactId>broker</artifactId><version>1</version>
<dependencies><dependency>
<groupId>org.apache.kafka</groupId><artifactId>kafka_2.13</artifactId><version>{version}</version>
</dependency><dependency>
<groupId>org.slf4j</groupId><artifactId>slf4j-simple</artifactId><version>1.7.36</version>
</dependency></dependencies>
</project>
"""
_PROPERTIES = """process.roles=broker,controller
node.id=1
controller.quorum.voters=1@localhost:{controller}
listeners=PLAINTEXT://localhost:{port},CONTROLLER://localhost:{controller}
advertised.listeners=PLAINTEXT://localhost:{port}
controller.listener.names=CONTROLLER
log.dirs={data}
auto.create.topics.enable=false
num.partitions=4
default.replication.factor=1
offsets.topic.replication.factor=1
offsets.topic.num.partitions=4
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
transaction.state.log.num.partitions=4
group.initial.rebalance.delay.ms=0
group.min.session.timeout.ms=1000
log.retention.check.interval.ms=1000
"""


@dataclass(frozen=True, slots=True)
class Status:
    running: bool
    address: str
    """`localhost:port`, also of a stopped broker; empty where there never was one."""
    pid: int | None


def missing() -> str:
    """What this machine lacks to run a broker, in words; empty when nothing."""
    if shutil.which("java") is None:
        return "java is not installed"
    if shutil.which("mvn") is None and not _jars_dir().is_dir():
        return "mvn is not installed and the jars of Kafka are not here yet"
    return ""


def up(directory: Path, port: int = 0) -> str:
    """Starts the broker in `directory`, unless it runs, and returns `localhost:port` once it answers.

    `port` 0: a free one the first time, the same one afterwards. Raises BusUnavailable.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with _locked(directory / "lock"):
        now = status(directory)
        if now.pid is not None:  # slow to answer is not away: a second one would want the same data
            _wait_until_up(directory, now.pid, now.address)
            return now.address
        jars = fetch_jars()
        properties = directory / "server.properties"
        if properties.exists():
            return _start(directory, jars)
        for tries_left in reversed(range(PORT_TRIES)):
            _format(directory, jars, port or _free_port())
            try:
                return _start(directory, jars)
            except BusUnavailable:
                properties.unlink()
                if port or not tries_left or not _port_was_taken(directory):
                    raise
        raise AssertionError("unreachable: the last try returns or raises")


def down(directory: Path, *, kill: bool = False) -> None:
    """Stops the broker with SIGTERM, and after STOP_S with SIGKILL; with `kill` at once, as a crash would.

    It is dead on return. Safe to call when none runs.
    """
    now = status(directory)
    if now.pid is None:
        return
    for sign in (signal.SIGKILL,) if kill else (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.kill(now.pid, sign)
        deadline_s = time.monotonic() + STOP_S
        while time.monotonic() < deadline_s:
            if not _alive(now.pid):
                (directory / "kafka.pid").unlink(missing_ok=True)
                return
            time.sleep(0.05)
    raise BusUnavailable(f"{directory}: expected the broker (process {now.pid}) to stop, it goes on")


def status(directory: Path) -> Status:
    address = _text(directory / "address")
    pid = _text(directory / "kafka.pid")
    if pid and _alive(int(pid)) and _is_broker(int(pid)):
        return Status(running=_answers(address), address=address, pid=int(pid))
    return Status(running=False, address=address, pid=None)


def fetch_jars() -> Path:
    """Kafka's jars, fetched with Maven the first time (44 MB). Raises BusUnavailable."""
    jars = _jars_dir()
    if jars.is_dir():
        return jars
    if lack := missing():
        raise BusUnavailable(f"kafka {VERSION}: expected Java and Maven, {lack}")
    jars.parent.mkdir(parents=True, exist_ok=True)
    with _locked(jars.parent / "lock"):
        if jars.is_dir():
            return jars
        unfinished = jars.with_suffix(".part")
        shutil.rmtree(unfinished, ignore_errors=True)
        pom = jars.parent / "pom.xml"
        pom.write_text(_POM.format(version=VERSION))
        done = subprocess.run(
            [
                *("mvn", "-q", "-B", "-f", str(pom), "dependency:copy-dependencies"),
                *("-DincludeScope=runtime", f"-DoutputDirectory={unfinished}"),
            ],
            capture_output=True,
            text=True,
            timeout=FETCH_S,
        )
        if done.returncode:
            raise BusUnavailable(
                f"kafka {VERSION}: expected Maven to fetch the jars, got: {done.stdout[-2000:]}"
            )
        unfinished.rename(jars)
    return jars


def _jars_dir() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "headrace" / "kafka" / f"jars-{VERSION}"


def _format(directory: Path, jars: Path, port: int) -> None:
    properties = directory / "server.properties"
    unfinished = directory / "server.properties.part"
    data = (directory / "data").resolve()
    shutil.rmtree(data, ignore_errors=True)
    unfinished.write_text(_PROPERTIES.format(port=port, controller=_free_port(), data=data))
    cluster_id = urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
    tool = ["kafka.tools.StorageTool", "format", "-t", cluster_id, "-c", str(unfinished)]
    done = subprocess.run(
        ["java", *_JVM, *_classpath(jars), *tool],
        capture_output=True,
        text=True,
        timeout=START_S,
        cwd=directory,
    )
    if done.returncode:
        raise BusUnavailable(
            f"{directory}: expected to format a log, got: {(done.stdout + done.stderr)[-2000:]}"
        )
    (directory / "address").write_text(f"localhost:{port}")
    unfinished.rename(properties)


def _start(directory: Path, jars: Path) -> str:
    """The address of a formatted broker, once it answers."""
    command = ["java", *_JVM, *_classpath(jars), _MAIN, str(directory / "server.properties")]
    pid = _spawn(command, directory / "kafka.log")
    (directory / "kafka.pid").write_text(str(pid))
    address = _text(directory / "address")
    try:
        _wait_until_up(directory, pid, address)
    except BusUnavailable:
        down(directory)
        raise
    return address


def _port_was_taken(directory: Path) -> bool:
    """Another process took the free port before the broker did, seconds later."""
    return "failed to bind" in (directory / "kafka.log").read_text(errors="replace")


def _spawn(command: list[str], log: Path) -> int:
    """A process in a session of its own, that outlives us."""
    null = (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)
    out = (os.POSIX_SPAWN_OPEN, 1, str(log), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    error = (os.POSIX_SPAWN_DUP2, 1, 2)
    return os.posix_spawnp(command[0], command, os.environ, file_actions=[null, out, error], setsid=True)


def _wait_until_up(directory: Path, pid: int, address: str) -> None:
    deadline_s = time.monotonic() + START_S
    while not _answers(address):
        if not _alive(pid) or time.monotonic() > deadline_s:
            end = (directory / "kafka.log").read_text(errors="replace")[-2000:]
            raise BusUnavailable(
                f"{directory}: expected a broker at {address} within {START_S:g} s, its log ends: {end}"
            )
        time.sleep(0.05)


def _classpath(jars: Path) -> list[str]:
    return ["-cp", f"{jars}/*"]


def _answers(address: str) -> bool:
    """Whether the broker answers an ApiVersions request: its port is open for a while before it does."""
    host, _, port = address.partition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=1) as connection:
            connection.sendall(struct.pack(">ihhih", 10, 18, 0, 1, -1))
            return bool(connection.recv(4))
    except OSError:
        return False


def _alive(pid: int) -> bool:
    """Whether the process runs; a child of ours that has ended is reaped."""
    with contextlib.suppress(ChildProcessError):
        if os.waitpid(pid, os.WNOHANG) != (0, 0):
            return False
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        pass
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return not Path("/proc/self").exists()


def _is_broker(pid: int) -> bool:
    """False where the number of a broker that is gone has been given to another process."""
    try:
        return _MAIN.encode() in (Path("/proc") / str(pid) / "cmdline").read_bytes()
    except OSError:
        return not Path("/proc/self").exists()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except FileNotFoundError:
        return ""


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as lock:
        flock(lock, LOCK_EX)
        yield
