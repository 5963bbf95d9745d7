"""The whole loop under faults on the embedded log."""

import asyncio

import pytest
from checker import Log, audit, read_log
from faulty_run import JUNK_KEY, FaultyRun, started
from loop_contract import STEPS, Hurt, LoopContract, play

from headrace.wire.codec import decode
from headrace.wire.records import TrainStep

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"sqlite:{tmp_path_factory.mktemp('log')}/bus.sqlite"


@pytest.fixture(scope="module")
def hurt(address: str, tmp_path_factory: pytest.TempPathFactory) -> Hurt:
    """The run, played to its end."""

    async def leave_the_log(run: FaultyRun) -> None:
        """What can happen to the file is tests/bus/test_sqlite_faults.py."""

    return asyncio.run(play(tmp_path_factory.mktemp("loop") / "run", address, leave_the_log))


def ledger(log: Log) -> list[TrainStep]:
    """The steps of the run; nobody else's are on this log."""
    decoded = (decode(d.topic, d.value or b"", d.headers) for d in log["train.steps"] if d.key != JUNK_KEY)
    return [step for step in decoded if isinstance(step, TrainStep)]


class TestLoopOnSqlite(LoopContract):
    def test_it_goes_on_past_a_damaged_checkpoint(self, hurt: Hurt, address: str) -> None:
        """Three steps more in the same directory, after a bit of the newest checkpoint has flipped: it is
        refused by its hash, the steps since the one before are computed again, and the chain is unbroken."""
        saved = [step.checkpoint for step in ledger(hurt.log) if step.checkpoint]
        path = hurt.run.run_dir / "store" / saved[-1].uri
        blob = bytearray(path.read_bytes())
        blob[len(blob) // 2] ^= 1
        path.write_bytes(blob)

        async def go_on() -> Log:
            async with started(hurt.run.run_dir, address, "--steps", "3") as run:
                assert await run.end() == 0, run.told()
                return await read_log(run.bus)

        log = asyncio.run(go_on())
        assert audit(log, hurt.name) == []
        assert [step.step for step in ledger(log)] == list(range(1, STEPS + 4))
        told = hurt.run.log("trainer")
        assert f"checkpoint_refused step={STEPS}" in told
        assert f"expected SHA-256 {saved[-1].sha256}" in told
        assert f"replayed step={STEPS} " in told
