"""Decisions of a release: stages, rollback, versions that come too fast, words by hand. The state machine
alone."""

import json

import msgspec
import pytest
from canary_log import RUN, day, exposure, feed, published, said

from headrace.config import changed
from headrace.errors import ConfigError
from headrace.streams.release import Canary, CanaryConfig, State, Stuck, overdue, stuck
from headrace.wire.records import WeightsAck, WeightsPromoted, WeightsRevoked

CONFIG = CanaryConfig(stages=(0.1, 0.5), exposures_min=100)


def trying(config: CanaryConfig = CONFIG) -> Canary:
    """Version 0 is stable, version 1 in its first stage."""
    canary = Canary(RUN, config)
    assert said(feed(canary, [published(0), published(1)])) == [("promoted", 0, 1.0), ("promoted", 1, 0.1)]
    return canary


def test_a_version_as_good_goes_through_its_stages() -> None:
    """A hundred exposures of each side in each stage: 10 %, 50 %, all. The evidence says what was
    compared."""
    canary = trying()
    decided = feed(canary, day(100, stable=0, canary=1)) + feed(canary, day(100, stable=0, canary=1, seed=1))
    assert said(decided) == [("promoted", 1, 0.5), ("promoted", 1, 1.0)]
    evidence = json.loads(decided[0].evidence)  # type: ignore[attr-defined]
    assert evidence["exposures"] == [100, 100]
    assert (evidence["stable"], evidence["share"]) == (0, 0.1)
    assert set(evidence["e"]) == {"reward", "accepted", "suggested", "silent", "speed"}
    assert max(evidence["e"].values()) < evidence["e_max"]
    assert canary.state.release.stable == [0, 1]
    assert canary.state.trial is None


def test_a_broken_version_is_taken_back_and_not_tried_again() -> None:
    """It is revoked within 100 exposures, users are back at version 0, and only a newer version is tried."""
    canary = trying()
    decided = feed(canary, day(100, stable=0, canary=1, broken=True))
    assert said(decided) == [("revoked", 1, 0.0)]
    assert json.loads(decided[0].evidence)["exposures"][0] <= 100  # type: ignore[attr-defined]
    assert canary.state.release.serving("gradual") == (0, None, 0.0)
    assert said(feed(canary, day(50, stable=0, canary=1, broken=True, seed=1))) == []
    assert said(feed(canary, [published(2)])) == [("promoted", 2, 0.1)]


def test_a_suspected_version_is_not_promoted() -> None:
    """With 30 exposures asked for, a broken version has had them before it is proven to be broken (the
    e-value of the reward is 6, that of a revocation 200): it stays in its stage until it is."""
    canary = trying(msgspec.structs.replace(CONFIG, exposures_min=30))
    decided = feed(canary, day(100, stable=0, canary=1, broken=True))
    assert said(decided) == [("revoked", 1, 0.0)]
    assert json.loads(decided[0].evidence)["exposures"][0] > 30  # type: ignore[attr-defined]


def test_a_version_that_answers_only_garbage_is_taken_back() -> None:
    """Nothing of it is shown, and it is not silent either: its suggestions are missed, within 60 exposures,
    though users never reject one."""
    canary = trying()
    garbage = [
        exposure(number, 1, "canary", reward=0.0, shown=False) if item.cohort == "canary" else item
        for number, item in enumerate(day(100, stable=0, canary=1))
    ]
    decided = feed(canary, garbage)
    assert said(decided) == [("revoked", 1, 0.0)]
    evidence = json.loads(decided[0].evidence)  # type: ignore[attr-defined]
    assert evidence["reason"].startswith("suggested")
    assert evidence["exposures"][0] <= 60


def test_versions_that_come_too_fast_wait_and_the_newest_wins() -> None:
    """2, 3 and 4 come while 1 is under test: 1 is judged to its end, then 4 is tried; the record names 2 and
    3, which never serve a live user."""
    canary = trying()
    assert feed(canary, [published(2), published(3), published(4)]) == []
    decided = feed(canary, day(100, stable=0, canary=1, broken=True))
    assert said(decided) == [("revoked", 1, 0.0), ("promoted", 4, 0.1)]
    assert json.loads(decided[1].evidence)["skipped"] == [2, 3]  # type: ignore[attr-defined]


def test_exposures_that_do_not_belong_are_not_counted() -> None:
    """Of another version or cohort, from before the stage, quarantined, or of another run."""
    canary = trying()
    canary.state.trial.began_ms = 1000  # type: ignore[union-attr]
    strangers = [
        exposure(1, 1, "stable", reward=-0.25),
        exposure(2, 7, "canary", reward=-0.25),
        exposure(3, 1, "canary", reward=-0.25, opened_ms=999),
        exposure(4, 1, "canary", reward=-0.25, quarantined=True),
        msgspec.structs.replace(exposure(5, 1, "canary", reward=-0.25), run="another"),
    ]
    feed(canary, strangers)
    assert canary.evidence("").exposures == (0, 0)
    feed(canary, [exposure(6, 1, "canary", reward=0.75, opened_ms=1000)])
    assert canary.evidence("").exposures == (1, 0)
    assert canary.evidence("").means["reward"] == (0.75, 0.0)


def test_weights_that_no_replica_can_serve_are_revoked_without_a_user() -> None:
    """One replica found numbers that are not finite; a refusal of another kind says nothing of the
    version."""
    canary = trying()
    ack = WeightsAck(
        run=RUN,
        region="local",
        replica="r0",
        version=1,
        root="",
        outcome="refused",
        detail="full",
        acked_ms=0,
    )
    assert feed(canary, [ack]) == []
    assert said(feed(canary, [msgspec.structs.replace(ack, unfit=True)])) == [("revoked", 1, 0.0)]


def test_a_pin_holds_against_the_canary() -> None:
    """Pinned in the middle of a test: it ends, nothing is promoted, a decision that was under way is void;
    after unpin the newest version is tried."""
    canary = trying()
    pin = WeightsPromoted(run=RUN, version=0, share=1.0, pinned=True, by="hand")
    assert feed(canary, [pin, *day(200, stable=0, canary=1, broken=True), published(2)]) == []
    canary.state.awaited = 1
    late = WeightsPromoted(run=RUN, version=1, share=0.5)
    assert feed(canary, [late]) == []
    assert canary.state.release.serving("gradual") == (0, None, 0.0)
    unpin = msgspec.structs.replace(pin, pinned=False)
    assert said(feed(canary, [unpin])) == [("promoted", 2, 0.1)]


def test_words_by_hand_are_followed() -> None:
    """A share given by hand is where the stages go on from; revoking the stable version falls back on the one
    before it."""
    canary = trying()
    feed(canary, [WeightsPromoted(run=RUN, version=1, share=0.3, by="hand")])
    assert said(feed(canary, day(100, stable=0, canary=1)))[:1] == [("promoted", 1, 0.5)]
    feed(canary, day(100, stable=0, canary=1, seed=1))
    assert canary.state.release.serving("gradual").stable == 1
    feed(canary, [WeightsRevoked(run=RUN, version=1, by="hand")])
    assert canary.state.release.serving("gradual") == (0, None, 0.0)


def test_off_means_off() -> None:
    """With `auto` off a broken version stays, and the evidence against it is there to be seen."""
    canary = Canary(RUN, msgspec.structs.replace(CONFIG, auto=False))
    by_hand = [
        WeightsPromoted(run=RUN, version=0, share=1.0, by="hand"),
        WeightsPromoted(run=RUN, version=1, share=0.1, by="hand"),
    ]
    assert feed(canary, [published(0), published(1), *by_hand]) == []
    assert feed(canary, day(100, stable=0, canary=1, broken=True)) == []
    found = canary.evidence("")
    assert found.e["reward"] > (found.e_max or 0)


def test_nothing_is_decided_twice() -> None:
    """Between sending a decision and reading it back there is no other; the state survives being written."""
    canary = Canary(RUN, CONFIG)
    canary.learn(published(0), 0)
    assert len(canary.decide()) == 1
    assert canary.decide() == []
    again = Canary(RUN, CONFIG, msgspec.msgpack.decode(msgspec.msgpack.encode(canary.state), type=State))
    assert again.decide() == []
    again.learn(WeightsPromoted(run=RUN, version=0, share=1.0), 0)
    again.learn(published(1), 0)
    assert said(again.decide()) == [("promoted", 1, 0.1)]


def test_too_few_users_say_nothing() -> None:
    """A thousand exposures of four users a side are no evidence, for or against."""
    canary = trying()
    records = [
        msgspec.structs.replace(item, user=f"u{number % 8}")
        for number, item in enumerate(day(1000, stable=0, canary=1, broken=True))
    ]
    assert feed(canary, records) == []


def test_an_overdue_release_is_told_and_gives_way_to_a_newer_one() -> None:
    """Four users a side say nothing. A tenth of both sides' exposures should have been the canary's: when
    that is three times the 100 that the stage asks for, the newest version is tried in its place; nothing is
    revoked."""
    canary = trying()
    records = [
        msgspec.structs.replace(item, user=f"u{number % 8}")
        for number, item in enumerate(day(1500, stable=0, canary=1, broken=True))
    ]
    assert feed(canary, records[:-1]) == []
    assert feed(canary, [published(2)]) == []
    assert not overdue(CONFIG, canary.state.trial)  # type: ignore[arg-type]
    [decided] = feed(canary, records[-1:])
    assert said([decided]) == [("promoted", 2, 0.1)]
    evidence = json.loads(decided.evidence)  # type: ignore[attr-defined]
    assert "1 is overdue" in evidence["reason"]
    assert (evidence["stable"], evidence["exposures"]) == (0, [1500, 1500])
    assert canary.state.release.revoked == []
    assert stuck(CONFIG, canary.state.trial) is None


def test_few_users_are_seen_before_a_release_is_overdue() -> None:
    """Nine users on the stable side, and 100 exposures of theirs: a tenth of all users is one. Forty
    exposures of as many users say nothing yet, and a canary without `auto` is a person's business anyway."""
    canary = trying()
    feed(canary, [exposure(n, 0, "stable", reward=0.25, user=f"u{n % 9}") for n in range(99)])
    assert stuck(CONFIG, canary.state.trial) is None
    feed(canary, [exposure(99, 0, "stable", reward=0.25, user="u1")])
    found = stuck(CONFIG, canary.state.trial)
    assert found == Stuck(version=1, share=0.1, exposures=(0, 100), users_min=400)
    assert stuck(msgspec.structs.replace(CONFIG, auto=False), canary.state.trial) is None
    early = msgspec.structs.replace(CONFIG, exposures_min=20)
    many = trying(early)
    feed(many, [exposure(n, 0, "stable", reward=0.25) for n in range(40)])
    assert stuck(early, many.state.trial) is None


def test_stages_have_to_grow() -> None:
    """A stage that is no larger than the one before is refused with the setting's name."""
    with pytest.raises(ConfigError, match=r"stages: expected growing shares"):
        changed(CONFIG, {"stages": "0.5,0.1"})
