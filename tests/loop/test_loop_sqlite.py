"""The whole loop under faults on the embedded log."""

import asyncio

import pytest
from faulty_run import FaultyRun
from loop_contract import Hurt, LoopContract, play

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"sqlite:{tmp_path_factory.mktemp('log')}/bus.sqlite"


@pytest.fixture(scope="module")
def hurt(address: str, tmp_path_factory: pytest.TempPathFactory) -> Hurt:
    """The run, played to its end."""

    async def leave_the_log(run: FaultyRun) -> None:
        """What can happen to the file is tests/bus/test_sqlite_faults.py."""

    return asyncio.run(play(tmp_path_factory.mktemp("loop") / "run", address, leave_the_log))


class TestLoopOnSqlite(LoopContract):
    pass
