"""What a loop under faults must come to, written once: `test_loop_sqlite.py` and `test_loop_kafka.py` inherit
it.

One run is shared by all tests of a bus: it is started, hurt and ended by `play`.
"""

import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from checker import Log, audit, read_log, unaccounted
from faulty_run import GROUPS_PER_STEP, FaultyRun, put_junk, started
from headrace.bus import protocol
from headrace.cli import main
from headrace.cli.process import living
from headrace.wire.records import DeadLetter

STEPS = 16
VICTIMS = ("rollouts-0", "inference-0", "experience", "trainer")
PROCESSES = (*VICTIMS, "rollouts-1", "relay", "prompts")
HurtTheLog = Callable[[FaultyRun], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Hurt:
    """A run that has come to its end, and what was done to it."""

    run: FaultyRun
    exit_code: int
    log: Log
    junk: dict[str, bytes]
    """Place -> value."""
    letters: dict[str, list[DeadLetter]]

    @property
    def name(self) -> str:
        return self.run.run_dir.name


async def play(run_dir: Path, address: str, hurt_the_log: HurtTheLog) -> Hurt:
    """A run of STEPS steps: junk in every topic, each of VICTIMS killed once, then the log itself hurt."""
    async with started(run_dir, address, "--steps", str(STEPS), "--restart", "3") as run:
        watch = run.watch
        await run.until(lambda: bool(watch.issued), "prompts")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(protocol, "RECORD_BYTES_MAX", 1_030_000)  # a writer that doesn't keep our limit
            junk = await put_junk(run.bus)
        await run.kill("rollouts-0", lambda: watch.rolling("rollouts-0"))
        await run.goes_on()
        await run.kill("inference-0", watch.generating)
        await run.goes_on()
        await run.kill("experience", watch.joining)
        await run.goes_on()
        await run.kill("trainer", watch.training)
        await run.goes_on()
        await hurt_the_log(run)
        exit_code = await run.end()
        return Hurt(run, exit_code, await read_log(run.bus), junk, dict(watch.letters))


class LoopContract:
    """Inherited by each bus. Its module has the fixtures `address` (of the log) and `hurt` (`play`)."""

    def test_the_run_reaches_its_last_step(self, hurt: Hurt) -> None:
        """Each process was killed in mid-work, and the demo ends as if nothing had happened."""
        assert hurt.exit_code == 0, hurt.run.told()
        assert hurt.run.killed == list(VICTIMS)
        assert hurt.run.watch.step == STEPS

    def test_the_log_keeps_every_promise(self, hurt: Hurt) -> None:
        """Checked from the topics alone: nothing twice, nothing missing, one unbroken chain of weights."""
        assert audit(hurt.log, hurt.name) == []
        assert unaccounted(hurt.log, hurt.name) == []
        assert len(hurt.log["prompts"]) - 6 == STEPS * GROUPS_PER_STEP  # six are junk

    def test_the_last_weights_are_served(self, hurt: Hurt) -> None:
        """Past the death of its server, the replica serves new versions; the newest one acknowledged is of
        the run's last steps."""
        assert max(ack.version for ack in hurt.run.watch.serving) >= STEPS - 2
        assert all(ack.outcome == "serving" for ack in hurt.run.watch.serving)

    def test_every_process_ends_by_itself(self, hurt: Hurt) -> None:
        """After the last step each process stops when asked, none has to be killed, none is left."""
        assert living(hurt.run.run_dir) == {}
        for name in PROCESSES:
            assert hurt.run.log(name).rstrip().endswith(f"INFO {name} end"), hurt.run.log(name)[-2000:]

    def test_junk_is_dead_lettered(self, hurt: Hurt) -> None:
        """Every bad record has a letter with its very bytes (a record over the limit: their beginning), its
        place and a reason; nothing else has one."""
        assert hurt.letters.keys() == hurt.junk.keys()
        for place, value in hurt.junk.items():
            for letter in hurt.letters[place]:
                assert letter.reason.startswith(f"{place}: ")
                assert letter.error in ("WireError", "RecordTooLarge")
                assert value.startswith(letter.value) and len(letter.value) >= min(len(value), 900_000)

    def test_letters_are_listed_shown_and_sent_again(
        self, hurt: Hurt, address: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """`headrace dead-letters` on the run: each letter has its line, one shows its bytes, and a redriven
        record stands on its topic a second time."""
        place = next(iter(hurt.junk))
        where = ("--run-dir", str(hurt.run.run_dir))
        assert main(["dead-letters", "list", "--json", *where]) == 0
        listed = [json.loads(line)["place"] for line in capsys.readouterr().out.splitlines()]
        assert sorted(listed) == sorted(hurt.junk)
        assert main(["dead-letters", "show", place, "--json", *where]) == 0
        shown = json.loads(capsys.readouterr().out)
        assert bytes.fromhex(shown["value_hex"]) == hurt.junk[place]
        before = self._records(address, place, capsys)
        assert main(["dead-letters", "redrive", place, *where]) == 0
        capsys.readouterr()
        assert self._records(address, place, capsys) == before + 1

    def _records(self, address: str, place: str, capsys: pytest.CaptureFixture[str]) -> int:
        """Records of the topic of `place`."""
        assert main(["tail", place.partition("[")[0], "--json", "-n", "100000", "--bus", address]) == 0
        return len(capsys.readouterr().out.splitlines())
