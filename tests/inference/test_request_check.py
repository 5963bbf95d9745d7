"""What the engine refuses before it queues."""

import msgspec
import pytest

from headrace.errors import InferenceError
from headrace.inference.request import Bounds, check
from headrace.rpc.generation import Generation, Sequence

BOUNDS = Bounds(vocabulary=64, context_max=32, own_tokens_max=10, queue_max=3)
GOOD = Generation(
    run="r",
    group_id="g",
    prefix_tokens=tuple(range(20)),
    sequences=(Sequence(member=0), Sequence(member=1, own_tokens=(1, 2, 3, 4))),
    tokens_max=9,
    stop_tokens=(63,),
    seed=1,
)


def test_budgets_end_with_the_context_and_the_slot() -> None:
    """20 of 32 places are prompt and a slot holds 10 of the 12 left: 9 fit after none, 6 after four."""
    assert check(GOOD, BOUNDS) == (9, 6)
    assert check(msgspec.structs.replace(GOOD, prefix_tokens=tuple(range(27))), BOUNDS) == (5, 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sequences": ()}, "expected at least one sequence"),
        ({"sequences": tuple(Sequence(member=i) for i in range(4))}, "at most 3 sequences, got 4"),
        ({"sequences": (Sequence(member=2), Sequence(member=2))}, r"each member once, got \[2, 2\]"),
        ({"sequences": (Sequence(member=7, own_tokens=(1,) * 10),)}, "g/7: expected room"),
        ({"sequences": (Sequence(member=7, own_tokens=(64,)),)}, r"g/7: own_tokens\[0\].*0..63, got 64"),
        ({"prefix_tokens": ()}, "prefix_tokens: expected at least one"),
        ({"prefix_tokens": (1,) * 32}, r"expected room for a token in a context of 32 .* got 32 \+ 0"),
        ({"prefix_tokens": (1,) * 400}, "expected room"),
        ({"prefix_tokens": (1, 2, 64)}, r"prefix_tokens\[2\]: expected a token in 0..63, got 64"),
        ({"prefix_tokens": (1, -1)}, r"prefix_tokens\[1\].*got -1"),
        ({"stop_tokens": (99,)}, r"stop_tokens\[0\]"),
        ({"tokens_max": 0}, "tokens_max: expected 1 or more, got 0"),
        ({"tokens_max": -3}, "tokens_max: expected 1 or more, got -3"),
        ({"temperature": -0.5}, "temperature: expected 0 or a number in 0.001..100, got -0.5"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"temperature": 1e-40}, "temperature: expected 0 or a number"),
        ({"seed": 2**64}, "seed"),
    ],
)
def test_a_bad_request_names_its_field(change: dict[str, object], message: str) -> None:
    """Each field out of range is refused by name, with what was expected and what came."""
    with pytest.raises(InferenceError, match=message):
        check(msgspec.structs.replace(GOOD, **change), BOUNDS)
