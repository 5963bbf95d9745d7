"""Simulated editors: people by their habits, events as an editor would send them, the same for a seed."""

import asyncio
import random

import msgspec
import pytest

from headrace.config import RunConfig
from headrace.errors import ConfigError, InferenceUnavailable
from headrace.policy.checkpoint import load_seed
from headrace.policy.dialogue import suggestion_tokens
from headrace.producers import editors, open_files
from headrace.producers.config import EditorsConfig
from headrace.producers.people import Habits, Person, people, react
from headrace.rpc.generation import Completion, Generation
from headrace.wire.records import Feedback

CODEC = load_seed()[2]
PLAIN = Habits(
    accept_right=1.0,
    accept_wrong=0.0,
    differ=0.0,
    part_of_wrong=0.0,
    in_parts=0.0,
    undo=0.0,
    edit=0.0,
    typed_through=0.0,
    typed_over=0.0,
    ignored=0.0,
    leave=0.0,
)
PERSON = Person(0, "local", 0, 1.0, 0.0, 1.0)


class _Model:
    """Answers every request with the same text, or silence, or not at all."""

    def __init__(self, answer: str | None) -> None:
        self.answer = answer
        self.asked: list[Generation] = []

    async def generate(self, request: Generation, *, timeout_s: float) -> list[Completion]:
        self.asked.append(request)
        if self.answer is None:
            raise InferenceUnavailable("model: expected to serve, got a test")
        silent = CODEC.special["<|silent|>"]
        tokens = tuple(suggestion_tokens(CODEC, self.answer)) if self.answer else (silent,)
        return [
            Completion(
                member=0,
                tokens=tokens,
                logp=(0.0,) * len(tokens),
                finish="stop",
                spans=(),
                weights_version=1,
                routes=b"",
                routes_shape=(0, 0, 0),
                started_ms=0,
                ended_ms=0,
            )
        ]


def _run(answer: str | None, habits: Habits = PLAIN) -> tuple[editors.Counts, list[Feedback], _Model]:
    model, heard = _Model(answer), list[Feedback]()

    async def publish(events: list[Feedback]) -> None:
        heard.extend(events)

    config = EditorsConfig(users=3, suggestions_max=24, pace=1e6, habits=habits, distributions=("humanize",))
    counts = asyncio.run(
        editors.run(model, publish, RunConfig(), config, asyncio.Event(), codec=CODEC, session="s")
    )
    return counts, heard, model


def _kinds(habits: Habits, shown: str, wanted: str) -> list[str]:
    return [h.kind for h in react(habits, PERSON, shown, wanted, random.Random(0))]


def test_people_accept_what_they_wanted_and_reject_the_rest() -> None:
    """Without noise there is nothing else."""
    assert _kinds(PLAIN, " + 1", " + 1") == ["shown", "accepted", "persisted", "persisted"]
    assert _kinds(PLAIN, " + 1", " - 1") == ["shown", "rejected"]


@pytest.mark.parametrize(
    ("habit", "kinds"),
    [
        ("typed_over", ["shown", "ignored"]),
        ("leave", ["shown"]),
        ("in_parts", ["shown", "partially_accepted", "partially_accepted", "persisted", "persisted"]),
        ("undo", ["shown", "accepted", "undone"]),
        ("typed_through", ["shown", "ignored", "shown", "accepted", "persisted", "persisted"]),
    ],
)
def test_each_habit_shows_in_what_is_reported(habit: str, kinds: list[str]) -> None:
    """One habit always, the others never."""
    habits = msgspec.structs.replace(PLAIN, **{habit: 1.0})
    assert _kinds(habits, " + 1", " + 1") == kinds


def test_accepted_lengths_are_cumulative_and_in_utf16_units() -> None:
    """' 😀' is 3 units, ' 😀 x' is 5."""
    habits = msgspec.structs.replace(PLAIN, in_parts=1.0)
    told = react(habits, PERSON, " \U0001f600 x", " \U0001f600 x", random.Random(0))
    assert [h.accepted_length for h in told if h.kind == "partially_accepted"] == [3, 5]


def test_a_wrong_suggestion_that_begins_right_may_be_accepted_that_far() -> None:
    """' key' of ' key.x' is 4 of 6 units."""
    told = react(
        msgspec.structs.replace(PLAIN, part_of_wrong=1.0), PERSON, " key.x", " keys", random.Random(0)
    )
    assert [(h.kind, h.accepted_length) for h in told] == [("shown", None), ("partially_accepted", 4)]


def test_editors_ask_in_the_live_lane_and_never_tell_what_is_wanted() -> None:
    """One member, the user's name, a prompt whose hole is open; the same requests for the same seed."""
    counts, _, model = _run("")
    assert (counts.asked, counts.silent, counts.shown) == (24, 24, 0)
    assert all(request.lane == "live" and request.user.startswith("user-") for request in model.asked)
    assert len({request.group_id for request in model.asked}) == 24
    again = _run("")[2]
    first = {request.group_id: request for request in model.asked}
    assert all(first[request.group_id] == request for request in again.asked if request.group_id in first)


def test_every_shown_suggestion_is_reported_with_different_event_ids() -> None:
    """Shown and rejected, 24 times: nobody wanted this."""
    counts, heard, _ = _run(" zzz")
    assert counts.shown == 24 and len({event.event_id for event in heard}) == len(heard) == 48
    assert sorted(event.kind for event in heard) == ["rejected"] * 24 + ["shown"] * 24


def test_a_stop_forgets_what_has_not_happened_yet() -> None:
    """A person who looks at a suggestion has not decided; what is accepted was not watched for 30 s yet."""
    for pace, last in ((1e-3, "shown"), (30.0, "accepted")):
        stop, heard = asyncio.Event(), list[str]()

        async def publish(
            events: list[Feedback], stop: asyncio.Event = stop, heard: list[str] = heard, last: str = last
        ) -> None:
            heard.extend(event.kind for event in events)
            if events[-1].kind == last:
                stop.set()

        habits = Habits(
            **{name: getattr(PLAIN, name) for name in PLAIN.__struct_fields__} | {"accept_wrong": 1.0}
        )
        config = EditorsConfig(users=3, pause_ms=0, pace=pace, habits=habits, distributions=("humanize",))
        asyncio.run(editors.run(_Model(" zzz"), publish, RunConfig(), config, stop, codec=CODEC, session="s"))
        assert last in heard and not {"persisted", "undone"} & set(heard)
        assert last == "accepted" or set(heard) == {"shown"}


def test_a_model_that_is_away_costs_no_editor_its_life() -> None:
    """Nothing is shown, and it is counted."""
    counts, heard, _ = _run(None)
    assert counts.unanswered == counts.asked == 24 and not heard


def test_some_clocks_are_wrong_by_days() -> None:
    """And the same people have them again."""
    crowd = people(Habits(), 40, ("eu", "us"), 3)
    assert crowd == people(Habits(), 40, ("eu", "us"), 3)
    assert any(abs(person.clock_ms) > 86_400_000 for person in crowd)
    assert {person.region for person in crowd} == {"eu", "us"}


def test_places_that_no_function_has() -> None:
    """Looking for one would never end: it is a fault of the settings."""
    opened = open_files.functions(("humanize",), CODEC, tokens_min=30, tokens_max=110)
    for kinds in ({}, {"operator": 0.0}):
        with pytest.raises(ConfigError, match="expected a kind of place"):
            next(open_files.cursors(opened, kinds, random.Random(0)))  # type: ignore[arg-type]


def test_a_cursor_cuts_out_what_is_wanted() -> None:
    """Prefix, wanted and suffix make a function again; tests of a package are never opened."""
    opened = open_files.functions(("humanize",), CODEC, tokens_min=30, tokens_max=110)
    texts = {function.text for function in opened}
    cursors = open_files.cursors(opened, {"name": 1.0, "operator": 1.0}, random.Random(0))
    for _, cursor in zip(range(20), cursors, strict=False):
        assert cursor.prefix + cursor.wanted + cursor.suffix in texts
        assert cursor.kind in ("name", "operator")
    assert not any("test" in function.path for function in opened)
