"""Chaos on Kafka: named crash points, and kills at random, the broker's among them."""

import pytest

from chaos.chaos_contract import ChaosContract, Played, play
from chaos.named_contract import Met, NamedContract
from headrace.bus import local_kafka

# `played` counts with the first test: its own deadlines are 240, 300 and 420 s (`chaos.named`, `chaos.play`)
pytestmark = [pytest.mark.timeout(1200), pytest.mark.kafka]


@pytest.fixture(scope="module", autouse=True)
def java(kafka: str) -> None:
    """A broker of our own can be had: it is killed here."""
    if lack := local_kafka.missing():
        pytest.skip(f"no local broker: {lack}")


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Played:
    return play(tmp_path_factory.mktemp("chaos"), kafka=True, kills=6, delay_s=1.5, seed=13)


@pytest.fixture
def met(played: Played) -> Met:
    return played.met


class TestNamedPointsOnKafka(NamedContract):
    pass


class TestChaosOnKafka(ChaosContract):
    def test_the_broker_was_hit(self, played: Played) -> None:
        """At least one of the kills was the broker's."""
        hit = [done.fault.kind for done in played.outcome.story.done if done.fault.target == "broker"]
        assert played.seed_given or "kill" in hit
