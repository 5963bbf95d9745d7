"""Replay on Kafka: offsets with gaps, another log's client, the same answers."""

import uuid
from pathlib import Path

import pytest
from altered_log import STEPS, record_run, replay
from packed_place import Place


@pytest.mark.kafka
def test_replay_on_kafka(tmp_path: Path, kafka: str) -> None:
    """A run on a broker: equal from the seed, and what-if beside it."""
    place = Place(tmp_path / "run", f"kafka:{kafka}", f"run-{uuid.uuid4().hex[:8]}")
    steps = record_run(place)
    said = replay(place.directory, f"1..{STEPS}", "--json")
    assert (said.code, said.outcomes) == (0, ["equal"] * STEPS), said.out + said.err
    assert said.json["steps"][-1]["root_recomputed"] == steps[-1].root_after
    beside = replay(place.directory, "2..3", "--what-if", "trainer.lr=0.02", "--json")
    assert beside.code == 0
    assert [step["recorded_equal"] for step in beside.json["steps"]] == [True, True]
