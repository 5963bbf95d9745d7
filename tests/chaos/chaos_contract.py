"""What a run under random faults must come to, written once: `test_chaos_sqlite.py` and
`test_chaos_kafka.py` inherit it.

`HEADRACE_CHAOS_SEED` and `HEADRACE_CHAOS_KILLS` change what is drawn; both are printed.
"""

import asyncio
import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from chaos import table
from chaos.named import Frozen, meet, told
from chaos.named_contract import PLACES, RUN, Met
from chaos.play import ChaosRun
from chaos.whole import Outcome, Wanted, run_through
from headrace.cli.process import living
from headrace.failpoints import VARIABLE


@dataclass(frozen=True, slots=True)
class Played:
    wanted: Wanted
    outcome: Outcome
    seed_given: bool
    met: Met


def play(parent: Path, *, kafka: bool, kills: int, delay_s: float, seed: int) -> Played:
    """The named places first, one after the other, then faults at random, in one run."""
    given = os.environ.get("HEADRACE_CHAOS_SEED")
    wanted = Wanted(
        parent / RUN,
        int(given) if given else seed,
        kafka=kafka,
        kills=int(os.environ.get("HEADRACE_CHAOS_KILLS", kills)),
        delay_s=delay_s,
    )
    print(f"chaos: {wanted}")

    markers, frozen = parent / "markers", list[Frozen]()
    markers.mkdir()

    async def at_named_places(run: ChaosRun) -> None:
        meeting = asyncio.create_task(meet(run, PLACES, markers))
        await run.first_step()
        await run.crew.start("rollouts-2", "rollouts")  # the others have to give partitions up
        frozen.extend(await meeting)
        await run.crew.stop("rollouts-2")
        del run.crew.children["rollouts-2"]
        run.begin()

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, told(PLACES, markers))
        patch.setenv("OMP_NUM_THREADS", "1")
        outcome = asyncio.run(run_through(wanted, say=print, before=at_named_places))
    print(table.rendered(outcome))
    return Played(
        wanted, outcome, given is not None, Met(wanted.run_dir, {f.place: f for f in frozen}, outcome.log)
    )


class ChaosContract:
    """Inherited by each bus, whose module has the fixture `played` (`play`)."""

    def test_every_promise_holds(self, played: Played) -> None:
        """Units once, none lost, offsets and roots right, weights rebuilt, every step equal again."""
        assert played.outcome.wrong == []

    def test_it_was_hurt_and_went_on(self, played: Played) -> None:
        """As many processes were killed as was wanted, and steps were made meanwhile."""
        assert played.outcome.story.kills == played.wanted.kills
        assert played.outcome.story.steps_at_cut > 1

    def test_the_accounts_close(self, played: Played) -> None:
        """At the cut every prompt is trained, dropped with a reason, or known to be on its way; in the end
        none is on its way."""
        for at in (played.outcome.at_cut, played.outcome.at_end):
            known = at.trained + sum(at.dropped.values()) + sum(at.in_flight.values())
            assert at.issued == known and at.trained > 0
        assert played.outcome.at_end.in_flight == {}

    def test_nothing_is_left_behind(self, played: Played) -> None:
        """No process of the run lives."""
        assert living(played.wanted.run_dir) == {}
