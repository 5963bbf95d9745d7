"""The canary's process on the embedded log, and what it refuses."""

import asyncio
from pathlib import Path

import pytest
from canary_cases import CONFIG, CanaryCases, opened

from headrace.bus import open_bus
from headrace.config import RunConfig
from headrace.errors import ConfigError, TopicMismatch
from headrace.streams import canary
from headrace.wire.release import ReleaseConfig


class TestCanaryOnSqlite(CanaryCases):
    @pytest.fixture
    def address(self, tmp_path: Path) -> str:
        return f"sqlite:{tmp_path}/bus.sqlite"


def test_without_gradual_release_a_canary_would_not_matter(tmp_path: Path) -> None:
    """It says so instead of writing what no relay follows."""

    async def scenario() -> None:
        async with opened(f"sqlite:{tmp_path}/bus.sqlite") as bus:
            with pytest.raises(ConfigError, match=r"release.mode: expected 'gradual'"):
                await canary.run(bus, RunConfig(), ReleaseConfig(), CONFIG, asyncio.Event())

    asyncio.run(scenario())


def test_topics_have_to_be_there(tmp_path: Path) -> None:
    """On a log without topics it names those that are missing."""

    async def scenario() -> None:
        async with open_bus(f"sqlite:{tmp_path}/bus.sqlite") as bus:
            with pytest.raises(TopicMismatch, match=r"expected a topic of this log"):
                await canary.run(bus, RunConfig(), ReleaseConfig(mode="gradual"), CONFIG, asyncio.Event())

    asyncio.run(scenario())
