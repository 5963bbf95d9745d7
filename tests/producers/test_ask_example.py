"""`examples/ask_and_report.py`: one id from the question to the report."""

import asyncio
import runpy
from pathlib import Path
from typing import Any, Self

import pytest

from headrace.policy import checkpoint, dialogue
from headrace.producers.suggestions import Answer, why_not
from headrace.rpc.generation import Completion, Generation

CODEC = checkpoint.load_seed()[2]
EXAMPLE = Path(__file__).parents[2] / "examples" / "ask_and_report.py"


@pytest.mark.parametrize("silent", [False, True])
def test_one_id_goes_through(
    silent: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The question is trained; what is shown is reported under its id and user, silence is not."""
    answers: list[Answer] = []
    reports: list[tuple[str, str, str]] = []

    class Doubled:
        """A replica and a gateway."""

        def __init__(self, address: str, **told: Any) -> None:
            self.address = address

        async def __aenter__(self) -> Self:
            return self

        async def __aexit__(self, *error: object) -> None:
            assert self.address == "replica:1"

        def __enter__(self) -> Self:
            return self

        def __exit__(self, *error: object) -> None:
            assert self.address == "http://gateway:1"

        async def generate(self, request: Generation, *, timeout_s: float) -> list[Completion]:
            told = [CODEC.special["<|silent|>"]] if silent else dialogue.suggestion_tokens(CODEC, "height")
            completion = Completion(
                member=0,
                tokens=tuple(told),
                logp=(-0.5,) * len(told),
                finish="stop",
                spans=(),
                weights_version=4,
                routes=b"",
                routes_shape=(0, 0, 0),
                started_ms=0,
                ended_ms=1,
            )
            answers.append(Answer(request, completion, 0))
            return [completion]

        def publish(self, *, suggestion_id: str, user: str, kind: str) -> None:
            reports.append((suggestion_id, user, kind))

    monkeypatch.setattr("headrace.rpc.client.InferenceClient", Doubled)
    monkeypatch.setattr("headrace.producers.client.FeedbackClient", Doubled)
    asyncio.run(runpy.run_path(str(EXAMPLE))["main"]("demo", "replica:1", "http://gateway:1"))
    [answer] = answers
    asked = answer.request
    assert why_not(answer, "demo") == ""
    assert asked.lane == "live"
    assert reports == (
        [] if silent else [(asked.group_id, asked.user, kind) for kind in ("shown", "accepted")]
    )
    assert asked.group_id in capsys.readouterr().out
