"""Differences between two held-out rounds, on data small enough to work by hand."""

from typing import Literal

from headrace.consumers.comparison import Difference, compare
from headrace.wire.records import Evaluation


def tried(
    task_id: str,
    passed: bool,
    *,
    first: bool | None = None,
    sample: int = 0,
    mode: Literal["sampled", "greedy"] = "sampled",
    kind: str = "name",
) -> Evaluation:
    return Evaluation(
        run="r",
        version=0,
        round="before",
        mode=mode,
        task_id=task_id,
        kind=kind,
        sample=sample,
        passed=passed,
        passed_first=passed if first is None else first,
        reward=float(passed),
        turns=(),
        finish="passed" if passed else "tries_exhausted",
    )


def one(differences: list[Difference], **wanted: str) -> Difference:
    found = [d for d in differences if all(getattr(d, name) == value for name, value in wanted.items())]
    assert len(found) == 1, found
    return found[0]


def test_rates_by_hand() -> None:
    """Two of four before, three of four after: 0.5, 0.75, a change of 0.25."""
    before = [tried("a", True), tried("b", True), tried("c", False), tried("d", False)]
    after = [tried("a", True), tried("b", False), tried("c", True), tried("d", True)]
    found = one(compare(before, after), measure="any", kind="all")
    assert (found.before, found.after, found.change) == (0.5, 0.75, 0.25)
    assert (found.tries, found.tasks, found.functions) == (4, 4, 4)
    assert not found.significant


def test_nothing_changed() -> None:
    """Equal rounds differ by exactly 0, with an interval of exactly 0."""
    rounds = [tried(f"t{i}", i % 3 == 0) for i in range(30)]
    found = one(compare(rounds, rounds), measure="any", kind="all")
    assert (found.low, found.high, found.significant) == (0.0, 0.0, False)


def test_interval_of_a_coin() -> None:
    """100 functions, 20 of which went from fail to pass: standard error 0.04, so the interval is about
    0.2 +- 0.078."""
    before = [tried(f"t{i}", False) for i in range(100)]
    after = [tried(f"t{i}", i < 20) for i in range(100)]
    found = one(compare(before, after), measure="any", kind="all")
    assert abs(found.low - 0.122) < 0.012 and abs(found.high - 0.278) < 0.012
    assert found.significant


def test_tries_of_one_function_are_one_draw() -> None:
    """Ten tries in each of four functions that all move together are four draws, not forty: the interval is
    as wide as with one try each."""
    functions = ["f", "g", "h", "i"]
    before = [tried(f"{f}:{n}", False) for f in functions for n in range(10)]
    after = [tried(f"{f}:{n}", f == "f") for f in functions for n in range(10)]
    clustered = one(
        compare(before, after, function_of=lambda task_id: task_id.split(":")[0]), measure="any", kind="all"
    )
    alone = one(
        compare([tried(f, False) for f in functions], [tried(f, f == "f") for f in functions]),
        measure="any",
        kind="all",
    )
    assert (clustered.low, clustered.high) == (alone.low, alone.high)
    assert clustered.functions == 4 and not clustered.significant


def test_paired() -> None:
    """Only tries that both rounds have count, one by one: by task, sample and mode."""
    before = [tried("a", False, sample=0), tried("a", True, sample=1), tried("b", True)]
    after = [tried("a", True, sample=1), tried("a", True, sample=0), tried("c", False)]
    found = one(compare(before, after), measure="any", kind="all")
    assert (found.tries, found.before, found.after) == (2, 0.5, 1.0)


def test_modes_kinds_and_tries_apart() -> None:
    """Sampled and greedy, kinds of holes, first try and any try are told apart."""
    before = [
        tried("a", True, first=False, kind="name"),
        tried("b", False, kind="operator"),
        tried("a", False, mode="greedy", kind="name"),
    ]
    after = [
        tried("a", True, first=True, kind="name"),
        tried("b", False, kind="operator"),
        tried("a", True, mode="greedy", kind="name"),
    ]
    found = compare(before, after)
    assert [(d.mode, d.kind, d.measure) for d in found] == [
        ("sampled", "all", "any"),
        ("sampled", "all", "first"),
        ("sampled", "name", "any"),
        ("sampled", "name", "first"),
        ("sampled", "operator", "any"),
        ("sampled", "operator", "first"),
        ("greedy", "all", "any"),
        ("greedy", "all", "first"),
        ("greedy", "name", "any"),
        ("greedy", "name", "first"),
    ]
    assert one(found, mode="sampled", kind="name", measure="first").change == 1.0
    assert one(found, mode="sampled", kind="name", measure="any").change == 0.0
    assert one(found, mode="greedy", kind="all", measure="any").change == 1.0


def test_order_does_not_matter() -> None:
    """The same records in another order give the same numbers."""
    before = [tried(f"t{i}", i % 4 == 0) for i in range(40)]
    after = [tried(f"t{i}", i % 3 == 0) for i in range(40)]
    assert compare(before, after) == compare(before[::-1], after[::-1])


def test_nothing_paired() -> None:
    """Rounds without a common try give no numbers, not zeros."""
    assert compare([tried("a", True)], [tried("b", True)]) == []
