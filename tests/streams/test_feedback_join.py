"""The feedback join and the limit of a user's weight alone, without any host."""

from collections.abc import Sequence

import pytest
from feedback_records import Became, Pipeline
from feedback_scenarios import SCENARIOS, Scenario, expected

from headrace.errors import WireError
from headrace.streams.feedback import FeedbackConfig
from headrace.wire.records import Record

WINDOW_MS = 10_000
CONFIG = FeedbackConfig(window_ms=WINDOW_MS, orphan_ms=5_000, closed_memory_ms=50_000)


def play(pipeline: Pipeline, records: Sequence[Record], refused: list[Record]) -> None:
    for record in records:
        try:
            pipeline.send(record)
        except WireError:
            refused.append(record)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_feedback_scenarios(scenario: Scenario) -> None:
    """Each suggestion becomes what the scenario says, once, and what comes later changes nothing."""
    pipeline, refused = Pipeline(CONFIG), list[Record]()
    play(pipeline, scenario.records("s"), refused)
    pipeline.advance(pipeline.now_ms + WINDOW_MS + 250)
    play(pipeline, scenario.after("s"), refused)
    pipeline.advance(pipeline.now_ms + 1)
    for name, became in expected(scenario, "s").items():
        got = pipeline.became(name)
        letters = sum(getattr(record, "suggestion_id", "") == name for record in refused)
        assert Became(**vars(got) | {"letters": got.letters + letters}) == became
    assert pipeline.join.open == 0
