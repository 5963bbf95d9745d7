"""`headrace account`: both sides agree on a log of every outcome, and every planted untruth is found."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import account_log as log
import msgspec
import pytest
from account_log import Change, answer, broken, closed, group, made
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from headrace.bus.protocol import Message
from headrace.cli import main
from headrace.cli.account import Account
from headrace.cli.accounts import TRAINABLE, Answer, Comparison, LedgerSide, Origin, TopicsSide, compare
from headrace.cli.accounts_verdict import verdict
from headrace.cli.lengths import fisher_greater, length_test
from headrace.wire import records as r

replace = msgspec.structs.replace
LIMIT = ("--run.name", "sample", "--trainer.sequence_tokens_max", str(log.TOKENS_MAX))


def told(address: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    code = main(["account", "--bus", address, *LIMIT, "--json"])
    return code, json.loads(capsys.readouterr().out)


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    return made(tmp_path_factory.mktemp("log") / "log")


def test_every_outcome_is_the_same_on_both_sides(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    """15 units in = 3 trained + 7 dropped + 5 in flight; 0 comes twice, 6 is unreadable first."""
    code, document = told(address, capsys)
    assert (code, document["equal"], document["differences"]) == (0, True, [])
    assert document["outcomes"] == {
        "trained": 3,
        "zero_advantage": 1,
        "incomplete": 2,
        "failed": 1,
        "quarantined": 1,
        "over_long": 1,
        "stale": 1,
    }
    assert document["outcomes_by_topics"] == {
        TRAINABLE: 4,
        "zero_advantage": 1,
        "incomplete": 2,
        "failed": 1,
        "quarantined": 1,
        "over_long": 1,
    }
    assert (document["units_in"], document["prompts"], document["duplicates"]) == (15, 15, 1)
    assert {row["stage"]: row["units"] for row in document["in_flight"]} == {
        "waiting in prompts": 1,
        "being rolled out": 1,
        "being judged": 1,
        "judged, not yet closed": 1,
        "given up, not yet closed": 1,
    }
    assert document["withheld"] == {"over_long": {"members": 1, "tokens": 38}}
    cells = {
        (c["region"], c["tokens_up_to"], c["outcome"]): (c["ledger"], c["topics"]) for c in document["cells"]
    }
    assert cells["eu", 64, "over_long"] == (1, 1)
    assert cells["us", 64, TRAINABLE] == (1, 1)


def test_the_screen(
    address: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fits 80 columns, says the sum and that it is equal."""
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["account", "--bus", address, *LIMIT]) == 0
    screen = capsys.readouterr().out
    assert max(map(len, screen.splitlines())) <= 80
    assert "15 units in = 3 trained + 7 dropped + 5 in flight" in screen
    assert "EQUAL" in screen and "33-64" in screen


def drop_of(step: r.TrainStep, reason: str) -> r.Drop:
    return next(drop for drop in step.drops if drop.reason == reason)


def trains_again(ledger: list[r.TrainStep]) -> list[r.TrainStep]:
    """The duplicate of group 0 was trained."""
    first = ledger[0]
    drops = tuple(drop for drop in first.drops if drop.reason != "duplicate")
    return [replace(first, admitted=(group(0), group(0)), drops=drops), *ledger[1:]]


def trains_in_a_later_step(ledger: list[r.TrainStep]) -> list[r.TrainStep]:
    last = ledger[2]
    return [
        *ledger[:2],
        replace(last, admitted=(*last.admitted, group(0)), consumed=(*last.consumed, ledger[0].consumed[0])),
    ]


def skips_a_record(ledger: list[r.TrainStep]) -> list[r.TrainStep]:
    """Group 1 was neither read nor answered."""
    first = ledger[0]
    return [
        replace(
            first,
            consumed=tuple(c for c in first.consumed if c.group_id != group(1)),
            drops=tuple(d for d in first.drops if d.group_id != group(1)),
        ),
        *ledger[1:],
    ]


def gives_no_answer(ledger: list[r.TrainStep]) -> list[r.TrainStep]:
    return [replace(ledger[0], drops=ledger[0].drops[1:]), *ledger[1:]]


def answers_what_it_did_not_read(ledger: list[r.TrainStep]) -> list[r.TrainStep]:
    return [*ledger[:2], replace(ledger[2], admitted=(*ledger[2].admitted, group(12)))]


def gives_another_reason(ledger: list[r.TrainStep]) -> list[r.TrainStep]:
    """Zero advantage is called a failure."""
    first = ledger[0]
    drops = tuple(replace(d, reason="failed") if d.reason == "zero_advantage" else d for d in first.drops)
    return [replace(first, drops=drops), *ledger[1:]]


def calls_the_over_long_stale(ledger: list[r.TrainStep]) -> list[r.TrainStep]:
    """Which would hide that the long ones were lost."""
    second = ledger[1]
    drops = tuple(replace(d, reason="stale") if d.reason == "over_long" else d for d in second.drops)
    return [ledger[0], replace(second, drops=drops), ledger[2]]


def counts_it_elsewhere(ledger: list[r.TrainStep]) -> list[r.TrainStep]:
    first = ledger[0]
    consumed = (replace(first.consumed[0], region="asia"), *first.consumed[1:])
    return [replace(first, consumed=consumed), *ledger[1:]]


def counts_it_short(ledger: list[r.TrainStep]) -> list[r.TrainStep]:
    last = ledger[2]
    consumed = tuple(replace(c, tokens=2) if c.group_id == group(8) else c for c in last.consumed)
    return [*ledger[:2], replace(last, consumed=consumed)]


def names_another_offset(ledger: list[r.TrainStep]) -> list[r.TrainStep]:
    first = ledger[0]
    consumed = (first.consumed[0], replace(first.consumed[1], offset=2), *first.consumed[2:])
    return [replace(first, consumed=consumed), *ledger[1:]]


def has_a_hole(ledger: list[r.TrainStep]) -> list[r.TrainStep]:
    return [ledger[0], ledger[2]]


def ends_elsewhere(ledger: list[r.TrainStep]) -> list[r.TrainStep]:
    return [*ledger[:2], replace(ledger[2], positions={"experience/0": 99})]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (trains_again, "says trained and trained"),
        (trains_in_a_later_step, "trained in step 1 of the ledger, and trained in step 3"),
        (skips_a_record, f"{group(1)}: topics: zero_advantage (experience[0]@1); the ledger has no answer"),
        (gives_no_answer, "consumed 1 records of it and answered 0: nothing"),
        (answers_what_it_did_not_read, "consumed 0 records of it and answered 1: trained"),
        (gives_another_reason, f"{group(1)}: ledger: failed in step 1; topics: zero_advantage"),
        (calls_the_over_long_stale, f"{group(5)}: ledger: stale in step 2; topics: over_long"),
        (counts_it_elsewhere, "asia, 2 tokens"),
        (counts_it_short, "us, 38 tokens"),
        (names_another_offset, "experience[0]@2 in step 1; topics: experience[0]@1"),
        (has_a_hole, "expected step 2 of the ledger, found step 3"),
        (ends_elsewhere, "ledger ends at 99, the trainer's group committed 12"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_an_untrue_ledger_is_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: Change, said: str
) -> None:
    """Exit code 1, and the unit, the step and the place are named."""
    code, document = told(made(tmp_path / "log", change=change), capsys)
    assert (code, document["equal"]) == (1, False)
    assert any(said in text for text in document["differences"]), document["differences"]


@pytest.mark.parametrize(
    ("forged", "said"),
    [
        (closed(1, (0.5, 0.25)), f"{group(1)}: ledger: zero_advantage in step 1; topics: {TRAINABLE}"),
        (broken(closed(0)), f"{group(0)}: ledger: experience[0]@0 in step 1; topics: experience[0]@3"),
        (closed(0, tokens=(2, 9)), "doctest, us, 9 tokens"),
        (log.lone(0), f"{group(0)}: ledger: trained in step 1; topics: incomplete"),
    ],
    ids=["reward", "arrays", "length", "member"],
)
def test_an_altered_record_is_found(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    forged: r.Experience,
    said: str,
) -> None:
    """The ledger was written of another record than the one that lies there now."""
    honest = answer(log.answered())
    monkeypatch.setattr(log, "answer", lambda steps: honest)
    steps = log.answered()
    steps[0][int(forged.group_id[-7:])] = forged
    code, document = told(made(tmp_path / "log", steps=steps), capsys)
    assert code == 1
    assert any(said in text for text in document["differences"]), document["differences"]


def test_read_and_not_answered(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A position committed past a record that no step answered: an aborted step that was counted."""
    address = made(tmp_path / "log", unread=[closed(20)], committed=13)
    code, document = told(address, capsys)
    assert code == 1
    assert (
        f"{group(20)}: topics: {TRAINABLE} (experience[0]@12); the ledger has no answer"
        in document["differences"]
    )


def test_closed_and_unread_is_in_flight(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A group behind the committed position waits for the trainer, with its length known."""
    code, document = told(made(tmp_path / "log", unread=[closed(20)], others=()), capsys)
    assert code == 0
    assert [(row["stage"], row["tokens_up_to"]) for row in document["in_flight"]] == [
        ("closed, not yet trained", 8)
    ]


def test_bytes_that_nobody_can_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An undecodable record is malformed on both sides; one that only the topics have is a difference."""
    junk = Message("experience", group(30).encode(), b"\xc1", (), 0)

    def consumes(ledger: list[r.TrainStep]) -> list[r.TrainStep]:
        last = ledger[-1]
        consumed = r.Consumed(topic="experience", partition=0, offset=12, group_id=group(30))
        return [
            *ledger[:-1],
            replace(
                last,
                consumed=(*last.consumed, consumed),
                drops=(*last.drops, r.Drop(group_id=group(30), reason="malformed")),
                positions={"experience/0": 13},
            ),
        ]

    code, document = told(made(tmp_path / "a", extra=[junk], change=consumes, committed=13), capsys)
    assert (code, document["outcomes"]["malformed"]) == (0, 1)
    code, document = told(made(tmp_path / "b", extra=[junk], committed=13), capsys)
    assert code == 1


def test_a_ledger_that_does_not_say_where_units_come_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Older ledgers: environment, region and length are those of the records, and that is told."""

    def older(ledger: list[r.TrainStep]) -> list[r.TrainStep]:
        return [
            replace(step, consumed=tuple(replace(c, env="", region="", tokens=0) for c in step.consumed))
            for step in ledger
        ]

    code, document = told(made(tmp_path / "log", change=older), capsys)
    assert (code, document["origin_from_records"]) == (0, 10)
    assert {cell["region"] for cell in document["cells"]} == {"us", "eu"}


def test_what_retention_took_is_the_ledgers_word_alone() -> None:
    """A unit whose record lies before the oldest kept one is not compared; one that should be there is."""
    origin = Origin("sim", "doctest", "us", 2)
    ledger = LedgerSide(steps=1, answers={"a": Answer("trained", origin, "experience[3]@4", 1)})
    topics = TopicsSide(begins={"experience/3": 5}, in_flight={"a": ("waiting in prompts", origin)})
    found = compare(ledger, topics)
    assert (found.equal, found.gone, topics.in_flight) == (True, 1, {})
    kept = dataclasses.replace(topics, begins={"experience/3": 4})
    assert not compare(ledger, kept).equal


def test_an_unknown_run(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Names the runs of the log."""
    assert main(["account", "--bus", address, "--run.name", "simple"]) == 2
    assert "did you mean 'sample'?" in capsys.readouterr().err


def harmed(record: r.Experience, harm: str) -> r.Experience:
    """`record` with one thing wrong in its first member."""
    first = record.rollouts[0]
    count = len(first.steps[0].tokens_out) // 4
    wrong: dict[str, Any] = {
        "tokens_in": first.steps[0].tokens_in[:-1],
        "tokens_out": b"\1",
        "logp": b"\0\0\x80\x7f" * count,
        "loss_mask": b"\2" * count,
        "spans": (r.Span(start=0, end=count + 1, weights_version=0),),
        "last": False,
        "member": 7,
        "attempt": 9,
        "step": 1,
        "segment": 1,
        "base_length": 1,
        "prefix_length": 9,
        "temperature": 0.0,
        "weights_version": -1,
    }
    steps = (replace(first.steps[0], **{harm: wrong[harm]}),)
    return replace(record, rollouts=(replace(first, steps=steps), *record.rollouts[1:]))


HARMS = [
    "tokens_in",
    "tokens_out",
    "logp",
    "loss_mask",
    "spans",
    "last",
    "member",
    "attempt",
    "step",
    "segment",
    "base_length",
    "prefix_length",
    "temperature",
    "weights_version",
]


def by_trainer(record: r.Experience) -> str:
    [step], _ = answer([[record]])
    return TRAINABLE if step.admitted else step.drops[0].reason


@pytest.mark.parametrize("harm", HARMS)
def test_each_harm_is_malformed_to_both(harm: str) -> None:
    """One wrong field in an otherwise good group."""
    record = harmed(closed(0), harm)
    assert by_trainer(record) == "malformed"
    assert verdict(record, sequence_tokens_max=log.TOKENS_MAX) == "malformed"


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        ("never_shown", "never_shown"),
        ("superseded", "superseded"),
        ("continues sample-live-7", "continued"),
        ("the sandbox died", "failed"),
        ("", "failed"),
    ],
)
def test_what_nobody_could_judge_is_no_failure(reason: str, expected: str) -> None:
    """A suggestion that was not shown, typed over or typed through has an outcome of its own, to both."""
    record = replace(closed(0, how="failed"), source="live", group_size=1, reason=reason)
    assert by_trainer(record) == verdict(record, sequence_tokens_max=log.TOKENS_MAX) == expected


def test_the_bound_on_length_is_the_same_to_both() -> None:
    """40 tokens are allowed, prompt included: 37 generated pass, 38 do not."""
    for tokens, expected in ((37, TRAINABLE), (38, "over_long")):
        record = closed(0, tokens=(tokens, tokens))
        assert by_trainer(record) == verdict(record, sequence_tokens_max=log.TOKENS_MAX) == expected


rewards = st.sampled_from([0.0, 0.5, 0.5 + 1e-12, 1.0, 2e6, float("nan"), None])


@hypothesis_settings(max_examples=150)
@given(
    st.lists(rewards, min_size=2, max_size=2),
    st.lists(st.sampled_from([0, 2, 37, 38]), min_size=2, max_size=2),
    st.sampled_from(["complete", "complete", "timeout", "failed"]),
    st.booleans(),
    st.sampled_from(["", "", "logp", "last"]),
    st.integers(1, 2),
)
def test_both_implementations_judge_alike(
    given_rewards: list[float | None],
    tokens: list[int],
    how: str,
    quarantined: bool,
    harm: str,
    members: int,
) -> None:
    """The trainer's admission and the second opinion say the same of any record."""
    record = closed(0, given_rewards[:members], tokens=tokens, how=how, quarantined=quarantined)
    record = harmed(record, harm) if harm else record
    assert verdict(record, sequence_tokens_max=log.TOKENS_MAX) == by_trainer(record)


def test_a_newer_attempt_begins_anew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What an older attempt had finished, or how it failed, says nothing of the one under way."""
    failed = r.GroupFailed(run=log.RUN, group_id=group(13), attempt=1, reason="the sandbox died")
    again = [replace(log.turn(number, 0), attempt=2) for number in (12, 13)]
    code, document = told(made(tmp_path / "log", others=[*log.under_way()[:-1], failed, *again]), capsys)
    assert code == 0
    stages = {row["stage"]: row["units"] for row in document["in_flight"]}
    assert stages == {"waiting in prompts": 2, "being rolled out": 3}


def test_fisher_by_hand() -> None:
    """The lady tasting tea: 3 of 4 right, or more, has chance 17/70."""
    assert fisher_greater(3, 4, 1, 4) == pytest.approx(17 / 70)
    assert fisher_greater(0, 10, 3, 10) == pytest.approx(1.0)


def test_long_rollouts_lost() -> None:
    """10 of 20 long ones lost against none of 20 short ones is a warning; 1 against 0 is chance."""
    units = [(8, False)] * 20 + [(64, index < 10) for index in range(20)]
    found = length_test(units)
    assert found is not None and found.biased
    assert (found.median, found.long, found.long_lost, found.short_lost) == (8, 20, 10, 0)
    few = length_test([(8, False)] * 20 + [(64, index < 1) for index in range(20)])
    assert few is not None and not few.biased
    assert length_test([(8, True)] * 5) is None
    assert length_test([(0, True)] * 5) is None


def test_each_source_has_its_own_lengths() -> None:
    """Suggestions of one token that are never lost say nothing about tasks, of which every third is, whatever
    its length."""
    side = LedgerSide()
    for number in range(60):
        for source, tokens, lost in (("live", 1, False), ("sim", 9 + number % 2, number % 3 == 0)):
            origin = Origin(source=source, env="e", region="r", tokens=tokens)
            side.answers[f"{source}-{number}"] = Answer("stale" if lost else "trained", origin, "")
    tests = Account("r", side, TopicsSide(), Comparison()).lengths
    assert list(tests) == ["sim, at the trainer"]
    assert not tests["sim, at the trainer"].biased
