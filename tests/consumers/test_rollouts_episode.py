"""One group's episode, turn by turn: the real harness, a model and a sandbox that follow a script."""

import asyncio

import msgspec
import pytest
from rollout_doubles import CODEC, Model, Verdicts, arena, call, prompt

from headrace.clock import ManualClock
from headrace.consumers.episode import Plan, Turn, play, step_record
from headrace.envs.config import EnvConfig
from headrace.errors import InferenceError, InferenceUnavailable, SandboxError
from headrace.policy import dialogue
from headrace.rpc.generation import Completion, Generation
from headrace.wire.packed import unpack_f32, unpack_u32
from headrace.wire.records import Sampling

STOP = (CODEC.special["<|end|>"],)


def plan(**changes: object) -> Plan:
    fields: dict[str, object] = {
        "run": "r",
        "group_id": "r-0000001",
        "seed": 3,
        "sampling": Sampling(temperature=0.7, tokens_max=9),
        "stop_tokens": STOP,
        "turn_ms_max": 1_000,
    }
    return Plan(**(fields | changes))  # type: ignore[arg-type]


def played(
    model: Model, *, size: int = 2, sandbox: Verdicts | None = None, tries_max: int = 2, **changes: object
) -> list[list[Turn]]:
    async def case() -> list[list[Turn]]:
        envs = arena(sandbox, EnvConfig(tries_max=tries_max)).group("doctest", "t", 0, size)
        return [turns async for turns in play(envs, model, plan(**changes), ManualClock(5))]

    return asyncio.run(case())


def test_lockstep() -> None:
    """Member 0 passes at once, member 1 at its second try: one request of two, then one of one."""
    model = Model()
    first, second = played(model)
    assert [(t.member, t.index, t.last, t.finish) for t in first] == [
        (0, 0, True, "passed"),
        (1, 0, False, "stop"),
    ]
    assert [(t.member, t.index, t.last, t.finish) for t in second] == [(1, 1, True, "passed")]
    assert [[s.member for s in r.sequences] for r in model.requests] == [[0, 1], [1]]
    assert {(r.temperature, r.tokens_max, r.seed, r.stop_tokens) for r in model.requests} == {
        (0.7, 9, 3, STOP)
    }


def test_context_is_rebuilt_by_appending() -> None:
    """tokens_in + tokens_out of the steps, in order, are what the second request fed, then what came."""
    model = Model()
    first, second = played(model)
    step0 = step_record(first[1], prompt(1), 9, region="eu", worker="w")
    step1 = step_record(second[0], prompt(1), 9, region="eu", worker="w")
    prefix = list(model.requests[0].prefix_tokens)
    own = list(model.requests[1].sequences[0].own_tokens)
    assert unpack_u32(step0.tokens_in) == prefix
    assert unpack_u32(step0.tokens_out) + unpack_u32(step1.tokens_in) == own
    assert unpack_u32(step1.tokens_out) == list(call("+"))
    told = dialogue.result_tokens(CODEC, "f(1, 2): expected 3, got -1", 40)
    assert unpack_u32(step1.tokens_in) == told
    assert (step0.base_length, step1.base_length) == (0, len(prefix) + len(call("-")))
    assert (step0.prefix_length, step1.prefix_length) == (len(prefix), len(prefix))


def test_record_fields() -> None:
    """A step carries everything the trainer needs, and where it came from."""
    first, _ = played(Model())
    step = step_record(first[1], prompt(1, sampling=Sampling(temperature=0.7)), 9, region="eu", worker="w")
    assert (step.run, step.group_id, step.member, step.attempt, step.step) == ("r", "r-0000001", 1, 9, 0)
    assert unpack_f32(step.logp) == [-0.5] * len(call("-"))
    assert step.loss_mask == b"\x01" * len(call("-"))
    assert [(s.start, s.end, s.weights_version) for s in step.spans] == [(0, len(call("-")), 0)]
    assert step.tool_call is not None and step.tool_call.arguments == {"fill": "-"}
    assert step.tool_result == "f(1, 2): expected 3, got -1"
    assert (step.source, step.temperature, step.region, step.worker) == ("sim", 0.7, "eu", "w")


def test_routes_cover_each_token_once() -> None:
    """Step 0 has the routes of the prompt and of all its outputs but the last; step 1 begins with that last
    one."""
    first, second = played(Model())
    step0 = step_record(first[1], prompt(1), 9, region="", worker="")
    step1 = step_record(second[0], prompt(1), 9, region="", worker="")
    prefix, out = step0.prefix_length, len(call("-"))
    assert (step0.routes_start, step0.routes_shape) == (0, (prefix + out - 1, 2, 1))
    told, out1 = len(step1.tokens_in) // 4, len(call("+"))
    assert (step1.routes_start, step1.routes_shape) == (prefix + out - 1, (1 + told + out1 - 1, 2, 1))
    for step in (step0, step1):
        positions = range(step.routes_start, step.routes_start + step.routes_shape[0])
        assert list(step.routes) == [p % 256 for p in positions for _ in range(2)]


def test_turns_end_before_the_environment() -> None:
    """A prompt of one turn ends the rollout after it, though a second try would be left."""
    (turns,) = played(Model(), sampling=Sampling(turns_max=1))
    assert [(t.member, t.last, t.finish) for t in turns] == [
        (0, True, "passed"),
        (1, True, "turns_exhausted"),
    ]


def test_cut_call() -> None:
    """A call cut by the limit of tokens ends as `length`, never as an error, and has no tool call."""

    async def cut(request: Generation, member: int) -> tuple[int, ...]:
        return call("+")[:-1]

    (turns,) = played(Model(cut))
    step = step_record(turns[0], prompt(1), 9, region="", worker="")
    assert (step.last, step.finish, step.tool_call) == (True, "length", None)


class Crooked(Model):
    """A replica whose completions were changed on their way."""

    def __init__(self, **changes: object) -> None:
        super().__init__()
        self._changes = changes

    async def generate(self, request: Generation, *, timeout_s: float) -> list[Completion]:
        right = await super().generate(request, timeout_s=timeout_s)
        return [msgspec.structs.replace(right[0], **self._changes), *right[1:]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logp": (0.0,)}, "r-0000001/0: expected 3 log-probabilities, got 1"),
        ({"spans": ()}, "r-0000001/0: expected spans over 3 tokens"),
        ({"routes_shape": (7, 2, 1)}, r"r-0000001/0: expected routes of \d+ tokens, got shape \(7, 2, 1\)"),
        ({"routes": b"\0"}, r"r-0000001/0: expected routes of \d+ tokens, got shape .* in 1 bytes"),
        ({"member": 5}, "r-0000001/0: expected its completion, got that of member 5"),
    ],
)
def test_crooked_completion(changes: dict[str, object], message: str) -> None:
    """A completion whose parts don't fit together is refused with the counts."""
    with pytest.raises(InferenceError, match=message):
        played(Crooked(**changes))


def test_cancelled_generation() -> None:
    """A generation that the replica gave up can be tried again: it is no rollout."""
    with pytest.raises(InferenceUnavailable):
        played(Crooked(finish="cancelled"))


def test_sandbox_fault() -> None:
    """A fault of the sandbox leaves the episode without an outcome."""
    with pytest.raises(SandboxError):
        played(Model(), sandbox=Verdicts([SandboxError("sandbox: died")]))


def test_equal_fills_are_checked_once() -> None:
    """Eight members that write the same fill need one program in one job."""
    sandbox = Verdicts()

    async def same(request: Generation, member: int) -> tuple[int, ...]:
        return call("+")

    (turns,) = played(Model(same), size=8, sandbox=sandbox)
    assert sandbox.jobs == 1 and [t.finish for t in turns] == ["passed"] * 8


def test_same_request_twice() -> None:
    """What is asked of the model hangs on the plan alone: two plays ask for the very same."""
    first, second = Model(), Model()
    played(first)
    played(second)
    assert first.requests == second.requests
