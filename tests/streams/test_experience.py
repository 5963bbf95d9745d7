"""The experience join alone, without any host: scenarios, limits, and any order of the same records."""

from collections.abc import Sequence

import msgspec
import pytest
from feedback_records import suggestion
from hypothesis import given, settings
from hypothesis import strategies as st
from stream_records import DEADLINE_MS, failed, prompt, reward, rollout, step
from stream_scenarios import SCENARIOS, Expected, Scenario, judged

from headrace.errors import WireError
from headrace.streams.experience import ExperienceConfig, ExperienceJoin
from headrace.streams.fold import Fold
from headrace.streams.group import LIVE_MS
from headrace.streams.processor import Event
from headrace.wire.records import Experience, Record, Span

CONFIG = ExperienceConfig(closed_memory_ms=10_000, orphan_ms=5_000)


def feed(fold: Fold, records: Sequence[Record], *, at_ms: int = 0) -> list[Experience]:
    """Applies `records`, one millisecond apart, and returns what came out."""
    for index, record in enumerate(records):
        fold.apply(Event("t", 0, index, at_ms + index, record))
    return drained(fold)


def drained(fold: Fold) -> list[Experience]:
    outputs = fold.drain().outputs
    assert all(output.key == output.event_id == output.record.group_id for output in outputs)  # type: ignore[attr-defined]
    return [output.record for output in outputs if isinstance(output.record, Experience)]


def advance(fold: Fold, now_ms: int) -> list[Experience]:
    while fold.advance(now_ms):
        pass
    return drained(fold)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_scenarios(scenario: Scenario) -> None:
    """The processor closes each group as the scenario says, once, and what comes later changes nothing."""
    fold = Fold(ExperienceJoin(CONFIG))
    deadline_ms = scenario.deadline_in_ms
    closed_ms = deadline_ms if scenario.expected.closed == "timeout" else 1_000
    out = feed(fold, scenario.records("g", deadline_ms))
    if scenario.expected.closed == "timeout":
        assert out == advance(fold, deadline_ms) == []
        out = advance(fold, deadline_ms + 1)
    elif scenario.expected.closed == "failed":
        assert out == []
        out = advance(fold, closed_ms)
    assert [Expected.of(experience) for experience in out] == [scenario.expected]
    assert feed(fold, scenario.after("g", deadline_ms), at_ms=closed_ms + 1_000) == []
    assert fold.counts["late"] == scenario.late
    assert (fold.open, fold.settled) == (0, 1)


def test_closed_groups_are_forgotten() -> None:
    """A closed group leaves nothing in memory or in the changelog after `closed_memory_ms`."""
    fold = Fold(ExperienceJoin(CONFIG))
    feed(fold, [prompt("g", size=1), *rollout("g", 0)])
    assert advance(fold, 4 + CONFIG.closed_memory_ms - 1) == []
    assert fold.settled == 1
    fold.advance(4 + CONFIG.closed_memory_ms)
    assert fold.drain().entries == [(b"g", None)]
    assert (fold.open, fold.settled, fold.open_bytes) == (0, 0, 0)


def test_deadline_is_inclusive() -> None:
    """The last reward at the deadline counts; one millisecond later it is late, though no timer has fired
    yet."""
    for at_ms, closed in ((DEADLINE_MS, "complete"), (DEADLINE_MS + 1, "timeout")):
        fold = Fold(ExperienceJoin(CONFIG))
        *most, last = rollout("g", 0)
        feed(fold, [prompt("g", size=1), *most])
        out = feed(fold, [last], at_ms=at_ms) + advance(fold, DEADLINE_MS + 1)
        assert [experience.closed for experience in out] == [closed]


def test_early_records_past_the_deadline_do_not_count() -> None:
    """A reward read before its Prompt, yet appended after the deadline, is not part of the group."""
    fold = Fold(ExperienceJoin(CONFIG))
    *most, last = rollout("g", 0)
    feed(fold, [last], at_ms=DEADLINE_MS + 1)
    feed(fold, [prompt("g", size=1), *most])
    (experience,) = advance(fold, DEADLINE_MS + 1)
    assert (experience.closed, experience.rollouts[0].reward) == ("timeout", None)


def test_live_suggestion_says_what_a_prompt_would() -> None:
    """A live group carries user, region and version of its one step, and goes out on its own topic; a claim
    to be live changes nothing for a group that a Prompt announced."""
    fold = Fold(ExperienceJoin(CONFIG))
    fold.apply(Event("t", 0, 0, 5, suggestion("s", user="u")))
    fold.apply(Event("t", 0, 1, 9, judged("s", 0.75)))
    (output,) = fold.drain().outputs
    live = output.record
    assert isinstance(live, Experience) and output.topic == "experience.live"
    assert (live.source, live.env, live.task_id, live.group_size) == ("live", "live", "", 1)
    assert (live.user, live.region, live.admitted_version) == ("u", "far", 3)
    assert (live.opened_ms, live.closed_ms) == (5, 9)
    fold.apply(Event("t", 0, 2, 10, prompt("g", size=1)))
    fold.apply(Event("t", 0, 3, 11, suggestion("g")))
    fold.apply(Event("t", 0, 4, 12, judged("g", 0.75)))
    assert not fold.drain().outputs
    for component in ("tests", "format"):
        fold.apply(Event("t", 0, 5, 13, reward("g", 0, component, 1.0, attempt=0)))
    assert [output.topic for output in fold.drain().outputs] == ["experience"]


def test_live_suggestion_waits_for_its_judgement() -> None:
    """Without a judgement a live group ends six hours after its step; one that the log took later is late,
    in whatever order both are read."""
    records: Arrivals = [(0, suggestion("s")), (LIVE_MS + 1, judged("s", 1.0))]
    for order in (records, records[::-1]):
        fold = Fold(ExperienceJoin(ExperienceConfig(orphan_ms=LIVE_MS * 2)))
        for at_ms, record in order:
            fold.apply(Event("t", 0, 0, at_ms, record))
        assert not fold.drain().outputs
        assert advance(fold, LIVE_MS) == []
        (live,) = advance(fold, LIVE_MS + 1)
        assert (live.closed, live.missing, live.closed_ms) == ("timeout", (0,), LIVE_MS)


def test_closed_suggestion_is_forgotten_sooner() -> None:
    """Of a live group only `live_memory_ms` is remembered: they are many, and nobody rolls them out again."""
    fold = Fold(ExperienceJoin(ExperienceConfig(live_memory_ms=100)))
    feed(fold, [suggestion("s"), judged("s", 1.0), prompt("g", size=1), *rollout("g", 0)])
    advance(fold, 101)
    assert fold.settled == 1


def test_groups_that_end_together_leave_in_order() -> None:
    """Groups of one deadline go out in the order of their names, whichever came first."""
    fold = Fold(ExperienceJoin(CONFIG))
    feed(fold, [prompt("c"), prompt("a"), prompt("b")])
    assert [e.group_id for e in advance(fold, DEADLINE_MS + 1)] == ["a", "b", "c"]


def test_times() -> None:
    """A group opens with its first record and closes with its last; a timeout closes at the deadline, however
    late it fires."""
    fold = Fold(ExperienceJoin(CONFIG))
    (whole,) = feed(fold, [prompt("a", size=1), *rollout("a", 0)], at_ms=100)
    assert (whole.opened_ms, whole.closed_ms, whole.admitted_version) == (100, 104, 3)
    feed(fold, [prompt("b")], at_ms=200)
    (late,) = advance(fold, DEADLINE_MS + 9_999)
    assert (late.opened_ms, late.closed_ms) == (200, DEADLINE_MS)


def test_no_prompt() -> None:
    """Steps whose Prompt never comes are accounted as failed, with the members that were seen."""
    fold = Fold(ExperienceJoin(CONFIG))
    assert feed(fold, [step("g", 3, 0), reward("g", 3, "tests", 1.0)]) == []
    assert advance(fold, 5_000) == []
    (experience,) = advance(fold, 5_001)
    assert (experience.closed, experience.reason) == ("failed", "no prompt came within 5000 ms")
    assert (experience.group_size, experience.missing, experience.env) == (1, (3,), "")


def test_a_late_prompt_is_waited_for_by_its_own_deadline() -> None:
    """Once the Prompt is there, the wait for it no longer counts."""
    fold = Fold(ExperienceJoin(CONFIG))
    feed(fold, [step("g", 0, 0), prompt("g", size=1)])
    assert advance(fold, DEADLINE_MS) == []
    assert [experience.closed for experience in advance(fold, DEADLINE_MS + 1)] == ["timeout"]


def test_group_over_its_bytes() -> None:
    """A group over `group_bytes_max` goes out failed and without rollouts, and stays closed."""
    fold = Fold(ExperienceJoin(ExperienceConfig(group_bytes_max=10_000)))
    out = feed(fold, [prompt("g"), step("g", 0, 0, tokens=1000), step("g", 1, 0), step("g", 1, 1, last=True)])
    assert [(e.closed, e.rollouts, e.missing) for e in out] == [("failed", (), (0, 1))]
    assert "at most 10000 bytes" in out[0].reason
    assert fold.counts["late"] == 2


@pytest.mark.parametrize(
    "record",
    [
        msgspec.structs.replace(prompt("g"), task_id="x" * 20_000),
        msgspec.structs.replace(step("g", 0, 0), spans=(Span(start=0, end=0, weights_version=0),) * 1000),
        step("g", 0, 0, worker="x" * 20_000),
        msgspec.structs.replace(failed("g"), reason="x" * 20_000),
    ],
)
def test_every_field_counts_against_the_bound(record: Record) -> None:
    """20 kB in any field of a record pass a bound of 10 kB: the group goes out at once."""
    fold = Fold(ExperienceJoin(ExperienceConfig(group_bytes_max=10_000)))
    [out] = feed(fold, [record])
    assert out.closed == "failed" and "at most 10000 bytes" in out.reason


def test_partition_over_its_groups_and_bytes() -> None:
    """The group that comes over the limits of a partition goes out failed; those that were there go on."""
    fold = Fold(ExperienceJoin(ExperienceConfig(open_groups_max=2)))
    out = feed(fold, [prompt("a"), prompt("b"), prompt("c"), step("a", 0, 0)])
    assert [(e.group_id, e.closed, e.reason) for e in out] == [
        ("c", "failed", "more than 2 open groups in a partition")
    ]
    assert fold.open == 2
    fold = Fold(ExperienceJoin(ExperienceConfig(open_bytes_max=3_000)))
    out = feed(fold, [prompt("a"), step("a", 0, 0), prompt("b"), step("b", 0, 0)])
    assert [(e.group_id, e.closed) for e in out] == [("b", "failed")]
    assert fold.open_bytes == 500 + 1000 + 2 * 13


def test_closed_groups_are_bounded() -> None:
    """Over `closed_groups_max` the oldest are forgotten first."""
    fold = Fold(ExperienceJoin(ExperienceConfig(closed_groups_max=2)))
    for group in "abc":
        feed(fold, [prompt(group, size=1), *rollout(group, 0)])
    assert (fold.settled, fold.counts["forgotten_early"]) == (2, 1)
    feed(fold, [step("b", 0, 0), step("a", 0, 0)])
    assert (fold.counts["late"], fold.open) == (1, 1)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (prompt("g", size=0), "group_size: expected 1 to 65536, got 0"),
        (prompt("g", size=1 << 30), "group_size"),
        (prompt("g", deadline_ms=2**64 - 1), "deadline_ms: expected at most"),
        (prompt("g", components={}), "components: expected at least one"),
        (prompt("g", components={"tests": float("nan")}), "components: expected finite weights"),
        (step("g", -1, 0), "member: expected 0 to"),
        (suggestion("g", member=1), "live step: expected member 0, step 0, last, got"),
        (step("g", 0, -1), "step: expected at least 0"),
        (msgspec.structs.replace(step("g", 0, 0), logp=b"1234"), "tokens_out, logp, loss_mask"),
        (
            msgspec.structs.replace(step("g", 0, 0), routes=b"1", routes_shape=(4, 1, 1)),
            "routes_shape: expected 3 tokens",
        ),
        (
            msgspec.structs.replace(step("g", 0, 0), routes=b"1", routes_shape=(3, 1, 2)),
            r"routes: expected u8 or u16",
        ),
        (reward("g", 0, "tests", float("nan")), "value of tests"),
        (reward("g", 0, "tests", 1.5), "value of tests: expected 0.0 to 1.0, got 1.5"),
        (step("", 0, 0), "key: expected 1 to 500 bytes"),
        (step("g\0", 0, 0), "key: expected 1 to 500 bytes"),
    ],
)
def test_nonsense_is_refused(record: Record, message: str) -> None:
    """A record that decodes and makes no sense is refused with what was expected, and leaves no trace."""
    fold = Fold(ExperienceJoin(CONFIG))
    with pytest.raises(WireError, match=message):
        feed(fold, [record])
    assert (fold.open, fold.open_bytes, fold.counts["in"]) == (0, 0, 0)
    assert not fold.drain()


def test_member_outside_its_group() -> None:
    """A member number that the Prompt did not ask for is refused."""
    fold = Fold(ExperienceJoin(CONFIG))
    with pytest.raises(WireError, match="member: expected 0 to 1, got 2"):
        feed(fold, [prompt("g", size=2), step("g", 2, 0)])


Arrivals = Sequence[tuple[int, Record]]


@st.composite
def arrivals(draw: st.DrawFn) -> tuple[Arrivals, Arrivals]:
    """The records of one group with their broker times, some of them missing, and the same read in another
    order with repetitions. The deadline, and sometimes a failure, lie anywhere among them."""
    deadline_ms = draw(st.integers(1, 20))
    records: list[Record] = [record for member in range(3) for record in rollout("g", member)]
    if draw(st.booleans()):  # who gives a group up has not finished it
        records.remove(draw(st.sampled_from(records)))
        records.insert(draw(st.integers(0, len(records))), failed("g"))
    timed = list(enumerate([prompt("g", size=3, deadline_ms=deadline_ms), *records]))
    timed = [arrival for arrival in timed if draw(st.integers(0, 9))] or timed
    return timed, draw(st.permutations(timed + draw(st.lists(st.sampled_from(timed), max_size=6))))


@settings(max_examples=300)
@given(arrivals())
def test_any_order_gives_the_same_outcome(both: tuple[Arrivals, Arrivals]) -> None:
    """In whatever order equal records are read, and however often, they close to the same experience,
    once."""
    outcomes = []
    for records in both:
        fold = Fold(ExperienceJoin(ExperienceConfig(orphan_ms=DEADLINE_MS)))
        for at_ms, record in records:
            fold.apply(Event("t", 0, 0, at_ms, record))
        (experience,) = drained(fold) + advance(fold, 2 * DEADLINE_MS)
        outcomes.append(experience)
    assert outcomes[0] == outcomes[1]


_EVENTS = [
    prompt("g"),
    *(record for attempt in (1, 2) for member in (0, 1) for record in rollout("g", member, attempt=attempt)),
    failed("g", attempt=1),
    failed("g", attempt=2),
]


@settings(max_examples=300)
@given(st.lists(st.sampled_from(_EVENTS), min_size=1, max_size=30))
def test_invariants_of_two_attempts(records: list[Record]) -> None:
    """A group closes exactly once; no rollout mixes attempts; complete means every member whole and rewarded;
    no reward is invented."""
    fold = Fold(ExperienceJoin(ExperienceConfig(orphan_ms=DEADLINE_MS)))
    (experience,) = feed(fold, records) + advance(fold, 2 * DEADLINE_MS)
    for part in experience.rollouts:
        assert {step.attempt for step in part.steps} == {part.attempt}
        assert part.whole == ([step.step for step in part.steps] == [0, 1])
        given_rewards = {"tests", "format"} <= part.components.keys() and experience.env
        assert part.reward == (1.5 if given_rewards else None)
    if experience.closed == "complete":
        assert experience.missing == () and [part.member for part in experience.rollouts] == [0, 1]
        assert all(part.whole and part.reward == 1.5 for part in experience.rollouts)
    assert fold.open == 0
