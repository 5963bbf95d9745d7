"""Where groups are played: tasks of one split, the tokenizer, and a warm sandbox of this process.

Shared by the rollout worker and the held-out rounds. Not here: acting (`consumers.episode`), judging
(`envs`).
"""

import contextlib
from collections.abc import AsyncIterator
from importlib.resources import files
from pathlib import Path
from typing import Protocol

from headrace.envs.config import EnvConfig
from headrace.envs.harness import Env
from headrace.envs.sandbox import Sandbox
from headrace.envs.tasks import Split, Task, TaskSet
from headrace.errors import ConfigError
from headrace.policy import tokenizer
from headrace.policy.dialogue import TokenCodec, stop_tokens


class Tasks(Protocol):
    """What an arena needs of a `TaskSet`."""

    @property
    def task_ids(self) -> tuple[str, ...]: ...

    def task(self, task_id: str) -> Task: ...


class Arena:
    """Makes environments. Use `open`, or give the parts."""

    def __init__(self, config: EnvConfig, tasks: Tasks, codec: TokenCodec, sandbox: Sandbox) -> None:
        self._config = config
        self._tasks = tasks
        self.codec = codec
        self._sandbox = sandbox
        self.stop_tokens = tuple(stop_tokens(codec))

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, config: EnvConfig, split: Split) -> AsyncIterator["Arena"]:
        """The shipped tasks and tokenizer, with a sandbox that lives as long as the block.

        Raises ConfigError when an installed package is not the one of the index, SandboxError when no sandbox
        comes up.
        """
        tasks = TaskSet.load(split, config.kinds)
        codec = tokenizer.load(Path(str(files("headrace.policy") / "seed" / "tokenizer.json")))
        async with await Sandbox.start(config.sandbox, tasks.distributions) as sandbox:
            yield cls(config, tasks, codec, sandbox)

    def describe(self) -> str:
        """One line for people: how well the sandbox is closed."""
        return self._sandbox.describe()

    @property
    def task_ids(self) -> tuple[str, ...]:
        return self._tasks.task_ids

    def task(self, env: str, task_id: str) -> Task:
        """Raises ConfigError for an environment or a task that is not here."""
        if env != self._config.name:
            raise ConfigError(f"{task_id}: expected the environment {self._config.name!r}, got {env!r}")
        return self._tasks.task(task_id)

    def group(self, env: str, task_id: str, seed: int, size: int) -> list[Env]:
        """`size` fresh environments of one task, examples in the order of `seed`. Raises ConfigError, also
        for a prompt over its limit."""
        task = self.task(env, task_id)
        return [Env.create(task, self.codec, self._sandbox, self._config, seed) for _ in range(size)]
