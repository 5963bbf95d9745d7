"""One group's episode: the members of a group act in lockstep, turn by turn, against their environments.

    generate (one request for all members still at it) -> each environment answers (one sandbox job) -> ...

It knows no broker and writes nothing: the rollout worker turns its turns into records (`records_of`), the
held-out rounds only count them. Token ids are carried, never made anew from text.
"""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from headrace.clock import Clock
from headrace.envs.harness import Env, StepResult, step_group
from headrace.errors import InferenceError, InferenceUnavailable
from headrace.rpc.generation import Completion, Generation, Generator
from headrace.rpc.generation import Sequence as Member
from headrace.wire.packed import pack_f32, pack_u32
from headrace.wire.records import Prompt, RolloutStep, Sampling, ToolCall

TURNS_EXHAUSTED = "turns_exhausted"
"""The prompt allows no further turn, though the environment would."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How a group is sampled. `(seed, group_id, member, position)` fixes every token."""

    run: str
    group_id: str
    seed: int
    sampling: Sampling
    stop_tokens: tuple[int, ...]
    turn_ms_max: int
    greedy: bool = False
    version_min: int = 0
    """Older weights may not write it: their tokens would be stale when they are consumed."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of one member: what it was told, what it wrote, what the environment made of it."""

    member: int
    index: int
    base_length: int
    """Tokens of context before `tokens_in`."""
    prefix_length: int
    tokens_in: tuple[int, ...]
    completion: Completion
    result: StepResult
    last: bool
    finish: str
    """Of the rollout where `last`, of the generation elsewhere."""
    started_ms: int
    ended_ms: int


async def play(
    envs: Sequence[Env], generator: Generator, plan: Plan, clock: Clock
) -> AsyncIterator[list[Turn]]:
    """The turns of all members still at it, round after round; member i lives in `envs[i]`, all with the same
    prompt.

    Ends when every member is done. Raises InferenceError, SandboxError: then the members not yet done have no
    outcome.
    """
    prefix = tuple(envs[0].prompt_tokens)
    assert all(tuple(env.prompt_tokens) == prefix for env in envs), "members of a group share their prompt"
    own: list[tuple[int, ...]] = [() for _ in envs]
    told: list[tuple[int, ...]] = [prefix for _ in envs]
    active = list(range(len(envs)))
    for index in range(plan.sampling.turns_max):
        started_ms = clock.now_ms()
        completions = await generator.generate(
            _request(plan, prefix, own, active), timeout_s=plan.turn_ms_max / 1000
        )
        for member, completion in zip(active, completions, strict=True):
            _check(plan, len(prefix) + len(own[member]), member, completion)
        results = await step_group([envs[m] for m in active], [c.tokens for c in completions])
        ended_ms = clock.now_ms()
        turns = []
        for member, completion, result in zip(active, completions, results, strict=True):
            last = result.done or index + 1 == plan.sampling.turns_max
            turns.append(
                Turn(
                    member=member,
                    index=index,
                    base_length=len(prefix) + len(own[member]) - len(told[member]),
                    prefix_length=len(prefix),
                    tokens_in=told[member],
                    completion=completion,
                    result=result,
                    last=last,
                    finish=_finish(completion, result, last),
                    started_ms=started_ms,
                    ended_ms=ended_ms,
                )
            )
            told[member] = tuple(result.result_tokens)
            own[member] += completion.tokens + told[member]
        yield turns
        active = [turn.member for turn in turns if not turn.last]
        if not active:
            return


def step_record(turn: Turn, prompt: Prompt, attempt: int, *, region: str, worker: str) -> RolloutStep:
    """The turn as it goes to the log: new tokens only, and routes of the tokens fed for the first time."""
    completion = turn.completion
    routes_start = turn.base_length - 1 if turn.index else 0
    fed, layers, top_k = completion.routes_shape
    routes = completion.routes[routes_start * layers * top_k :]
    call = turn.result.call
    return RolloutStep(
        run=prompt.run,
        group_id=prompt.group_id,
        member=turn.member,
        attempt=attempt,
        step=turn.index,
        last=turn.last,
        source="sim",
        base_length=turn.base_length,
        prefix_length=turn.prefix_length,
        tokens_in=pack_u32(turn.tokens_in),
        tokens_out=pack_u32(completion.tokens),
        logp=pack_f32(completion.logp),
        loss_mask=b"\x01" * len(completion.tokens),
        spans=completion.spans,
        weights_version=completion.weights_version,
        routes=routes,
        routes_start=routes_start if routes else 0,
        routes_shape=(fed - routes_start, layers, top_k) if routes else (),
        tool_call=None if call is None else ToolCall(name="fill", arguments={"fill": call}),
        tool_result=turn.result.result_text,
        finish=turn.finish,
        temperature=prompt.sampling.temperature,
        started_ms=turn.started_ms,
        ended_ms=turn.ended_ms,
        region=region,
        worker=worker,
    )


def _request(
    plan: Plan, prefix: tuple[int, ...], own: list[tuple[int, ...]], active: list[int]
) -> Generation:
    return Generation(
        run=plan.run,
        group_id=plan.group_id,
        prefix_tokens=prefix,
        sequences=tuple(Member(member=member, own_tokens=own[member]) for member in active),
        temperature=plan.sampling.temperature,
        greedy=plan.greedy,
        tokens_max=plan.sampling.tokens_max,
        stop_tokens=plan.stop_tokens,
        seed=plan.seed,
        version_min=plan.version_min,
    )


def _check(plan: Plan, context: int, member: int, completion: Completion) -> None:
    """Refuses a completion whose parts do not fit together: no such step may reach the log."""
    place = f"{plan.group_id}/{member}"
    if completion.member != member:
        raise InferenceError(f"{place}: expected its completion, got that of member {completion.member}")
    if completion.finish == "cancelled":
        raise InferenceUnavailable(f"{place}: the replica cancelled the generation")
    tokens = len(completion.tokens)
    if len(completion.logp) != tokens:
        raise InferenceError(f"{place}: expected {tokens} log-probabilities, got {len(completion.logp)}")
    ends = [0, *(span.end for span in completion.spans)]
    if [span.start for span in completion.spans] != ends[:-1] or ends[-1] != tokens:
        raise InferenceError(f"{place}: expected spans over {tokens} tokens, got {completion.spans}")
    fed, layers, top_k = completion.routes_shape
    if completion.routes and (fed != context + tokens - 1 or len(completion.routes) != fed * layers * top_k):
        raise InferenceError(
            f"{place}: expected routes of {context + tokens - 1} tokens, got shape {completion.routes_shape} "
            f"in {len(completion.routes)} bytes"
        )


def _finish(completion: Completion, result: StepResult, last: bool) -> str:
    if not last:
        return completion.finish
    return str(result.finish) if result.done else TURNS_EXHAUSTED
