"""What the relay does about a replica that refuses the canary, look by look."""

import asyncio
from pathlib import Path
from typing import Any

from trainer_records import MODEL

from headrace.config import RunConfig
from headrace.consumers import weights
from headrace.consumers.config import RelayConfig
from headrace.consumers.versions import Held
from headrace.policy.checkpoint import to_bf16
from headrace.policy.model import initial_weights
from headrace.rpc.generation import Loaded, ReplicaStatus
from headrace.wire.release import Serving

WEIGHTS = to_bf16(initial_weights(MODEL, 1))


class Replica:
    """Serves version 0 and has room for nothing else."""

    address = "host:1"

    def __init__(self) -> None:
        self.asked: list[int] = []

    async def status(self) -> ReplicaStatus:
        names = "slots slots_used queued_live queued_rollout tokens_generated tokens_prefilled"
        counts = dict.fromkeys(names.split(), 0)
        return ReplicaStatus(
            replica="r0",
            version=0,
            root="0",
            busy_s=0.0,
            up_s=1.0,
            hosted=((0, "0"),),
            stable=0,
            **counts,
        )

    async def load_weights(self, *, version: int, **_: Any) -> Loaded:
        self.asked.append(version)
        return Loaded(serving=False, version=0, root="0", pause_ms=0.0, detail="no room", unfit=False)


class Region:
    """Version 1 is tried; its log takes an acknowledgement when `answers` says so."""

    run = RunConfig(name="test")
    serving = Serving(stable=0, canary=1, share=0.5)

    def __init__(self, directory: Path, answers: list[bool]) -> None:
        self.config = RelayConfig(poll_ms=1, retry_ms=77, stage_dir=str(directory))
        self.versions = self
        self.newest = Held(0, "0", WEIGHTS)
        self.answers = answers
        self.waits_ms: list[int] = []
        self.said: list[tuple[int, str]] = []

    def root_of(self, version: int) -> str:
        return str(version)

    async def obtain(self, version: int = 0) -> Held:
        return Held(version, str(version), WEIGHTS)

    async def acknowledge(
        self, replica: str, version: int, root: str, *, refused: str = "", **_: Any
    ) -> bool:
        if not refused:
            return True
        self.said.append((version, refused))
        return self.answers.pop(0)

    async def wait(self, stop: asyncio.Event, timeout_ms: int) -> None:
        self.waits_ms.append(timeout_ms)
        if len(self.waits_ms) == 4:
            stop.set()


def test_a_refused_canary_is_not_sent_at_every_look(tmp_path: Path) -> None:
    """It is tried again after `retry_ms`; and said until the log has taken it, then no more: the canary's
    verdict may hang on it."""
    replica: Any = Replica()
    region: Any = Region(tmp_path, [False, False, True])
    asyncio.run(asyncio.wait_for(weights._Replica(region, replica).keep(asyncio.Event()), 60))
    assert region.waits_ms == [77] * 4
    assert replica.asked == [1] * 4
    assert region.said == [(1, "no room")] * 3
