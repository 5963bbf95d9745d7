"""Two rounds of evaluation side by side: pass rates, their difference, and how sure one may be of it.

Pure arithmetic on `Evaluation` records. Tries are paired by (mode, task, sample): both rounds used the same
seeds. Holes of one function are not independent, so the bootstrap draws whole functions, not tries. It says
nothing about why a rate moved.

Dimensions: R resamples, C clusters (functions).
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import msgspec

from headrace.wire.records import Evaluation

Mode = Literal["sampled", "greedy"]
Measure = Literal["any", "first"]
ALL_KINDS = "all"
RESAMPLES = 10_000
"""Draws of the bootstrap: the ends of a 95 % interval then vary by about 0.1 of a standard error."""
DRAWN_AT_ONCE = 1_000

Key = tuple[str, str, int]


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """Pass rates in [0, 1] of one mode, measure and kind of hole. `measure` any: passed on any try of the
    rollout; first: on the first."""

    mode: Mode
    measure: Measure
    kind: str
    before: float
    after: float
    low: float
    high: float
    """95 % interval of `after - before`."""
    tries: int
    tasks: int
    functions: int

    @property
    def change(self) -> float:
        return self.after - self.before

    @property
    def significant(self) -> bool:
        """Whether the interval leaves out 0."""
        return self.low > 0 or self.high < 0


def function_of(task_id: str) -> str:
    """The function that a task was cut from (`envs.tasks` writes `module.function:kind:start-end`)."""
    return task_id.partition(":")[0]


def compare(
    before: Iterable[Evaluation],
    after: Iterable[Evaluation],
    *,
    function_of: Callable[[str], str] = function_of,
    seed: int = 0,
) -> list[Difference]:
    """One `Difference` for each (mode, measure, kind of hole) of the tries that both rounds have; kind `all`
    first.

    `function_of` maps a task id to the function that it was cut from. The same arguments give the same
    numbers. A try recorded twice counts once (the later record). Empty when nothing is paired.
    """
    first, second = _by_key(before), _by_key(after)
    pairs: dict[tuple[Mode, str], list[Key]] = defaultdict(list)
    for key in sorted(first.keys() & second.keys()):
        for kind in (ALL_KINDS, first[key].kind):
            pairs[first[key].mode, kind].append(key)
    order = sorted(pairs, key=lambda group: (group[0] != "sampled", group[1] != ALL_KINDS, group[1]))
    measures: tuple[Measure, ...] = ("any", "first")
    return [
        _difference(
            [first[key] for key in pairs[mode, kind]],
            [second[key] for key in pairs[mode, kind]],
            measure,
            kind,
            function_of,
            seed,
        )
        for mode, kind in order
        for measure in measures
    ]


def _by_key(evaluations: Iterable[Evaluation]) -> dict[Key, Evaluation]:
    return {(e.mode, e.task_id, e.sample): e for e in evaluations}


def _difference(
    before: Sequence[Evaluation],
    after: Sequence[Evaluation],
    measure: Measure,
    kind: str,
    function_of: Callable[[str], str],
    seed: int,
) -> Difference:
    passed_before = [_passed(e, measure) for e in before]
    passed_after = [_passed(e, measure) for e in after]
    functions = [function_of(e.task_id) for e in before]
    low, high = _interval([b - a for a, b in zip(passed_before, passed_after, strict=True)], functions, seed)
    return Difference(
        mode=before[0].mode,
        measure=measure,
        kind=kind,
        before=sum(passed_before) / len(before),
        after=sum(passed_after) / len(after),
        low=low,
        high=high,
        tries=len(before),
        tasks=len({e.task_id for e in before}),
        functions=len(set(functions)),
    )


def _passed(evaluation: Evaluation, measure: Measure) -> int:
    return int(evaluation.passed_first if measure == "first" else evaluation.passed)


def _interval(differences: Sequence[int], clusters: Sequence[str], seed: int) -> tuple[float, float]:
    """95 % percentile interval of the mean difference under the cluster bootstrap: as many clusters as there
    are, drawn with replacement, each with all its tries (Davison and Hinkley, 1997, section 3.8)."""
    import numpy as np

    names = sorted(set(clusters))
    index = {name: i for i, name in enumerate(names)}
    sum_C = np.zeros(len(names))
    count_C = np.zeros(len(names))
    for difference, cluster in zip(differences, clusters, strict=True):
        sum_C[index[cluster]] += difference
        count_C[index[cluster]] += 1
    generator = np.random.Generator(np.random.PCG64(seed))
    means = []
    for _ in range(RESAMPLES // DRAWN_AT_ONCE):
        drawn_RC = generator.integers(0, len(names), (DRAWN_AT_ONCE, len(names)))
        means.append(sum_C[drawn_RC].sum(1) / count_C[drawn_RC].sum(1))
    low, high = np.quantile(np.concatenate(means), [0.025, 0.975])
    return float(low), float(high)
