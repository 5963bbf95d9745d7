"""The feedback join and the limit of a user's weight alone, without any host."""

import contextlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from feedback_records import Became, Pipeline, said, suggestion
from feedback_scenarios import ACCEPTED, IGNORED, SCENARIOS, Scenario, expected
from hypothesis import given, settings
from hypothesis import strategies as st
from stream_records import failed, step

from headrace.errors import WireError
from headrace.streams.feedback import FeedbackConfig, FeedbackJoin
from headrace.streams.fold import Fold
from headrace.streams.processor import Event
from headrace.streams.users import UsersConfig, UsersLimit
from headrace.wire.codec import decode
from headrace.wire.records import Exposure, Feedback, Judgement, Record, Reward
from headrace.wire.topics import DEAD_LETTERS, EXPOSURES, JUDGEMENTS, REWARDS

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


def test_window_is_inclusive() -> None:
    """A signal at the end of the window counts; one millisecond later it is late, though no timer has fired
    yet."""
    for at_ms, became, late in ((WINDOW_MS + 5, ACCEPTED, 0), (WINDOW_MS + 6, IGNORED, 1)):
        pipeline = Pipeline(CONFIG)
        pipeline.send(suggestion("s"), at_ms=5)
        pipeline.send(said("s", "shown"), at_ms=6)
        pipeline.send(said("s", "accepted"), at_ms=at_ms)
        pipeline.advance(at_ms + 500)
        assert (pipeline.became("s"), pipeline.join.counts["late"]) == (became, late)


def test_times_and_origin_of_an_exposure() -> None:
    """An exposure is that of the step: user, version, cohort, region, latency; it closes with its window."""
    pipeline = Pipeline(CONFIG)
    pipeline.send(suggestion("s"), at_ms=100)
    pipeline.send(said("s", "shown", region="elsewhere", user=""), at_ms=200)
    pipeline.advance(20_000)
    (exposure,) = pipeline.records(EXPOSURES.name)
    assert (exposure.user, exposure.version, exposure.cohort, exposure.region) == (
        "user of s",
        3,
        "canary",
        "far",
    )
    assert (exposure.opened_ms, exposure.closed_ms, exposure.latency_ms) == (100, 100 + WINDOW_MS, 40)


def test_ids_are_deterministic() -> None:
    """Each record that goes out has an id made of its suggestion's, so that sending it again changes
    nothing."""
    pipeline = Pipeline(CONFIG)
    pipeline.send(suggestion("a"), said("a", "accepted"), suggestion("b"), said("orphan", "shown"))
    pipeline.advance(20_000)
    ids = {output.event_id for output in pipeline.sent}
    assert ids == {"a/judgement", "a/user", "a/exposure", "b/failed", "b/exposure", "feedback/0/2"}
    (reward,) = pipeline.records(REWARDS.name)
    assert (reward.component, reward.member, reward.attempt) == ("user", 0, 0)
    assert (reward.range_min, reward.range_max, reward.evidence) == (-1.0, 1.0, "accepted")


def test_an_answer_without_text_is_exposed_at_once() -> None:
    """A model that answers only garbage must be seen as soon as one that is silent, not a window later, and
    learns from it."""
    pipeline = Pipeline(CONFIG)
    pipeline.send(suggestion("s", text_length=0), at_ms=100)
    (exposure,) = pipeline.records(EXPOSURES.name)
    assert (exposure.silent, exposure.shown, exposure.reward) == (False, False, -0.25)
    assert (exposure.opened_ms, exposure.closed_ms, pipeline.join.open) == (100, 100, 0)
    assert pipeline.join.counts["closed.no_text"] == 1


def test_settled_suggestions_close_early() -> None:
    """With `settle_ms` a judged suggestion closes so long after its last signal, an undecided one with its
    window; a signal in between starts the wait again, being shown again ends it."""
    config = msgspec.structs.replace(CONFIG, settle_ms=1_000)
    cases: list[tuple[list[tuple[int, Any]], int]] = [
        ([(100, said("s", "shown")), (200, said("s", "accepted"))], 1_200),
        ([(200, said("s", "accepted")), (1_100, said("s", "undone"))], 2_100),
        ([(200, said("s", "shown"))], WINDOW_MS),
        ([(200, said("s", "rejected")), (300, said("s", "shown"))], WINDOW_MS),
        ([(200, said("s", "partially_accepted", accepted_length=3))], WINDOW_MS),
        ([(200, said("s", "partially_accepted", accepted_length=8))], 1_200),
        ([(9_500, said("s", "rejected"))], WINDOW_MS),
        ([(200, said("s", "accepted")), (300, said("s", "shown"))], 1_200),
    ]
    for signals, end_ms in cases:
        pipeline = Pipeline(config)
        pipeline.send(suggestion("s"), at_ms=0)
        for at_ms, signal in signals:
            pipeline.send(signal, at_ms=at_ms)
        pipeline.advance(end_ms)
        assert pipeline.records(EXPOSURES.name) == []
        pipeline.advance(end_ms + 250)
        (exposure,) = pipeline.records(EXPOSURES.name)
        assert exposure.closed_ms == end_ms


def test_settled_before_it_was_made() -> None:
    """A suggestion that was judged long before its step came closes with its step, not before it."""
    pipeline = Pipeline(msgspec.structs.replace(CONFIG, settle_ms=1_000))
    pipeline.send(said("s", "accepted"), at_ms=0)
    pipeline.send(suggestion("s"), at_ms=3_000)
    pipeline.advance(4_000)
    (exposure,) = pipeline.records(EXPOSURES.name)
    assert (exposure.closed_ms, exposure.reward) == (3_000, 0.75)


def test_how_long_it_stood_there() -> None:
    """An editor's clock that runs backwards is not asked how long a suggestion stood there; one that was
    typed through was not superseded, in whatever order both are said."""
    pipeline = Pipeline(CONFIG)
    for name, ignored_ms in (("long", 200), ("short", 99)):
        pipeline.send(suggestion(name), said(name, "shown", editor_ms=9_000), at_ms=0)
        pipeline.send(said(name, "ignored", editor_ms=5_000, superseded_by="x"), at_ms=ignored_ms)
    pipeline.send(suggestion("s"), said("s", "shown", editor_ms=5_000))
    pipeline.send(said("s rest", "shown", continues="s", editor_ms=5_030))
    pipeline.send(said("s", "ignored", superseded_by="s rest", editor_ms=5_040))
    pipeline.advance(20_000)
    assert (pipeline.became("long"), pipeline.became("s")) == (IGNORED, IGNORED)
    assert pipeline.became("short").failed == "superseded"


def test_events_wait_each_for_itself() -> None:
    """An event waits `orphan_ms` for its suggestion, whichever is read first; younger ones go on waiting."""
    old, young = said("s", "rejected"), said("s", "accepted")
    pipeline = Pipeline(CONFIG)
    pipeline.send(old, at_ms=0)
    pipeline.send(young, at_ms=3_000)
    pipeline.advance(5_001 + 249)
    (letter,) = pipeline.records(DEAD_LETTERS.name)
    assert (letter.topic, letter.partition, letter.offset, letter.key) == ("feedback", 0, 1, b"s")
    assert decode("feedback", letter.value, letter.headers) == old and "orphan" in letter.reason
    pipeline.send(suggestion("s"), at_ms=6_000)
    pipeline.advance(30_000)
    assert replace(pipeline.became("s"), letters=0) == ACCEPTED
    read_late = Pipeline(CONFIG)
    read_late.send(suggestion("s"), at_ms=6_000)
    with pytest.raises(WireError, match="user"):
        read_late.send(said("s", "accepted", user="stranger"), at_ms=0)
    read_late.send(old, at_ms=0)
    assert read_late.became("s").letters == 1
    read_late.send(young, at_ms=3_000)
    read_late.advance(30_000)
    assert replace(read_late.became("s"), letters=0) == ACCEPTED


def test_no_judgement_of_simulated_groups() -> None:
    """Steps of simulated rollouts, and groups that failed, pass by and leave nothing."""
    pipeline = Pipeline(CONFIG)
    pipeline.send(step("g", 0, 0), failed("g"), suggestion("s", source="sim"))
    assert (pipeline.join.open, pipeline.join.settled, pipeline.sent) == (0, 0, [])
    assert not pipeline.join.drain()


def test_everything_leaves() -> None:
    """After window and memory nothing of anything is left, in memory or in the changelog."""
    fold = Fold(FeedbackJoin(CONFIG))
    for record in [
        suggestion("a"),
        said("a", "accepted"),
        said("b", "shown"),
        said("c", "shown", continues="a"),
    ]:
        fold.apply(Event("t", 0, 0, 0, record))
    keys = {key for key, value in fold.drain().entries}
    for now_ms in (20_000, 200_000):
        while fold.advance(now_ms):
            pass
    assert {key for key, value in fold.drain().entries if value is None} == keys
    assert (fold.open, fold.open_bytes, fold.settled, fold.due_ms) == (0, 0, 0, None)


def test_limits_of_a_partition() -> None:
    """Over its limits a partition gives up what comes last: suggestions are accounted, events are letters."""
    pipeline = Pipeline(msgspec.structs.replace(CONFIG, open_max=1))
    pipeline.send(suggestion("a"), suggestion("b"), said("c", "shown"), said("a", "accepted"))
    assert pipeline.became("b").failed == "more than 1 open groups in a partition"
    assert pipeline.became("c").letters == 1
    pipeline.advance(WINDOW_MS + 251)
    assert pipeline.became("a") == ACCEPTED


def test_huge_events_are_refused() -> None:
    """An event over 256 kB, and more than wait for one suggestion, are refused and leave nothing."""
    pipeline = Pipeline(CONFIG)
    with pytest.raises(WireError, match="event: expected at most 262144 bytes"):
        pipeline.send(said("s", "shown", text=b"x" * 262_144))
    for _ in range(2):
        pipeline.send(said("s", "shown", text=b"x" * 200_000))
    with pytest.raises(WireError, match="that wait for it, got more"):
        pipeline.send(said("s", "shown", text=b"x" * 200_000))
    assert pipeline.join.counts["held"] == 2


def test_a_chain_is_one_unit() -> None:
    """The rest of the rest of a suggestion is the suggestion; what goes round in a circle ends as letters."""
    pipeline = Pipeline(CONFIG)
    pipeline.send(suggestion("a"), said("a", "shown"), said("b", "shown", continues="a", user="user of a"))
    pipeline.send(said("c", "accepted", continues="b", user="user of a"))
    pipeline.send(said("x", "shown", continues="y"), said("y", "shown", continues="x"))
    pipeline.advance(20_000)
    assert pipeline.became("a") == ACCEPTED
    assert {name: pipeline.became(name) for name in "bcx"} == dict.fromkeys("bcx", Became())
    assert pipeline.became("y") == Became(letters=2)


def test_nobody_continues_another_users_suggestion() -> None:
    """A stranger's link moves no signal and takes no suggestion away."""
    pipeline = Pipeline(CONFIG)
    pipeline.send(suggestion("a"), suggestion("b"), said("a", "shown"))
    with pytest.raises(WireError, match="user: expected whom"):
        pipeline.send(said("b", "rejected", continues="a", user="stranger"))
    with pytest.raises(WireError, match="user: expected whom"):
        pipeline.send(said("fake", "rejected", continues="a", user="stranger"))
    pipeline.send(said("b", "accepted"))
    pipeline.advance(20_000)
    assert (pipeline.became("a"), pipeline.became("b")) == (IGNORED, ACCEPTED)


def test_eight_days_later() -> None:
    """An event that waited in an editor for eight days is an orphan: a letter, and no second judgement; so is
    one whose suggestion is still remembered: late."""
    pipeline = Pipeline(CONFIG)
    pipeline.send(suggestion("s"), said("s", "shown"))
    pipeline.advance(WINDOW_MS + 251)
    assert pipeline.became("s") == IGNORED
    pipeline.send(said("s", "accepted", editor_ms=1))
    assert pipeline.join.counts["late"] == 1
    pipeline.advance(8 * 86_400_000)
    pipeline.send(said("s", "accepted", editor_ms=1))
    pipeline.advance(8 * 86_400_000 + 10_000)
    assert pipeline.became("s") == replace(IGNORED, letters=1)
    assert (pipeline.join.open, pipeline.join.settled) == (0, 0)


def test_who_judges_what_was_made_for_nobody_has_a_limit() -> None:
    """Leaving one's name out where suggestions are made evades no limit: their user is who judges them, and
    the exposure says so. One that nobody spoke of stays without."""
    pipeline = Pipeline(CONFIG, UsersConfig(units_max=2))
    for name in "abc":
        pipeline.send(suggestion(name, user=""), said(name, "rejected", user="r1-bot"))
    pipeline.send(suggestion("d", user=""))
    pipeline.advance(20_000)
    assert Counter(reward.verdict for reward in pipeline.records(REWARDS.name)) == {
        "score": 2,
        "quarantine": 1,
    }
    users = {exposure.group_id: exposure.user for exposure in pipeline.records(EXPOSURES.name)}
    assert users == {**dict.fromkeys("abc", "r1-bot"), "d": ""}


def test_code_is_not_sent_on() -> None:
    """Of an event that is sent on from link to link of a chain, its code stays where it was."""
    pipeline = Pipeline(CONFIG)
    pipeline.send(said("b", "shown", continues="a", text=b"sealed"))
    (on,) = pipeline.records("feedback")
    assert (on.suggestion_id, on.text) == ("a", b"")


_KINDS = ["shown", "accepted", "rejected", "ignored", "undone"]
_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=4) | st.sampled_from(["a", "b", "\0"])
_NUMBER = st.integers(-(1 << 63), (1 << 63) - 1)


def _crafted() -> st.SearchStrategy[Feedback]:
    """Events as a broken or hostile writer of the topic could make them."""
    maybe = st.none() | _NUMBER
    return st.builds(
        Feedback,
        event_id=_TEXT,
        suggestion_id=_TEXT,
        kind=st.sampled_from([*_KINDS, "partially_accepted", "persisted"]),
        editor_ms=_NUMBER,
        user=st.sampled_from(["", "u", "v"]),
        accepted_length=maybe,
        superseded_by=st.none() | _TEXT,
        continues=st.none() | _TEXT,
        persisted_s=maybe,
        difference=st.none() | st.floats(),
    )


@settings(max_examples=300)
@given(st.lists(st.booleans() | _crafted(), max_size=30))
def test_crafted_events_stop_nothing(told: list[bool | Feedback]) -> None:
    """Whatever a record says that decodes, it is taken or refused as a record; every suggestion ends once,
    within its bounds, and nothing is left of any of it."""
    pipeline = Pipeline(CONFIG)
    for number, what in enumerate(told):
        record = suggestion("ab"[what], user=["", "u"][number % 2]) if isinstance(what, bool) else what
        with contextlib.suppress(WireError):
            pipeline.send(record)
        if number % 5 == 0:
            pipeline.restart()
    for days in range(1, 9):
        pipeline.advance(days * 86_400_000)
    assert (pipeline.join.open, pipeline.join.open_bytes, pipeline.join.settled) == (0, 0, 0)
    for reward in pipeline.records(REWARDS.name):
        assert -0.25 <= reward.value <= 0.75
    for exposure in pipeline.records(EXPOSURES.name):
        assert 0 <= exposure.accepted <= 1
    assert max(Counter(e.group_id for e in pipeline.records(EXPOSURES.name)).values(), default=1) == 1


@st.composite
def topics(draw: st.DrawFn) -> tuple[list[tuple[int, Record]], list[tuple[int, Record]], list[bool]]:
    """Steps and events of three suggestions with their broker times, each topic in its order, and which of
    the two is read next."""
    names = ["a", "b", "c"]
    steps: list[Record] = [suggestion(name, silent=draw(st.booleans())) for name in names]
    made = sorted(draw(st.integers(0, 40_000)) for _ in steps)
    count = draw(st.integers(0, 12))
    heard = sorted(draw(st.integers(0, 40_000)) for _ in range(count))
    events: list[Record] = []
    for number in range(count):
        name = draw(st.sampled_from(names))
        kind = draw(st.sampled_from([*_KINDS, "partially_accepted", "persisted"]))
        events.append(
            said(
                name,
                kind,
                event=draw(st.sampled_from([f"e{number}", "e0"])),
                accepted_length=draw(st.integers(0, 12)) if kind == "partially_accepted" else None,
                persisted_s=draw(st.sampled_from([30, 600])) if kind == "persisted" else None,
                difference=draw(st.sampled_from([0.0, 0.5])) if kind == "persisted" else None,
                user=draw(st.sampled_from([f"user of {name}"] * 4 + ["stranger"])),
            )
        )
    order = draw(st.permutations([True] * len(steps) + [False] * count))
    return list(zip(made, steps, strict=True)), list(zip(heard, events, strict=True)), order


@settings(max_examples=300)
@given(topics(), st.sampled_from([None, 0, 3_000]), st.integers(1, 4))
def test_any_interleaving_gives_the_same_judgements(
    both: tuple[list[tuple[int, Record]], list[tuple[int, Record]], list[bool]],
    settle_ms: int | None,
    batch: int,
) -> None:
    """However the two topics are read against each other, and wherever the host restarts, each suggestion
    ends once and alike, and so does a replay of the same log."""
    steps, events, order = both
    config = msgspec.structs.replace(CONFIG, settle_ms=settle_ms)
    outcomes = []
    for sequence in (order, sorted(order), sorted(order, reverse=True)):
        pipeline = Pipeline(config)
        left, right = list(steps), list(events)
        for number, from_steps in enumerate(sequence):
            at_ms, record = (left if from_steps else right).pop(0)
            with contextlib.suppress(WireError):
                pipeline.send(record, at_ms=at_ms)
            if number % batch == 0:
                pipeline.restart()
            # What a host knows to be read: up to where both topics stand.
            pipeline.advance(min(topic[0][0] - 1 if topic else 1 << 40 for topic in (left, right)))
        pipeline.advance(1 << 40)
        outcomes.append({name: replace(pipeline.became(name), letters=0) for name in "abc"})
    assert outcomes[0] == outcomes[1] == outcomes[2]
    assert all(outcome.exposed is not None for outcome in outcomes[0].values())


def accepts(user: str, count: int, *, apart_ms: int, first: int = 0) -> list[tuple[int, Judgement]]:
    """Judgements of accepted suggestions, and when each was made."""
    out = []
    for number in range(first, first + count):
        made_ms = number * apart_ms
        exposure = Exposure(
            run="test",
            group_id=f"{user} {number}",
            version=1,
            cohort="",
            user=user,
            region="",
            silent=False,
            shown=True,
            accepted=1.0,
            reward=0.75,
            latency_ms=1,
            opened_ms=made_ms,
            closed_ms=made_ms + 5,
        )
        out.append((made_ms, Judgement(exposure=exposure, attempt=0, outcome="accepted")))
    return out


def verdicts(fold: Fold, given: Iterable[tuple[int, Judgement]]) -> list[str]:
    for offset, (at_ms, judgement) in enumerate(given):
        fold.apply(Event(JUDGEMENTS.name, 0, offset, at_ms, judgement))
    outputs = fold.drain().outputs
    rewards = [o.record for o in outputs if isinstance(o.record, Reward)]
    exposures = [o.record for o in outputs if isinstance(o.record, Exposure)]
    assert [e.quarantined for e in exposures] == [r.verdict == "quarantine" for r in rewards]
    return [reward.verdict for reward in rewards]


def test_who_accepts_fifty_a_second_is_put_into_quarantine() -> None:
    """Ten of a bot's fifty accepts a second pass, then nothing for an hour; a person beside it is not
    touched."""
    fold = Fold(UsersLimit())
    assert Counter(verdicts(fold, accepts("bot", 500, apart_ms=20))) == {"score": 10, "quarantine": 490}
    assert set(verdicts(fold, accepts("person", 100, apart_ms=2_000))) == {"score"}
    assert verdicts(fold, accepts("bot", 1, apart_ms=1_000, first=3_500)) == ["quarantine"]
    assert verdicts(fold, accepts("bot", 1, apart_ms=1_000, first=3_700)) == ["score"]


def test_units_of_a_user_are_limited_by_window() -> None:
    """At one a second, each window of ten minutes takes the first `units_max` of a user."""
    fold = Fold(UsersLimit(UsersConfig(units_max=100)))
    found = verdicts(fold, accepts("u", 1_200, apart_ms=1_000))
    assert [number for number, verdict in enumerate(found) if verdict == "score"] == [
        *range(100),
        *range(600, 700),
    ]


def test_no_order_of_judgements_evades_the_limit() -> None:
    """Suggestions of thirty windows are judged round after round: of each of the newest windows the first two
    count, and of one that is too old to be counted none."""
    fold = Fold(UsersLimit(UsersConfig(units_max=2)))
    rounds = [accepts("u", 30, apart_ms=600_000, first=100 * turn) for turn in range(4)]
    given_ = [
        (
            30 * 600_000,
            msgspec.structs.replace(j, exposure=msgspec.structs.replace(j.exposure, opened_ms=window)),
        )
        for turn in rounds
        for window, (_, j) in zip(range(0, 30 * 600_000, 600_000), turn, strict=True)
    ]
    found = verdicts(fold, given_)
    by_window = Counter(number % 30 for number, verdict in enumerate(found) if verdict == "score")
    assert by_window == {**dict.fromkeys(range(6), 1), **dict.fromkeys(range(6, 30), 2)}


def test_a_join_that_catches_up_flags_nobody() -> None:
    """Time is that of the suggestions: an hour of them that comes in one second is an hour."""
    fold = Fold(UsersLimit())
    late = [(9_000_000, judgement) for _, judgement in accepts("u", 600, apart_ms=6_000)]
    assert set(verdicts(fold, late)) == {"score"}


def test_judgements_that_come_again_change_nothing() -> None:
    """A repeated judgement is neither counted nor sent again; users without a name are not limited; and
    who is silent for two windows is forgotten."""
    fold = Fold(UsersLimit(UsersConfig(units_max=2)))
    [one, two, three] = accepts("u", 3, apart_ms=1_000)
    assert verdicts(fold, [one, one, two, one, three]) == ["score", "score", "quarantine"]
    anonymous = [
        (at_ms, msgspec.structs.replace(j, exposure=msgspec.structs.replace(j.exposure, user="")))
        for at_ms, j in accepts("x", 5, apart_ms=1)
    ]
    assert verdicts(fold, anonymous) == ["score"] * 5
    assert fold.settled == 1
    fold.advance(1_260_000)
    assert fold.settled == 0
