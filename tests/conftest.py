"""The broker that tests marked `kafka` run against, the Redis of the region's cache, and the lines in the
summary that say whether those tests ran.

`HEADRACE_KAFKA=host:port` names a broker; otherwise one is started from Maven's jars in a temporary
directory. Without Java, or without `redis-server`, these tests are skipped, and the summary says so aloud.
"""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from headrace.bus import local_kafka
from local_redis import LocalRedis

settings.register_profile("stalls", settings.default, deadline=None)
"""No deadline for one example: a crowded machine stands still for longer than any of them takes."""
settings.load_profile("stalls")
_KAFKA_HALF = pytest.StashKey[str]()
_REDIS_PART = pytest.StashKey[str]()


@pytest.fixture(scope="session")
def kafka(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[str]:
    """`host:port` of a real broker."""
    given = os.environ.get("HEADRACE_KAFKA")
    lack = "" if given else local_kafka.missing()
    if lack:
        request.config.stash[_KAFKA_HALF] = f"LEFT OUT: {lack}"
        pytest.skip(f"no broker: {lack}")
    if given:
        request.config.stash[_KAFKA_HALF] = f"ran against the broker at {given}"
        yield given
        return
    directory = tmp_path_factory.mktemp("kafka")
    address = local_kafka.up(directory)
    request.config.stash[_KAFKA_HALF] = f"ran against Apache Kafka {local_kafka.VERSION}"
    yield address
    local_kafka.down(directory)


@pytest.fixture
def local_redis(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[LocalRedis]:
    """A Redis of this test's own, empty, that it may kill and start again."""
    binary = shutil.which("redis-server")
    if binary is None:
        lack = "no redis-server (on Debian: apt-get install redis-server)"
        request.config.stash[_REDIS_PART] = f"LEFT OUT: {lack}"
        pytest.skip(lack)
    request.config.stash[_REDIS_PART] = f"ran against {binary}"
    server = LocalRedis(binary, tmp_path / "redis")
    server.start()
    yield server
    server.kill()


@pytest.fixture
def redis_url(local_redis: LocalRedis) -> str:
    return local_redis.url


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for name, key in (("Kafka half", _KAFKA_HALF), ("Redis part", _REDIS_PART)):
        said = config.stash.get(key, None)
        if said is not None:
            left_out = said.startswith("LEFT OUT")
            terminalreporter.section(name, red=left_out, green=not left_out)
            terminalreporter.line(f"{name}: {said}")
