"""What must be seen at each named crash point, and come of it, written once: `test_chaos_sqlite.py` and
`test_chaos_kafka.py` inherit it. That nothing is wrong afterwards is `chaos.chaos_contract`.
"""

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest

from chaos import verdict
from chaos.named import Frozen
from checker import Log
from headrace.errors import StoreError
from headrace.trainer import checkpoint
from headrace.wire.records import TrainStep

RUN = "named"
LEARNED, UPLOADED, COMMITTED = "trainer.learned", "trainer.uploaded", "trainer.committed"
WRITTEN_HALF, WRITTEN = "checkpoint.written_half", "checkpoint.uploaded"
IN_STEP = f"bus.in_transaction/trainer-{RUN}"
IN_FEED = f"bus.in_transaction/prompts-{RUN}"
IN_JOIN = "bus.in_transaction/streams.experience-0"
REBALANCE = f"bus.rebalance/rollouts-{RUN}-local"
PLACES = {
    LEARNED: 2,
    UPLOADED: 2,
    IN_STEP: 3,
    COMMITTED: 4,
    WRITTEN_HALF: 1,
    WRITTEN: 1,
    IN_FEED: 3,
    IN_JOIN: 3,
    REBALANCE: 2,
}
"""Place -> at the nth time in one process. A worker's first rebalance is its own joining."""


@dataclass(frozen=True)
class Met:
    """A run that met every place, and came to its end."""

    run_dir: Path
    frozen: dict[str, Frozen]
    log: Log

    @cached_property
    def steps(self) -> list[TrainStep]:
        return verdict.steps_of(self.log, RUN)

    def life_after(self, pid: int) -> str:
        """How the next trainer after process `pid` that came to work began. One that finds no broker tries
        again or ends, and one that loses it later begins once more: neither is told."""
        lives = re.split(r" start pid=(\d+)", (self.run_dir / "logs" / "trainer.log").read_text())
        life = next(life for life in lives[lives.index(str(pid)) + 3 :: 2] if " trainer_start " in life)
        begun = life[: life.index("\n", life.index(" trainer_start "))]
        return begun.rpartition(" unavailable ")[2]

    def begins_after(self, pid: int) -> int:
        """The step that the trainer after process `pid` went on from."""
        [step] = re.findall(r" trainer_start .*\bstep=(\d+)", self.life_after(pid))
        return int(step)

    def named(self, step: int) -> list[int]:
        """Steps of the checkpoints that the ledger kept at `step`."""
        kept: list[int] = []
        for record in self.steps[:step]:
            if record.checkpoint is not None:
                kept.append(record.step if record.checkpoint.step is None else record.checkpoint.step)
            kept = [at for at in kept if at not in record.checkpoints_pruned]
        return kept


class NamedContract:
    """Inherited by each bus, whose module has the fixture `met`."""

    def test_every_place_was_met(self, met: Met) -> None:
        """Once each, by processes that were killed there."""
        assert met.frozen.keys() == PLACES.keys()

    def test_before_upload(self, met: Met) -> None:
        """A step that was only computed left no trace: the next trainer goes on from the one before."""
        at = met.frozen[LEARNED]
        assert at.step + 1 not in at.versions
        assert met.begins_after(at.pid) == at.step

    @pytest.mark.parametrize("place", [UPLOADED, IN_STEP])
    def test_after_upload_and_in_the_transaction(self, met: Met, place: str) -> None:
        """The version lay in the store, and the ledger had nothing of it: it never was."""
        at = met.frozen[place]
        assert at.step + 1 in at.versions
        assert met.begins_after(at.pid) == at.step

    def test_after_the_transaction(self, met: Met) -> None:
        """The step counts, though its trainer never heard so: the next one goes on behind it."""
        at = met.frozen[COMMITTED]
        assert at.step in at.versions and at.step + 1 not in at.versions
        assert met.begins_after(at.pid) == at.step

    @pytest.mark.parametrize("place", [WRITTEN_HALF, WRITTEN])
    def test_in_the_middle_of_a_checkpoint(self, met: Met, place: str) -> None:
        """What the ledger does not name does not count: the next trainer begins at the one before, or at
        the seed, and computes every step since."""
        at = met.frozen[place]
        last = max(met.named(at.step), default=0)
        told = met.life_after(at.pid)
        assert re.findall(r"checkpoint_read step=(\d+)", told) == ([str(last)] if last else [])
        assert re.findall(r"replayed step=(\d+)", told) == [str(s) for s in range(last + 1, at.step + 1)]

    def test_a_checkpoint_that_nobody_named(self, met: Met) -> None:
        """Half a checkpoint is no blob; a whole one lies there, of a step that the ledger does not name."""
        at = met.frozen[WRITTEN]
        saved = {uri for step in met.steps if step.checkpoint for uri in [step.checkpoint.uri]}
        unnamed = [uri for uri in at.blobs - saved if self._is_checkpoint(met, uri)]
        assert len(unnamed) == 1
        half = met.frozen[WRITTEN_HALF]
        assert not [uri for uri in half.blobs - saved - {unnamed[0]} if self._is_checkpoint(met, uri)]

    def test_in_the_feed_s_transaction(self, met: Met) -> None:
        """Its prompts were not out; they were issued once, by the feed after it."""
        assert met.frozen[IN_FEED].issued < len(met.log["prompts"])

    def _is_checkpoint(self, met: Met, uri: str) -> bool:
        path = met.run_dir / "store" / uri
        try:
            return path.exists() and checkpoint.decode(path.read_bytes(), RUN, uri).step > 0
        except StoreError:
            return False
