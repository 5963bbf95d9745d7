"""The agent's side of an episode: prompt, tool calls, answers, the end.

One tool, `fill`: the model writes what belongs into the hole. The harness builds the program, has it checked
in the sandbox and answers with one failing example, as long as tries are left. Hidden examples are run but
never shown. Token ids only: text is what the model wrote, once decoded (`policy.dialogue`). It knows no
broker; what an episode is worth is `rewards`' business.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeGuard

from headrace.envs.checks import Check, Outcome, one_line
from headrace.envs.config import EnvConfig
from headrace.envs.rewards import Score, Try, scores
from headrace.envs.sandbox import Job, Sandbox
from headrace.envs.tasks import Task
from headrace.errors import ConfigError
from headrace.policy.dialogue import Malformed, TokenCodec, parse_call, prompt_tokens, result_tokens
from headrace.policy.source import fill_is_wellformed

FILL_TOOL: dict[str, Any] = {
    "name": "fill",
    "description": "Puts text into the hole of the function and runs the function's examples.",
    "parameters": {
        "type": "object",
        "properties": {"fill": {"type": "string", "description": "one operator, expression or argument"}},
        "required": ["fill"],
    },
}
NOT_A_FILL = "SyntaxError: not one expression"
HIDDEN_FAILS = "an example that is not shown fails"


class StopReason(StrEnum):
    PASSED = "passed"
    TRIES_EXHAUSTED = "tries_exhausted"
    MALFORMED = "malformed"
    """The turn was no tool call."""
    LENGTH = "length"
    """The turn was cut off by the limit of tokens."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """The harness's answer. `result_tokens` is what the model reads next; empty when `done`."""

    result_tokens: list[int]
    result_text: str
    done: bool
    finish: StopReason | None
    call: str | None
    """The fill, when the turn was a tool call."""


class Env:
    """One episode of one task; single-use. Members of a group are made with the same `seed`."""

    def __init__(
        self, task: Task, tokenizer: TokenCodec, sandbox: Sandbox, config: EnvConfig, seed: int
    ) -> None:
        """Use `create`."""
        self.task = task
        self.prompt_tokens = prompt_tokens(tokenizer, task.prefix, task.suffix)
        self.finish: StopReason | None = None
        self.tries: list[Try] = []
        self.checks = _shuffled(task.checks, seed)
        self._tokenizer = tokenizer
        self._sandbox = sandbox
        self._config = config

    @classmethod
    def create(
        cls, task: Task, tokenizer: TokenCodec, sandbox: Sandbox, config: EnvConfig, seed: int = 0
    ) -> "Env":
        """A fresh episode; `seed` fixes the order of the examples. Raises ConfigError for a prompt over its
        limit."""
        env = cls(task, tokenizer, sandbox, config, seed)
        if len(env.prompt_tokens) > config.prompt_tokens_max:
            raise ConfigError(
                f"{task.task_id}: prompt too long: expected at most {config.prompt_tokens_max} tokens, "
                f"got {len(env.prompt_tokens)}"
            )
        return env

    async def step(self, call_tokens: Sequence[int]) -> StepResult:
        """The answer to one turn of the model. Raises SandboxError; the episode then stands where it stood,
        and the step may be tried again."""
        return (await step_group([self], [call_tokens]))[0]

    def rewards(self) -> list[Score]:
        """What the episode is worth so far, by component."""
        return scores(self.tries, self._config)

    def _settle(self, fill: str | Malformed, outcome: Outcome | None) -> StepResult:
        if isinstance(fill, Malformed):
            self.tries.append(Try(None, None, fill.reason))
            cut = "cut off" in fill.reason
            return self._end(StopReason.LENGTH if cut else StopReason.MALFORMED, fill.reason, None)
        self.tries.append(Try(fill, outcome, NOT_A_FILL if outcome is None else outcome.detail))
        if outcome is not None and outcome.status == "passed":
            return self._end(StopReason.PASSED, "passed", fill)
        text = NOT_A_FILL if outcome is None else self._failure_text(outcome)
        if len(self.tries) >= self._config.tries_max:
            return self._end(StopReason.TRIES_EXHAUSTED, text, fill)
        tokens = result_tokens(self._tokenizer, text, self._config.result_tokens_max)
        return StepResult(tokens, text, done=False, finish=None, call=fill)

    def _end(self, reason: StopReason, text: str, call: str | None) -> StepResult:
        self.finish = reason
        return StepResult([], text, done=True, finish=reason, call=call)

    def _failure_text(self, outcome: Outcome) -> str:
        """One visible example that failed, within the limit of tokens; nothing of a hidden one."""
        if not outcome.defined:
            return outcome.detail
        if outcome.unmet_visible is None:
            return HIDDEN_FAILS
        if outcome.raised_visible:
            return outcome.got_visible
        check = self.checks[outcome.unmet_visible]
        expected = check.want if check.exception is None else check.exception
        parts = [one_line(check.source), one_line(expected), outcome.got_visible]
        tokens_max = self._config.result_tokens_max - 2  # the two markers
        while len(self._tokenizer.encode(_compared(parts))) > tokens_max and max(map(len, parts)) >= 8:
            longest = max(range(3), key=lambda place: len(parts[place]))
            parts[longest] = parts[longest].removesuffix("..")[: int(len(parts[longest]) * 0.8) - 2] + ".."
        return _compared(parts)


async def step_group(envs: Sequence[Env], calls: Sequence[Sequence[int]]) -> list[StepResult]:
    """One turn of each of `envs` (same task and seed, none of them done), equal fills checked once, in one
    sandbox job. Raises SandboxError, and then no episode has moved."""
    first = envs[0]
    assert all((env.task.task_id, env.checks) == (first.task.task_id, first.checks) for env in envs)
    assert not any(env.finish for env in envs), "an episode is over"
    fills = [_read(env, call) for env, call in zip(envs, calls, strict=True)]
    programs = list(dict.fromkeys(first.task.program(fill) for fill in fills if _may_run(fill)))
    verdicts: dict[str, Outcome] = {}
    if programs:
        job = Job(first.task.module, first.task.function, tuple(programs), first.checks)
        verdicts = dict(zip(programs, await first._sandbox.run(job), strict=True))
    return [
        env._settle(fill, verdicts[env.task.program(fill)] if _may_run(fill) else None)
        for env, fill in zip(envs, fills, strict=True)
    ]


def _read(env: Env, call: Sequence[int]) -> str | Malformed:
    parsed = parse_call(env._tokenizer, list(call))
    return parsed if isinstance(parsed, Malformed) else parsed.fill


def _compared(parts: Sequence[str]) -> str:
    return f"{parts[0]}: expected {parts[1]}, got {parts[2]}"


def _may_run(fill: str | Malformed) -> TypeGuard[str]:
    # two underscores in a row are the way to the interpreter's insides; no task needs them
    return isinstance(fill, str) and fill_is_wellformed(fill) and "__" not in fill


def _shuffled(checks: tuple[Check, ...], seed: int) -> tuple[Check, ...]:
    """In an order that the seed fixes, so that no model can learn the place of an example."""
    order = list(checks)
    random.Random(seed).shuffle(order)
    return tuple(order)
