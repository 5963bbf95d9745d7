"""Editors and tasks, one trainer, on the embedded log."""

import asyncio

import pytest
from online_contract import OnlineContract, Played, play

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Played:
    run_dir = tmp_path_factory.mktemp("online") / "run"
    return asyncio.run(play(run_dir, f"sqlite:{run_dir}/bus.sqlite"))


class TestOnlineOnSqlite(OnlineContract):
    pass
