"""What the feedback join must do, written once and run by every host. Not tests.

A scenario sends its records in order; by the end of the window each of its suggestions must have become what
`becomes` says, by the suffix of its id. Records of `after` are sent then, and must change nothing.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from feedback_records import NAN, REST, Became, said, suggestion

from headrace.wire.records import Feedback, Record


@dataclass(frozen=True)
class Scenario:
    name: str
    records: Callable[[str], Sequence[Record]]
    becomes: Became | Mapping[str, Became]
    after: Callable[[str], Sequence[Record]] = lambda s: []

    @property
    def expected(self) -> Mapping[str, Became]:
        return {"": self.becomes} if isinstance(self.becomes, Became) else self.becomes


ACCEPTED = Became(0.75, exposed=(True, 1.0, 0.75))
REJECTED = Became(-0.25, exposed=(True, 0.0, -0.25))
IGNORED = Became(0.0, exposed=(True, 0.0, 0.0))
NEVER_SHOWN = Became(failed="never_shown", exposed=(False, 0.0, 0.0))


def _part(units: int) -> Became:
    share = units / 8
    return Became(0.75 * share, exposed=(True, share, 0.75 * share))


def _same(event: Feedback, times: int) -> list[Record]:
    return [event] * times


SCENARIOS = [
    Scenario("never shown", lambda s: [suggestion(s)], NEVER_SHOWN),
    Scenario(
        "an answer that is no text, whatever is said of it",
        lambda s: [suggestion(s, text_length=0), said(s, "shown"), said(s, "accepted")],
        Became(-0.25, exposed=(False, 0.0, -0.25)),
    ),
    Scenario("ended without having been shown", lambda s: [suggestion(s), said(s, "ignored")], NEVER_SHOWN),
    Scenario("shown, and no signal", lambda s: [suggestion(s), said(s, "shown")], IGNORED),
    Scenario(
        "the model is silent",
        lambda s: [suggestion(s, silent=True)],
        Became(0.0, exposed=(False, 0.0, 0.0)),
        after=lambda s: [said(s, "accepted")],
    ),
    Scenario(
        "accepted",
        lambda s: [suggestion(s), said(s, "shown"), said(s, "accepted")],
        ACCEPTED,
        after=lambda s: [said(s, "rejected"), said(s, "undone"), suggestion(s)],
    ),
    Scenario("rejected", lambda s: [suggestion(s), said(s, "shown"), said(s, "rejected")], REJECTED),
    Scenario(
        "ignored in so many words", lambda s: [suggestion(s), said(s, "shown"), said(s, "ignored")], IGNORED
    ),
    Scenario(
        "rejected, then accepted",
        lambda s: [suggestion(s), said(s, "shown"), said(s, "rejected"), said(s, "accepted")],
        ACCEPTED,
    ),
    Scenario(
        "accepted, then dismissed",
        lambda s: [suggestion(s), said(s, "shown"), said(s, "accepted"), said(s, "rejected")],
        ACCEPTED,
    ),
    Scenario("accepted before shown", lambda s: [suggestion(s), said(s, "accepted")], ACCEPTED),
    Scenario(
        "judged before it is known",
        lambda s: [said(s, "shown"), said(s, "accepted"), suggestion(s)],
        ACCEPTED,
    ),
    Scenario(
        "parts of 3, 3 and 2 characters",
        lambda s: [
            suggestion(s),
            said(s, "shown"),
            said(s, "partially_accepted", accepted_length=3),
            said(s, "partially_accepted", accepted_length=3),
            said(s, "partially_accepted", accepted_length=2),
        ],
        _part(3),
    ),
    Scenario(
        "a part, then the rest dismissed",
        lambda s: [suggestion(s), said(s, "partially_accepted", accepted_length=6), said(s, "rejected")],
        _part(6),
    ),
    Scenario(
        "a part longer than the text",
        lambda s: [suggestion(s), said(s, "partially_accepted", accepted_length=1 << 53)],
        ACCEPTED,
    ),
    Scenario(
        "a part of nothing",
        lambda s: [suggestion(s), said(s, "shown"), said(s, "partially_accepted", accepted_length=0)],
        IGNORED,
    ),
    Scenario(
        "accepted, then undone",
        lambda s: [suggestion(s), said(s, "shown"), said(s, "accepted"), said(s, "undone")],
        REJECTED,
    ),
    Scenario(
        "undone, then accepted again",
        lambda s: [suggestion(s), said(s, "accepted"), said(s, "undone"), said(s, "accepted")],
        ACCEPTED,
    ),
    Scenario(
        "a link to another that comes too late",
        lambda s: [suggestion(s), said(s, "shown"), said(s, "accepted", continues="another")],
        ACCEPTED,
    ),
    Scenario(
        "undone, then accepted again in part",
        lambda s: [
            suggestion(s),
            said(s, "accepted"),
            said(s, "undone"),
            said(s, "partially_accepted", accepted_length=4),
        ],
        _part(4),
    ),
    Scenario(
        "edited after the accept: the longest look counts",
        lambda s: [
            suggestion(s),
            said(s, "accepted"),
            said(s, "persisted", persisted_s=30, difference=0.0),
            said(s, "persisted", persisted_s=600, difference=0.5),
            said(s, "persisted", persisted_s=120, difference=0.25),
        ],
        Became(0.375, exposed=(True, 0.5, 0.375)),
    ),
    Scenario(
        "all of it edited away",
        lambda s: [suggestion(s), said(s, "accepted"), said(s, "persisted", persisted_s=300, difference=1.0)],
        Became(0.0, exposed=(True, 0.0, 0.0)),
    ),
    Scenario(
        "the same accept again after an undo",
        lambda s: [
            suggestion(s),
            said(s, "accepted", event=f"{s} a"),
            said(s, "undone"),
            said(s, "accepted", event=f"{s} a"),
        ],
        REJECTED,
    ),
    Scenario(
        "the same event a thousand times",
        lambda s: [suggestion(s), *_same(said(s, "accepted", event=f"{s} a"), 1000)],
        ACCEPTED,
    ),
    Scenario(
        "the same suggestion twice, and shown in two views",
        lambda s: [
            suggestion(s),
            suggestion(s),
            said(s, "shown", view_id="left"),
            said(s, "shown", view_id="right"),
            said(s, "accepted", view_id="right"),
        ],
        ACCEPTED,
    ),
    Scenario(
        "typed over within 100 ms",
        lambda s: [
            suggestion(s),
            said(s, "shown", editor_ms=5_000),
            said(s, "ignored", editor_ms=5_099, superseded_by="another"),
        ],
        Became(failed="superseded", exposed=(False, 0.0, 0.0)),
    ),
    Scenario(
        "typed over after 100 ms",
        lambda s: [
            suggestion(s),
            said(s, "shown", editor_ms=5_000),
            said(s, "ignored", editor_ms=5_100, superseded_by="another"),
        ],
        IGNORED,
    ),
    Scenario(
        "typed over within 100 ms, then shown again",
        lambda s: [
            suggestion(s),
            said(s, "shown", editor_ms=5_000),
            said(s, "ignored", editor_ms=5_050, superseded_by="another"),
            said(s, "shown", editor_ms=9_000),
            said(s, "rejected", editor_ms=9_900),
        ],
        REJECTED,
    ),
    Scenario(
        "typed through, under a new id of the editor's",
        lambda s: [
            suggestion(s),
            said(s, "shown", editor_ms=5_000),
            said(s, "ignored", editor_ms=5_040, superseded_by=s + REST),
            said(s + REST, "shown", continues=s),
            said(s + REST, "accepted", continues=s),
        ],
        {"": ACCEPTED, REST: Became()},
    ),
    Scenario(
        "typed through, under an id that inference made",
        lambda s: [
            suggestion(s),
            said(s, "shown"),
            suggestion(s + REST, user=f"user of {s}"),
            said(s + REST, "shown", continues=s),
            said(s + REST, "rejected"),
        ],
        {"": REJECTED, REST: Became(failed="continues {id}")},
    ),
    Scenario(
        "clocks two days ahead and behind",
        lambda s: [
            suggestion(s),
            said(s, "shown", editor_ms=2 * 86_400_000),
            said(s, "accepted", editor_ms=-2 * 86_400_000),
        ],
        ACCEPTED,
    ),
    Scenario(
        "events of a suggestion that nobody made",
        lambda s: [said(s, "shown"), said(s, "accepted"), said(s, "accepted", event=f"{s} a")],
        Became(letters=3),
    ),
    Scenario(
        "judged by somebody else",
        lambda s: [suggestion(s), said(s, "shown"), said(s, "accepted", user="somebody else")],
        Became(0.0, exposed=(True, 0.0, 0.0), letters=1),
    ),
    Scenario(
        "judged by somebody else, before it is known",
        lambda s: [said(s, "accepted", user="somebody else"), suggestion(s), said(s, "shown")],
        Became(0.0, exposed=(True, 0.0, 0.0), letters=1),
    ),
    Scenario(
        "made for nobody by name: the first who speaks of it is its user",
        lambda s: [
            suggestion(s, user=""),
            said(s, "shown"),
            said(s, "rejected", user="somebody else"),
            said(s, "accepted"),
        ],
        replace(ACCEPTED, letters=1),
    ),
    Scenario(
        "nonsense",
        lambda s: [
            suggestion(s),
            said(s, "shown"),
            said(s, "partially_accepted", accepted_length=-1),
            said(s, "partially_accepted"),
            said(s, "persisted", persisted_s=30, difference=NAN),
            said(s, "persisted", persisted_s=30, difference=1.5),
            said(s, "persisted", persisted_s=-30, difference=0.0),
            said(s, "accepted", continues=""),
        ],
        Became(0.0, exposed=(True, 0.0, 0.0), letters=6),
    ),
    Scenario(
        "more events than anybody can mean",
        lambda s: [suggestion(s), *(said(s, "shown") for _ in range(65))],
        Became(quarantine="more than 64 events of one suggestion", exposed=(True, 0.0, 0.0)),
    ),
    Scenario(
        "more events than anybody can mean, before it is known",
        lambda s: [*(said(s, "shown") for _ in range(65)), suggestion(s)],
        Became(quarantine="more than 64 events of one suggestion", exposed=(True, 0.0, 0.0)),
    ),
]


def expected(scenario: Scenario, name: str) -> dict[str, Became]:
    """By id of the suggestion, for a scenario that is played as `name`."""
    return {
        name + suffix: replace(became, failed=became.failed.replace("{id}", name))
        for suffix, became in scenario.expected.items()
    }
