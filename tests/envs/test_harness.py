"""Episodes: two tries, what is shown, what is hidden, how they end, and what they are worth."""

import asyncio
from collections.abc import Iterator, Sequence

import pytest

from headrace.envs import tasks
from headrace.envs.checks import Check, Outcome
from headrace.envs.config import EnvConfig, SandboxConfig
from headrace.envs.harness import HIDDEN_FAILS, NOT_A_FILL, Env, StepResult, StopReason, step_group
from headrace.envs.sandbox import Job, Sandbox
from headrace.envs.tasks import Task, TaskSet
from headrace.errors import ConfigError, SandboxError
from headrace.policy.dialogue import call_tokens, result_tokens

SPECIAL = ["<|pad|>", "<|text|>", "<|task|>", "<|hole|>", "<|turn|>", "<|call|>", "<|end|>", "<|result|>"]


class ByteCodec:
    """One token a byte; the special tokens stand above."""

    def __init__(self) -> None:
        self.special = {name: 256 + place for place, name in enumerate(SPECIAL)}

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode(errors="replace")


class CountingSandbox(Sandbox):
    """The real one; remembers how many programs each job held, and may fail once."""

    programs: list[int]
    failing = False

    async def run(self, job: Job) -> list[Outcome]:
        if self.failing:
            self.failing = False
            raise SandboxError("sandbox: gone")
        self.programs.append(len(job.candidates))
        return await super().run(job)


CODEC = ByteCodec()
CONFIG = EnvConfig(prompt_tokens_max=2000, result_tokens_max=90)
TASK = Task(
    task_id="toolz.itertoolz.take:name:0-0",
    split="heldout",
    kind="name",
    distribution="toolz",
    module="toolz.itertoolz",
    function="take",
    prefix=" def take ( n , seq ) :\n\t return itertools . islice ( seq ,",
    fill=" n",
    suffix=" )",
    checks=(
        Check((), "list(take(1, 'ab'))\n", "['a']\n"),
        Check((), "list(take(3, 'secret'))\n", "['s', 'e', 'c']\n", hidden=True),
    ),
)


def call(fill: str) -> list[int]:
    return call_tokens(CODEC, fill)


class Stage:
    """One warm sandbox for all episodes of this file."""

    def __init__(self, runner: asyncio.Runner, sandbox: CountingSandbox) -> None:
        self.runner = runner
        self.sandbox = sandbox

    def __call__(
        self, *turns: Sequence[int], task: Task = TASK, config: EnvConfig = CONFIG, seed: int = 0
    ) -> tuple[Env, list[StepResult]]:
        """The episode after `turns`, and the harness's answers."""
        env = Env.create(task, CODEC, self.sandbox, config, seed)
        return env, [self.runner.run(env.step(turn)) for turn in turns]


@pytest.fixture(scope="module")
def play() -> Iterator[Stage]:
    with asyncio.Runner() as runner:
        sandbox = runner.run(CountingSandbox.start(SandboxConfig(), tasks.distributions()))
        assert isinstance(sandbox, CountingSandbox)
        sandbox.programs = []
        yield Stage(runner, sandbox)
        runner.run(sandbox.stop())


def worth(env: Env) -> dict[str, float]:
    return {score.component: score.value for score in env.rewards()}


def test_prompt_is_the_template(play: Stage) -> None:
    """The prompt is what the dialogue makes of the text around the hole."""
    env, _ = play()
    special = CODEC.special
    assert env.prompt_tokens[0] == special["<|task|>"]
    assert env.prompt_tokens[-1] == special["<|turn|>"]
    assert env.prompt_tokens.index(special["<|hole|>"]) == 1 + len(TASK.prefix)
    assert worth(env) == {"tests": 0.0, "format": 0.0}


def test_first_try(play: Stage) -> None:
    """The original passes and is worth 1; nothing is left to read."""
    env, (result,) = play(call(" n"))
    assert (result.done, result.finish, result.result_tokens, result.call) == (
        True,
        StopReason.PASSED,
        [],
        " n",
    )
    assert worth(env) == {"tests": 1.0, "format": 1.0}


def test_second_try(play: Stage) -> None:
    """A wrong fill shows the visible example that failed; the right one after it is worth a half."""
    env, (failed, passed) = play(call(" n + 1"), call(" n"))
    assert failed.result_text == "list(take(1, 'ab')): expected ['a'], got ['a', 'b']"
    assert failed.result_tokens == result_tokens(CODEC, failed.result_text, 90)
    assert (failed.done, failed.finish) == (False, None)
    assert passed.finish is StopReason.PASSED
    assert worth(env) == {"tests": 0.5, "format": 1.0}


def test_tries_end(play: Stage) -> None:
    """Two wrong fills end the episode; an exception is shown by its line."""
    env, (first, second) = play(call(" m"), call(" None or 2"))
    assert first.result_text == "NameError: name 'm' is not defined"
    assert (second.done, second.finish, second.result_tokens) == (True, StopReason.TRIES_EXHAUSTED, [])
    assert worth(env) == {"tests": 0.0, "format": 1.0}


def test_hidden_example_counts_and_is_never_shown(play: Stage) -> None:
    """A fill that meets the visible example only does not pass, and nothing of the hidden one is told."""
    for seed in range(4):
        env, (result,) = play(call(" min ( n , 1 )"), seed=seed)
        assert result.result_text == HIDDEN_FAILS
        assert worth(env)["tests"] == 0.0
    for fill in (" n + 1", " m", " None", " - 1", " len ( seq )"):
        for seed in range(2):
            _, (result,) = play(call(fill), seed=seed)
            assert "secret" not in result.result_text and "'s'" not in result.result_text


def test_fill_that_may_not_run(play: Stage) -> None:
    """Two fills at once, a comment, a dunder, a line break: not run, `format` says so, a try is gone."""
    for fill in (" n ) or ( n", " n # all", " n . __class__", " n\n\t import os"):
        env, (result, passed) = play(call(fill), call(" n"))
        assert result.result_text == NOT_A_FILL
        assert not result.done
        assert passed.finish is StopReason.PASSED
        assert worth(env) == {"tests": 0.5, "format": 0.5}


def test_turn_that_is_no_call(play: Stage) -> None:
    """Text without a call, and an empty turn, end the episode as malformed; a cut call ends it by length."""
    for turn, reason in (
        (CODEC.encode(" n"), StopReason.MALFORMED),
        ([], StopReason.MALFORMED),
        (call(" n")[:-1], StopReason.LENGTH),
        ([*call(" n"), 65], StopReason.MALFORMED),
    ):
        env, (result,) = play(turn)
        assert (result.done, result.finish, result.call) == (True, reason, None)
        assert worth(env) == {"tests": 0.0, "format": 0.0}


def test_answer_is_within_its_limit(play: Stage) -> None:
    """A long example is cut in the middle of its longest part, never over the limit."""
    long = Check((), "list(take(2, list(range(1000, 1200, 100)) * 2 + [0] * 3))\n", "[1000, 1100]\n")
    task = Task(**{name: getattr(TASK, name) for name in TASK.__struct_fields__} | {"checks": (long,)})
    _, (result,) = play(call(" n + 5"), task=task)
    assert len(result.result_tokens) <= 90
    assert ": expected [1000, 1100], got [1000, " in result.result_text


def test_prompt_over_its_limit(play: Stage) -> None:
    """A prompt that is too long is refused with its count."""
    with pytest.raises(ConfigError, match=f"at most 20 tokens, got {len(TASK.prefix + TASK.suffix) + 3}"):
        play(config=EnvConfig(prompt_tokens_max=20))


def test_sandbox_fault_moves_nothing(play: Stage) -> None:
    """When the sandbox fails the step raises, the tries stay, and the same step can be made again."""

    env, _ = play()
    play.sandbox.failing = True
    with pytest.raises(SandboxError):
        play.runner.run(env.step(call(" n")))
    assert (env.tries, env.finish) == ([], None)
    assert play.runner.run(env.step(call(" n"))).finish is StopReason.PASSED
    assert worth(env)["tests"] == 1.0


def test_group_is_one_job_with_equal_fills_merged(play: Stage) -> None:
    """Eight members with three different fills, one of them not runnable, are one job of two programs."""

    play.sandbox.programs = []
    envs = [Env.create(TASK, CODEC, play.sandbox, CONFIG, seed=7) for _ in range(8)]
    fills = [" n", " 1", " n ) (", " n", " 1", " n ) (", " n", " 1"]
    results = play.runner.run(step_group(envs, [call(fill) for fill in fills]))
    assert play.sandbox.programs == [2]
    assert [result.finish for result in results[:3]] == [StopReason.PASSED, None, None]
    assert [result.result_text for result in results[1:3]] == [HIDDEN_FAILS, NOT_A_FILL]
    left = [env for env in envs if not env.finish]
    play.runner.run(step_group(left, [call(" n ) (")] * len(left)))
    assert play.sandbox.programs == [2]


def test_order_of_examples_hangs_on_the_seed(play: Stage) -> None:
    """The same seed gives the same order, and not all seeds give the same."""
    orders = [tuple(check.source for check in play(seed=seed)[0].checks) for seed in range(6)]
    assert orders[0] == tuple(check.source for check in play(seed=0)[0].checks)
    assert len(set(orders)) == 2


def test_real_tasks_end_to_end(play: Stage) -> None:
    """Held-out tasks of every kind: a wrong fill, then the original; no hidden example is ever shown."""
    heldout = TaskSet.load("heldout", ("operator", "constant", "name", "expression", "argument", "attribute"))

    for task in map(heldout.task, heldout.task_ids[::60]):
        _, (wrong, right) = play(
            call(" no_such_name" if task.kind != "operator" else " @"), call(task.fill), task=task
        )
        visible = " ".join(check.source + str(check.setup) for check in task.checks if not check.hidden)
        hidden = [check.source.strip() for check in task.checks if check.hidden]
        shown = [text for text in hidden if text in wrong.result_text and text not in visible]
        assert not shown, task.task_id
        assert right.finish is StopReason.PASSED, task.task_id
