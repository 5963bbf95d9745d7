"""What the engine accepts: a request checked against the model and the replica's bounds, before it queues.

Not here: when it runs (`inference.scheduler`), what it costs (`inference.engine`).
"""

from dataclasses import dataclass

from headrace.errors import InferenceError
from headrace.rpc.generation import Generation
from headrace.wire.records import TEMPERATURE_MAX, TEMPERATURE_MIN


@dataclass(frozen=True, slots=True)
class Bounds:
    """What one replica can hold, in tokens and sequences."""

    vocabulary: int
    context_max: int
    own_tokens_max: int
    queue_max: int


def check(request: Generation, bounds: Bounds) -> tuple[int, ...]:
    """How many tokens each sequence may generate, all at least 1: `tokens_max`, or less where the context or
    the slot ends. Raises InferenceError naming the first field that is out of range."""
    place = f"request {request.group_id}"
    if not request.sequences:
        raise InferenceError(f"{place}: expected at least one sequence, got none")
    if len(request.sequences) > bounds.queue_max:
        raise InferenceError(
            f"{place}: expected at most {bounds.queue_max} sequences, got {len(request.sequences)}"
        )
    members = [item.member for item in request.sequences]
    if len(set(members)) != len(members):
        raise InferenceError(f"{place}: expected each member once, got {members}")
    if request.temperature and not TEMPERATURE_MIN <= request.temperature <= TEMPERATURE_MAX:
        raise InferenceError(
            f"{place}: temperature: expected 0 or a number in {TEMPERATURE_MIN}..{TEMPERATURE_MAX:g},"
            f" got {request.temperature}"
        )
    if request.tokens_max < 1:
        raise InferenceError(f"{place}: tokens_max: expected 1 or more, got {request.tokens_max}")
    if not 0 <= request.seed < 2**64:
        raise InferenceError(f"{place}: seed: expected a number in 0..2^64-1, got {request.seed}")
    if not request.prefix_tokens:
        raise InferenceError(f"{place}: prefix_tokens: expected at least one token, got none")
    _check_tokens(request.prefix_tokens, bounds.vocabulary, f"{place}: prefix_tokens")
    _check_tokens(request.stop_tokens, bounds.vocabulary, f"{place}: stop_tokens")
    budgets = []
    for item in request.sequences:
        _check_tokens(item.own_tokens, bounds.vocabulary, f"{place}/{item.member}: own_tokens")
        budgets.append(_budget(request, len(item.own_tokens), bounds, f"{place}/{item.member}"))
    return tuple(budgets)


def _budget(request: Generation, own: int, bounds: Bounds, place: str) -> int:
    prefix = len(request.prefix_tokens)
    # The last output is not fed forward, but the next turn will feed it: so it must have a place.
    room = min(bounds.context_max - prefix, bounds.own_tokens_max) - own
    if room < 1:
        raise InferenceError(
            f"{place}: expected room for a token in a context of {bounds.context_max} and "
            f"{bounds.own_tokens_max} tokens after the prefix, got {prefix} + {own}"
        )
    return min(request.tokens_max, room)


def _check_tokens(tokens: tuple[int, ...], vocabulary: int, place: str) -> None:
    if tokens and not 0 <= min(tokens) <= max(tokens) < vocabulary:
        index = next(i for i, token in enumerate(tokens) if not 0 <= token < vocabulary)
        raise InferenceError(
            f"{place}[{index}]: expected a token in 0..{vocabulary - 1}, got {tokens[index]}"
        )
