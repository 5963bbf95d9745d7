"""Admission: each reason by one group, and what is withheld from a group that stays."""

import math
import re

import msgspec
import pytest
from trainer_records import MODEL, consumed, experience, pair, rollout

from headrace.errors import WireError
from headrace.trainer.admission import Admission, Entry, admit
from headrace.trainer.sequence import sequence_of
from headrace.wire.records import Experience, Rollout, Span


def _admit(*records: Experience | WireError, version: int = 0, seen: tuple[str, ...] = ()) -> Admission:
    entries = [
        Entry(consumed(r.group_id if isinstance(r, Experience) else "g", offset), r)
        for offset, r in enumerate(records)
    ]
    return admit(
        entries,
        version=version,
        seen=seen,
        model=MODEL,
        lag_versions_max=2,
        sequence_tokens_max=16,
        scale_std=False,
    )


def _reason(record: Experience | WireError, *, version: int = 0) -> str:
    answer = _admit(record, version=version)
    assert not answer.units
    [drop] = answer.drops
    assert drop.member is None
    return drop.reason


def test_a_good_group_is_admitted() -> None:
    """Rewards 1 and 0: advantages +0.5 and -0.5, in the order of the members."""
    answer = _admit(pair("a"))
    [unit] = answer.units
    assert (unit.group_id, unit.advantages, unit.place) == ("a", (0.5, -0.5), "experience[0]@0")
    assert answer.drops == []
    assert answer.rewards == [1.0, 0.0]
    assert answer.read == ["a"]


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (experience("g", [], size=2, closed="failed"), "failed"),
        (experience("g", [rollout(0, 1.0)], size=2, missing=[1], closed="timeout"), "incomplete"),
        (experience("g", [rollout(0, 1.0), rollout(1, None)]), "incomplete"),
        (experience("g", [rollout(0, 1.0), rollout(1, 0.0, whole=False)]), "incomplete"),
        (experience("g", [rollout(0, 1.0), rollout(1, None, quarantined=True)]), "quarantined"),
        (experience("g", [rollout(0, 0.5), rollout(1, 0.5)]), "zero_advantage"),
        (experience("g", [rollout(0, 1.0)]), "zero_advantage"),
        (experience("g", [rollout(0, 1.0, [((), ())]), rollout(1, 0.0, [((), ())])]), "empty"),
        (experience("g", [rollout(0, 1.0), rollout(1, math.nan)]), "malformed"),
        (experience("g", [rollout(0, 1e7), rollout(1, 0.0)]), "malformed"),
        (WireError("Experience: expected a map"), "malformed"),
    ],
)
def test_reasons(record: Experience | WireError, reason: str) -> None:
    """One group, one reason; it is counted with the tokens that were generated for nothing."""
    assert _reason(record) == reason


def test_duplicates_in_a_batch_and_from_before() -> None:
    """The second record of a group has no effect, in one batch or over two."""
    answer = _admit(pair("a"), pair("b"), pair("a"), seen=("b",))
    assert [unit.group_id for unit in answer.units] == ["a"]
    assert [(drop.group_id, drop.reason) for drop in answer.drops] == [("b", "duplicate"), ("a", "duplicate")]
    assert answer.rewards == [1.0, 0.0]


def test_lag_counts_from_the_oldest_span_of_each_member() -> None:
    """At version 4 with a bound of 2, a member of version 1 is withheld and its reward stays in the
    baseline."""
    old = rollout(1, 0.0, [((), (9, 10, 11))], version=1)
    answer = _admit(experience("g", [rollout(0, 1.0, version=2), old, rollout(2, 0.5, version=4)]), version=4)
    [unit] = answer.units
    assert [member.member for member in unit.sequences] == [0, 2]
    assert unit.advantages == (0.5, 0.0)  # the mean of 1, 0 and 0.5 is 0.5
    [drop] = answer.drops
    assert (drop.member, drop.reason, drop.tokens) == (1, "stale", 3)


def test_one_old_span_makes_a_member_stale() -> None:
    """Tokens of versions 1 and 4 in one turn: the turn is as old as version 1."""
    mixed = rollout(0, 1.0, version=4)
    spans = (Span(start=0, end=1, weights_version=1), Span(start=1, end=2, weights_version=4))
    mixed = msgspec.structs.replace(mixed, steps=(msgspec.structs.replace(mixed.steps[0], spans=spans),))
    answer = _admit(experience("g", [mixed, rollout(1, 0.0, version=4)]), version=4)
    assert [member.member for member in answer.units[0].sequences] == [1]


def test_all_members_stale() -> None:
    """Then the group is a drop, at the bound it is not."""
    assert _reason(pair("g", version=1), version=4) == "stale"
    assert len(_admit(pair("g", version=2), version=4).units) == 1


def test_what_the_record_alone_says_comes_before_staleness() -> None:
    """Old and too long is over_long at any version; one member that is only old makes a group stale."""
    long = [rollout(member, float(member), [((), range(9, 22))], version=1) for member in (0, 1)]
    assert {_reason(experience("g", long), version=version) for version in (1, 4)} == {"over_long"}
    assert _reason(experience("g", [long[0], rollout(1, 1.0, version=1)]), version=4) == "stale"


def test_tokens_from_the_future_are_refused() -> None:
    """A version above ours is of another incarnation of the run: never a negative lag."""
    answer = _admit(pair("g", version=3), version=2)
    [(_, error)] = answer.malformed
    assert "expected versions up to 2, got 3" in str(error)


def test_a_member_over_the_length_is_withheld() -> None:
    """16 tokens are allowed: 4 of the prompt and 13 of its own are one too many."""
    long = rollout(0, 1.0, [((), range(9, 22))])
    fitting = rollout(1, 0.0, [((), range(9, 21))])
    answer = _admit(experience("g", [long, fitting]))
    assert [member.member for member in answer.units[0].sequences] == [1]
    assert [(drop.member, drop.reason) for drop in answer.drops] == [(0, "over_long")]


def test_an_empty_member_counts_in_the_baseline() -> None:
    """Nothing to withhold, so no drop; its reward moves the mean."""
    answer = _admit(experience("g", [rollout(0, 1.0), rollout(1, 0.0, [((), ())])]))
    assert answer.units[0].advantages == (0.5,)
    assert answer.drops == []


def _changed(changes: dict[str, object]) -> Rollout:
    whole = rollout(0, 1.0, [((), (9, 10)), ((12,), (13,))], routes=True)
    return msgspec.structs.replace(
        whole, steps=(msgspec.structs.replace(whole.steps[0], **changes), *whole.steps[1:])
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logp": b"\0" * 4}, "member 0: step 0: logp: expected 2 values of 4 bytes, got 4 bytes"),
        ({"logp": b"\0\0\x80\x7f" * 2}, "logp: expected finite values of at most 0"),
        ({"loss_mask": b"\1"}, "loss_mask: expected 2 times 0 or 1, got 1 values"),
        ({"tokens_out": b"\x40\0\0\0" * 2}, "tokens_out: expected ids below 64, got 64"),
        ({"tokens_out": b"abc"}, "tokens_out: expected 4 bytes a token, got 3 bytes"),
        ({"spans": ()}, "spans: expected to cover 2 tokens, got 0"),
        ({"spans": (Span(start=1, end=2, weights_version=0),)}, "spans: expected one from 0"),
        ({"routes_shape": (4, 2, 2)}, r"routes: expected \(5, 2, 2\) .*, got \(4, 2, 2\)"),
        ({"routes": bytes(20)}, "expected different experts below 4, got 0 outside and 10 repeated of 20"),
        ({"routes": bytes([1, 9] * 10)}, "got 10 outside and 0 repeated of 20"),
        ({"routes": bytes(7)}, "expected 1 or 2 bytes a choice"),
        ({"routes_start": 1}, "routes: expected to start at token 0, got 1"),
        ({"base_length": 1}, "step 0: base_length: expected 0, got 1"),
        ({"temperature": 0.0}, "temperature"),
        ({"segment": 1}, "segment: expected 0, got 1"),
        ({"attempt": 2}, "attempt: expected 1, got 2"),
        ({"last": True}, "last: expected False, got True"),
        ({"prefix_length": 9}, "prefix_length: expected 9, got 4"),
    ],
)
def test_contradictory_counts_are_refused(changes: dict[str, object], message: str) -> None:
    """The reason names the member, the step and both counts."""
    answer = _admit(experience("g", [_changed(changes), rollout(1, 0.0)]))
    [(_, error)] = answer.malformed
    assert re.search(message, str(error)), error
    assert [drop.reason for drop in answer.drops] == ["malformed"]
    assert answer.read == []


@pytest.mark.parametrize(
    "changes",
    [
        {"weights_version": 2**64 - 1},
        {"weights_version": -1},
        {"spans": (Span(start=0, end=2, weights_version=2**64 - 1),)},
        {"temperature": 1e-300},
        {"temperature": 1e300},
    ],
)
def test_numbers_that_no_step_can_calculate_with(changes: dict[str, object]) -> None:
    """In both members, so that nothing but the number is wrong: one record must not stop the trainer."""
    members = [rollout(0, 1.0), rollout(1, 0.0)]
    changed = [
        msgspec.structs.replace(m, steps=(msgspec.structs.replace(m.steps[0], **changes),)) for m in members
    ]
    assert _reason(experience("g", changed)) == "malformed"


def test_members_of_one_group_share_their_prompt() -> None:
    """Another prompt, or another temperature, in a group is no group."""
    other = rollout(1, 0.0, prefix=(5, 6, 7, 9))
    assert _reason(experience("g", [rollout(0, 1.0), other])) == "malformed"
    assert _reason(experience("g", [rollout(0, 1.0), rollout(1, 0.0, temperature=0.7)])) == "malformed"
    assert _reason(experience("g", [rollout(0, 1.0), rollout(0, 0.0)])) == "malformed"


def test_sequence_of_two_turns() -> None:
    """Tokens are appended in order, only generated ones are trained, routes end before the last output."""
    two = rollout(0, 1.0, [((), (9, 10)), ((12, 13), (14,))], routes=True, logp=-2.0)
    [unit] = _admit(experience("g", [two, rollout(1, 0.0)])).units
    member = unit.sequences[0]
    assert member.prefix_P.tolist() == [5, 6, 7, 8]
    assert member.own_T.tolist() == [9, 10, 12, 13, 14]
    assert member.trained_T.tolist() == [True, True, False, False, True]
    assert member.logp_T.tolist() == [-2.0, -2.0, 0.0, 0.0, -2.0]
    assert member.version_T.tolist() == [0, 0, -1, -1, 0]
    assert member.routes_SLK is not None
    assert member.routes_SLK[:, 0].tolist() == [[1, 3]] * 8 + [[255, 255]]
    assert unit.sequences[1].routes_SLK is None


def test_the_oldest_weights_behind_a_token() -> None:
    """Versions 3 3 | 4 in a turn that began at 3, then a turn wholly at 5: behind every token is 3, for its
    keys, values or recorded routes are; a member that began at 5 has 5."""
    old = rollout(0, 1.0, [((), (9, 10, 11)), ((12, 13), (14,))], version=3)
    first, second = old.steps
    spans = (Span(start=0, end=2, weights_version=3), Span(start=2, end=3, weights_version=4))
    second = msgspec.structs.replace(
        second, spans=(Span(start=0, end=1, weights_version=5),), weights_version=5
    )
    old = msgspec.structs.replace(old, steps=(msgspec.structs.replace(first, spans=spans), second))
    member = sequence_of(old, MODEL)
    assert member.version_T.tolist() == [3, 3, 4, -1, -1, 5]
    assert member.context_version_T.tolist() == [3, 3, 3, -1, -1, 3]
    assert member.prefix_version == 3
    assert sequence_of(rollout(1, 0.0, version=5), MODEL).context_version_T.tolist() == [5, 5]
    late = msgspec.structs.replace(first, spans=(Span(start=0, end=3, weights_version=4),))
    began_before = sequence_of(msgspec.structs.replace(old, steps=(late, second)), MODEL)
    assert began_before.context_version_T.tolist() == [3, 3, 3, -1, -1, 3]
