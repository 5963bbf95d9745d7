"""Editors and tasks, one trainer, on Kafka."""

import asyncio
import uuid

import pytest
from online_contract import OnlineContract, Played, play

pytestmark = [pytest.mark.timeout(900), pytest.mark.kafka]


@pytest.fixture(scope="module")
def played(kafka: str, tmp_path_factory: pytest.TempPathFactory) -> Played:
    run_dir = tmp_path_factory.mktemp("online") / f"run-{uuid.uuid4().hex[:8]}"
    return asyncio.run(play(run_dir, f"kafka:{kafka}"))


class TestOnlineOnKafka(OnlineContract):
    pass
