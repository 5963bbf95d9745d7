"""The broker that tests marked `kafka` run against, and the line in the summary that says whether they did.

`HEADRACE_KAFKA=host:port` names a broker; otherwise one is started from Maven's jars in a temporary
directory. Without Java these tests are skipped, and the summary says so aloud.
"""

import os
from collections.abc import Iterator

import pytest

from headrace.bus import local_kafka

_KAFKA_HALF = pytest.StashKey[str]()


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


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    half = config.stash.get(_KAFKA_HALF, None)
    if half is not None:
        left_out = half.startswith("LEFT OUT")
        terminalreporter.section("Kafka half", red=left_out, green=not left_out)
        terminalreporter.line(f"Kafka half: {half}")
