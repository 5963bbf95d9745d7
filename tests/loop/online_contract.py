"""What a run with editors must come to, written once: `test_online_sqlite.py` and `test_online_kafka.py`
inherit it.

One small run of `headrace demo --online` is shared by all tests of a bus. The model is never silent (the seed
as it is), so that many suggestions are shown within seconds.
"""

import asyncio
import os
import sys
import uuid
from dataclasses import dataclass
from pathlib import Path

import pytest

from headrace.bus import open_bus
from headrace.bus.protocol import Bus, Message
from headrace.cli import main
from headrace.cli.online_loop import phases_of
from headrace.cli.online_view import OnlineView, quantile, view
from headrace.cli.process import living
from headrace.wire.codec import decode, encode
from headrace.wire.records import DeadLetter, Feedback, Record, TrainStep
from headrace.wire.topics import DEAD_LETTERS, FEEDBACK, TRAIN_STEPS, Topic

DEADLINE_S = 600.0
STEPS = 10
FORGED = "forged-suggestion-1"
SMALL = """
[run]
groups_per_step = 4
group_size = 4
live_per_step = 24
lag_versions_max = 6
[demo]
alone_s = 1.0
trials_quick = 24
silence_share = 0.0
[evaluation]
tasks = 0
[feedback_join.join]
settle_ms = 100
orphan_ms = 1500
[trainer]
checkpoint_every = 3
[editors]
users = 8
distributions = ["more-itertools"]
"""


@dataclass(frozen=True, slots=True)
class Played:
    """An online run that has come to its end."""

    run_dir: Path
    exit_code: int
    said: str
    view: OnlineView
    steps: list[TrainStep]
    letters: list[DeadLetter]

    @property
    def both(self) -> TrainStep:
        """The last step that trained units of both sources."""
        for step in reversed(self.steps):
            sources = {unit.group_id: unit.source for unit in step.consumed}
            if {sources[group_id] for group_id in step.admitted} == {"sim", "live"}:
                return step
        raise AssertionError("expected a step with units of both sources, found none")


async def play(run_dir: Path, address: str) -> Played:
    """The demo, and beside it somebody who reports an accept of a suggestion that was never made."""
    small = run_dir.with_suffix(".toml")
    small.write_text(SMALL)
    words = ("demo", "--online", "--plain", "--steps", str(STEPS), "--run.name", run_dir.name)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "headrace", *words),
        *("--config", str(small), "--run-dir", str(run_dir), "--bus", address),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    try:
        async with asyncio.timeout(DEADLINE_S):
            forging = asyncio.create_task(_forge(run_dir, address))
            said, _ = await process.communicate()
            assert process.returncode == 0, said.decode()
            await forging
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    async with open_bus(address) as bus:
        seen = await view(bus, run_dir.name)
        steps = [record for record in await _all(bus, TRAIN_STEPS) if isinstance(record, TrainStep)]
        letters = [record for record in await _all(bus, DEAD_LETTERS) if isinstance(record, DeadLetter)]
    assert process.returncode is not None
    return Played(
        run_dir,
        process.returncode,
        said.decode(),
        seen,
        [step for step in steps if step.run == run_dir.name],
        letters,
    )


async def _all(bus: Bus, topic: Topic) -> list[Record]:
    found = []
    begins, ends = await bus.begins([topic.name]), await bus.ends([topic.name])
    for tp, end in ends.items():
        async for delivery in bus.read_range(tp, begins[tp], end):
            found.append(decode(topic.name, delivery.value or b"", delivery.headers))
    return found


async def _forge(run_dir: Path, address: str) -> None:
    """Once the gateway is up, an event past it: whatever gets onto the topic must be harmless."""
    while not (run_dir / "gateway.addresses").is_file():  # noqa: ASYNC110 - a file of another process
        await asyncio.sleep(0.1)
    event = Feedback(
        run=run_dir.name,
        event_id=uuid.uuid4().hex,
        suggestion_id=FORGED,
        kind="accepted",
        editor_ms=0,
        user="mallory",
    )
    value, headers = encode(event, source="test", now_ms=0)
    async with open_bus(address) as bus:
        await bus.produce([Message(FEEDBACK.name, FORGED.encode(), value, headers)])


class OnlineContract:
    """Inherited by each bus. Its module has the fixture `played` (`play`)."""

    def test_the_run_ends_with_its_table(self, played: Played) -> None:
        """It trains all steps, says what users lived through, and leaves no process behind."""
        assert played.exit_code == 0, played.said
        assert len(played.steps) == STEPS
        for line in ("live: ", "shown per request", "live lane with rollouts", "accept -> weights trained"):
            assert line in played.said, played.said
        assert living(played.run_dir) == {}

    def test_accepts_become_training_units(self, played: Played) -> None:
        """Both sources are in one ledger, and accepted suggestions among what was trained, each once."""
        assert played.view.admitted["sim"] and played.view.admitted["live"]
        assert any(group_id in played.view.accepted_ms for group_id in played.view.trained)
        units = [group_id for step in played.steps for group_id in step.admitted]
        assert len(units) == len(set(units))
        assert played.both.metrics["live.trained"] > 0

    def test_nothing_of_the_editor_is_trusted(self, played: Played) -> None:
        """An event of a suggestion that inference never made is an orphan; every trained suggestion was
        made."""
        made = {live.group_id for live in played.view.answers}
        assert played.view.trained.keys() <= made
        assert FORGED not in played.view.exposures
        assert [letter.reason for letter in played.letters if letter.key == FORGED.encode()]

    def test_the_account_closes(self, played: Played, capsys: pytest.CaptureFixture[str]) -> None:
        """The ledger and the topics say the same of each suggestion and group."""
        assert main(["account", "--run-dir", str(played.run_dir)]) == 0
        assert "ledger and topics: EQUAL" in capsys.readouterr().out

    def test_a_step_of_both_sources_is_replayed(
        self, played: Played, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Bit for bit."""
        assert main(["replay", str(played.both.step), "--run-dir", str(played.run_dir)]) == 0
        assert "1 of 1 steps equal" in capsys.readouterr().out

    def test_a_suggestion_is_traced(self, played: Played, capsys: pytest.CaptureFixture[str]) -> None:
        """From what inference made of it to the step that trained it and the weights that were served."""
        accepted = [unit for unit in played.view.trained if unit in played.view.accepted_ms]
        unit = min(accepted, key=lambda group_id: played.view.trained[group_id])
        assert main(["trace", unit, "--run-dir", str(played.run_dir)]) == 0
        told = capsys.readouterr().out
        for station in ("rolled out", "signal", "rewarded", "joined", "trained", "announced", "served"):
            assert f"\n{station} " in told, told

    def test_users_wait_for_nobody(self, played: Played) -> None:
        """Everything asked was answered and recorded, and the median answer beside rollouts took less than a
        training step."""
        waited = played.view.latencies_ms(0, 1 << 53)
        assert len(waited) >= len(played.view.trained) > 0
        step_ms = sorted(step.ended_ms - step.started_ms for step in played.steps)
        assert (quantile(waited, 0.5) or 0) < max(step_ms[len(step_ms) // 2], 1_000)
        assert phases_of(played.run_dir).without_rollouts[1] > 0
