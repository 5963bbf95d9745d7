"""Chaos on the embedded log: named crash points, and kills at random."""

import pytest

from chaos.chaos_contract import ChaosContract, Played, play
from chaos.named_contract import Met, NamedContract

# `played` counts with the first test: its own deadlines are 240, 300 and 420 s (`chaos.named`, `chaos.play`)
pytestmark = pytest.mark.timeout(1200)


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Played:
    return play(tmp_path_factory.mktemp("chaos"), kafka=False, kills=20, delay_s=1.2, seed=4)


@pytest.fixture
def met(played: Played) -> Met:
    return played.met


class TestNamedPointsOnSqlite(NamedContract):
    pass


class TestChaosOnSqlite(ChaosContract):
    pass
