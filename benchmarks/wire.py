"""Size and speed of rollout steps on the topic, against the same content as JSON lines.

The rollouts are real: tasks of the shipped set, the seed model in an engine of this process, answers judged
in the sandbox, so that tokens, log-probabilities, routes and second turns are what a run's are. JSON carries
each array as a list of numbers, floats with the fewest digits that give the float32 back, and no spaces.
"""

import asyncio
import json
import random
import struct
import time
from collections.abc import Callable, Sequence

import msgspec
import torch
import zstandard

from benchmarks.page import header, table
from headrace.clock import SystemClock
from headrace.consumers.arena import Arena
from headrace.consumers.episode import Plan, play, step_record
from headrace.envs.config import EnvConfig
from headrace.inference.config import InferenceConfig
from headrace.inference.replica import Replica
from headrace.inference.weights import ServedWeights
from headrace.policy import checkpoint
from headrace.wire import codec, packed
from headrace.wire.records import Prompt, RolloutStep, Sampling

GROUPS, MEMBERS = 96, 8


class Line(msgspec.Struct, frozen=True):
    """One step in its two forms."""

    step: RolloutStep
    json: bytes
    value: bytes
    headers: codec.Headers

    @property
    def tokens(self) -> int:
        return (len(self.step.tokens_in) + len(self.step.tokens_out)) // 4


def main() -> None:
    steps = asyncio.run(rollouts())
    lines = [Line(step, _json_line(step), *_encoded(step)) for step in steps]
    first = [line for line in lines if line.step.step == 0]
    later = [line for line in lines if line.step.step > 0]
    print(header("Wire: bytes and records per second", "msgspec", "zstandard", "torch"))
    print(
        f"{GROUPS} groups of {MEMBERS} rollouts: {len(first):,} first turns, {len(later):,} second turns,"
        f" {sum(line.tokens for line in lines):,} tokens in and out.\n"
    )
    rows = _sizes("whole rollouts", lines) + _sizes("first turns", first) + _sizes("second turns", later)
    print(table(["steps", "form", "bytes / token", "of JSON"], rows))
    print(table(["one core", "records / CPU s"], _speeds(lines)))


async def rollouts() -> list[RolloutStep]:
    """Every turn of `GROUPS` groups, on one thread."""
    torch.set_num_threads(1)
    model, tensors, _ = checkpoint.load_seed()
    served = ServedWeights(version=0, root=checkpoint.weights_root(tensors), tensors=tensors)
    steps = []
    async with Arena.open(EnvConfig(), "train") as arena, Replica(model, InferenceConfig()) as replica:
        await replica.install(served)
        for number, task_id in enumerate(random.Random(0).sample(arena.task_ids, GROUPS)):
            steps += await _group(arena, replica, number, task_id)
    return steps


async def _group(arena: Arena, replica: Replica, number: int, task_id: str) -> list[RolloutStep]:
    clock = SystemClock()
    prompt = Prompt(
        run="demo",
        group_id=f"demo-{number:07d}",
        env=EnvConfig().name,
        task_id=task_id,
        seed=number,
        group_size=MEMBERS,
        sampling=Sampling(),
        components={},
        weights_version=0,
        admitted_ms=clock.now_ms(),
        deadline_ms=0,
    )
    plan = Plan(
        run=prompt.run,
        group_id=prompt.group_id,
        seed=prompt.seed,
        sampling=prompt.sampling,
        stop_tokens=arena.stop_tokens,
        turn_ms_max=60_000,
    )
    envs = arena.group(prompt.env, task_id, prompt.seed, MEMBERS)
    return [
        step_record(turn, prompt, prompt.admitted_ms, region="local", worker="rollouts-0")
        async for turns in play(envs, replica, plan, clock)
        for turn in turns
    ]


def _encoded(step: RolloutStep) -> tuple[bytes, codec.Headers]:
    name = f"{step.group_id}/{step.member}/{step.attempt}/{step.step}"
    return codec.encode(step, source="rollouts/local/rollouts-0", now_ms=step.ended_ms, event_id=name)


def _sizes(name: str, lines: Sequence[Line]) -> list[list[object]]:
    tokens = sum(line.tokens for line in lines)
    json_bytes = sum(len(line.json) for line in lines)
    values = sum(len(line.value) for line in lines)
    headers = sum(len(key) + len(value) for line in lines for key, value in line.headers)
    zstd = zstandard.ZstdCompressor(level=1)
    forms = {
        "JSON lines": json_bytes,
        "JSON lines, zstd per record": sum(len(zstd.compress(line.json)) for line in lines),
        "MessagePack": sum(len(codec.encode_plain(line.step)) for line in lines),
        "on the topic (value)": values,
        "on the topic (value and headers)": values + headers,
    }
    return [[name, form, size / tokens, size / json_bytes] for form, size in forms.items()]


def _speeds(lines: Sequence[Line]) -> list[list[object]]:
    def cpu_rate(work: Callable[[Line], object]) -> float:
        best = float("inf")
        for _ in range(5):
            start = time.process_time()
            for (
                line
            ) in lines:  # nothing is kept: the collector would count against whoever makes more objects
                work(line)
            best = min(best, time.process_time() - start)
        return len(lines) / best

    return [
        ["encode, value and headers", cpu_rate(lambda line: _encoded(line.step))],
        ["decode", cpu_rate(lambda line: codec.decode("rollout.steps", line.value, line.headers))],
        ["JSON encode (json.dumps)", cpu_rate(lambda line: _json_line(line.step))],
        ["JSON decode (json.loads)", cpu_rate(lambda line: json.loads(line.json))],
    ]


def _json_line(step: RolloutStep) -> bytes:
    tree = msgspec.to_builtins(step, builtin_types=(bytes,))
    tokens, layers, top_k = step.routes_shape or (0, 0, 0)
    flat = list(step.routes)
    tree |= {
        "tokens_in": packed.unpack_u32(step.tokens_in),
        "tokens_out": packed.unpack_u32(step.tokens_out),
        "logp": [_shortest_float32(x) for x in packed.unpack_f32(step.logp)],
        "loss_mask": list(step.loss_mask),
        "routes": [
            [flat[(t * layers + n) * top_k : (t * layers + n + 1) * top_k] for n in range(layers)]
            for t in range(tokens)
        ],
    }
    return json.dumps(tree, separators=(",", ":")).encode() + b"\n"


def _shortest_float32(x: float) -> float:
    """The decimal with the fewest digits that still is this float32 (at most 9)."""
    for digits in range(6, 10):
        short = float(f"{x:.{digits}g}")
        if struct.pack("<f", short) == struct.pack("<f", x):
            return short
    return x


if __name__ == "__main__":
    main()
