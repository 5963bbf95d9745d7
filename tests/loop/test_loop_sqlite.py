"""The whole loop under faults on the embedded log."""

import asyncio

import pytest
from loop_contract import STEPS, Hurt, LoopContract, play

from checker import Log, audit, read_log
from faulty_run import DEADLINE_S, JUNK_KEY, FaultyRun, started
from headrace.cli.process import living
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
    def test_it_goes_on_after_the_death_of_everything(self, hurt: Hurt, address: str) -> None:
        """A bit of the newest checkpoint flips; the run goes on; the supervisor gets SIGKILL, and all
        processes go with it; the run goes on again. The damage was refused by its hash, the steps since the
        checkpoint before were computed again, and the log keeps every promise."""
        saved = [step.checkpoint for step in ledger(hurt.log) if step.checkpoint]
        path = hurt.run.run_dir / "store" / saved[-1].uri
        blob = bytearray(path.read_bytes())
        blob[len(blob) // 2] ^= 1
        path.write_bytes(blob)
        run_dir = hurt.run.run_dir

        async def go_on() -> Log:
            async with started(run_dir, address, "--steps", "19") as run:
                await run.until(lambda: run.watch.step > STEPS and run.watch.generating(), "more steps")
                run.process.kill()
                await run.process.wait()
                async with asyncio.timeout(DEADLINE_S):
                    while living(run_dir):  # noqa: ASYNC110 - the kernel ends them, it tells nobody
                        await asyncio.sleep(0.05)
            async with started(run_dir, address, "--steps", "2") as run:
                assert await run.end() == 0, run.told()
                return await read_log(run.bus)

        log = asyncio.run(go_on())
        assert audit(log, hurt.name) == []
        assert len(ledger(log)) >= STEPS + 3
        told = hurt.run.log("trainer")
        assert f"checkpoint_refused step={STEPS}" in told
        assert f"expected SHA-256 {saved[-1].sha256}" in told
        assert f"replayed step={STEPS} " in told
