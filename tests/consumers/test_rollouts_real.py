"""The real parts together, on two tasks: seed model, engine, harness, sandbox, store, and the log."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from rollout_doubles import a_bus, issue, joined, prompt, until

from headrace.bus.protocol import Bus, Message
from headrace.config import RunConfig
from headrace.consumers import evaluation
from headrace.consumers.arena import Arena
from headrace.consumers.config import EvaluationConfig, RolloutsConfig
from headrace.consumers.examiner import evaluations
from headrace.consumers.rollouts import Worker
from headrace.envs.config import EnvConfig
from headrace.envs.tasks import TaskSet
from headrace.errors import StoreError
from headrace.inference.config import InferenceConfig
from headrace.inference.replica import Replica
from headrace.inference.weights import ServedWeights
from headrace.policy import checkpoint
from headrace.policy.tree import MISSING
from headrace.store.blobs import Blobs
from headrace.trainer.sequence import sequence_of
from headrace.wire.codec import encode
from headrace.wire.records import Encoding, Evaluation, WeightsPublished
from headrace.wire.topics import WEIGHTS

ENV = EnvConfig()
RUN = RunConfig(name="r", group_size=2)
LIGHT = "pydash"
"""A package that is imported quickly."""


def light_tasks(count: int) -> list[str]:
    return [task_id for task_id in TaskSet.load("train", ENV.kinds).task_ids if task_id.startswith(LIGHT)][
        :count
    ]


@contextlib.asynccontextmanager
async def seed_replica() -> AsyncIterator[Replica]:
    model, seed, _ = checkpoint.load_seed()
    async with Replica(model, InferenceConfig(slots=8, live_slots=0)) as replica:
        await replica.install(ServedWeights(version=3, root=checkpoint.weights_root(seed), tensors=seed))
        yield replica


def test_from_prompt_to_tensors() -> None:
    """Two prompts become complete groups that the join accepts and the trainer can read: every fed token has
    its routes, every generated one its log-probability and version."""

    async def case() -> None:
        model, _, tokenizer = checkpoint.load_seed()
        async with a_bus() as bus, seed_replica() as replica, Arena.open(ENV, "train") as arena:
            tasks = light_tasks(2)
            await issue(bus, *(prompt(i, task_id=task_id, seed=i) for i, task_id in enumerate(tasks)))
            stop = asyncio.Event()
            worker = Worker(bus, RUN, RolloutsConfig(), [replica], arena, "w")
            serving = asyncio.create_task(worker.serve(stop))
            await until(lambda: _joined(bus, 2))
            stop.set()
            await serving
            groups = await joined(bus)
        assert sorted(group.task_id for group in groups) == sorted(tasks)
        for group in groups:
            assert (group.closed, group.missing) == ("complete", ())
            for rollout in group.rollouts:
                assert 0 <= (rollout.reward or 0) <= 1.1 and rollout.components.keys() == {"tests", "format"}
                sequence = sequence_of(rollout, model)
                assert sequence.prefix_P[0] == tokenizer.special["<|task|>"]
                assert sequence.routes_SLK is not None
                assert not (sequence.routes_SLK[:-1] == MISSING).any()
                assert (sequence.routes_SLK[-1] == MISSING).all()
                assert sequence.tokens_trained > 0 and sequence.oldest_version == 3
                assert (sequence.logp_T[sequence.trained_T] < 0).all()

    asyncio.run(case())


async def _joined(bus: Bus, count: int) -> bool:
    return len(await joined(bus)) == count


async def announce(bus: Bus, blobs: Blobs, *versions: int) -> None:
    """Announces the seed's weights under each of `versions`."""
    _, seed, _ = checkpoint.load_seed()
    blob = await blobs.put(checkpoint.to_bytes(seed))
    for version in versions:
        full = Encoding(kind="full", uri=blob.uri, sha256=blob.sha256, bytes=blob.bytes)
        record = WeightsPublished(
            run="r",
            version=version,
            root=checkpoint.weights_root(seed),
            step=version,
            manifest_uri="",
            manifest_sha256="",
            encodings=(full,),
            published_ms=0,
        )
        value, headers = encode(record, source="test", now_ms=0)
        await bus.produce([Message(WEIGHTS.name, b"r", value, headers)])


def test_rounds_under_announced_weights(tmp_path: Path) -> None:
    """Two rounds under the same weights try the same tasks and get the very same tokens; a version that was
    never announced is refused."""

    async def case() -> None:
        blobs = Blobs.open(f"file://{tmp_path}/store")
        config = EvaluationConfig(tasks=2, samples=2)
        async with a_bus() as bus:
            await announce(bus, blobs, 0, 1)
            for name, version in (("before", 0), ("after", 1)):
                await evaluation.evaluate(bus, RUN, config, blobs, version, name, asyncio.Event(), env=ENV)
            with pytest.raises(StoreError, match="weights 7: expected an announcement of run r"):
                await evaluation.evaluate(bus, RUN, config, blobs, 7, "x", asyncio.Event(), env=ENV)
            found = await evaluations(bus, "r")
        before, after = ([e for e in found if e.round == name] for name in ("before", "after"))
        assert len(before) == len(after) == 2 * 3
        assert said(before) == said(after)
        assert all(d.change == d.low == d.high == 0 for d in evaluation.compare(before, after))

    asyncio.run(case())


def said(found: list[Evaluation]) -> dict[tuple[str, str, int], list[str]]:
    return {(e.mode, e.task_id, e.sample): [turn.call for turn in e.turns] for e in found}


def test_watch(tmp_path: Path) -> None:
    """The watch holds a round for the first version, skips those in between, and goes on with its next one
    after a restart."""

    async def case() -> None:
        blobs = Blobs.open(f"file://{tmp_path}/store")
        config = EvaluationConfig(watch_tasks=1, watch_samples=1, watch_versions=5)
        async with a_bus() as bus:
            for announced, seen in (((0, 1, 2, 3), {3}), ((7, 8), {3, 8}), ((9,), {3, 8})):
                await announce(bus, blobs, *announced)
                stop = asyncio.Event()
                watching = asyncio.create_task(evaluation.run(bus, RUN, config, blobs, stop, env=ENV))
                await until(lambda seen=seen: _watched(bus, seen))  # type: ignore[misc]
                stop.set()
                await watching
            assert await _watched(bus, {3, 8})

    asyncio.run(case())


async def _watched(bus: Bus, versions: set[int]) -> bool:
    return {e.version for e in await evaluations(bus, "r") if e.round == "watch"} == versions
