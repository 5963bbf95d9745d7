"""Tokens per second of one replica: continuous batching against a loop that answers one sequence at a time.

The work is of the demo's size: 32 groups of 8, prompts of 100 to 220 tokens, 4 to 24 generated tokens, the
shipped model, one thread. The loop of batch 1 runs the same kernels on a part of the same requests, with the
same cache of prompts, so that only batching differs. The last row goes over gRPC, all groups at once.
"""

import argparse
import asyncio
import random
import time

import msgspec
import torch

from benchmarks.page import header, table
from headrace.inference import server
from headrace.inference.config import InferenceConfig
from headrace.inference.engine import Engine
from headrace.inference.weights import ServedWeights
from headrace.kernels import invariant
from headrace.policy import checkpoint
from headrace.rpc.client import InferenceClient
from headrace.rpc.generation import Generation, Progress, Sequence

GROUPS, MEMBERS, LOOP_GROUPS = 32, 8, 4


class Rate(msgspec.Struct, frozen=True):
    """Generated tokens, the seconds they took, and the processor seconds of this process: those of a machine
    that others use as well."""

    tokens: int
    seconds: float
    cpu_seconds: float

    @property
    def per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def per_cpu_s(self) -> float:
        return self.tokens / self.cpu_seconds


def requests(vocabulary: int) -> list[Generation]:
    rng = random.Random(0)
    return [
        Generation(
            run="benchmark",
            group_id=f"benchmark-{index:07d}",
            prefix_tokens=tuple(rng.randrange(vocabulary) for _ in range(rng.randint(100, 220))),
            sequences=tuple(Sequence(member=member) for member in range(MEMBERS)),
            tokens_max=rng.randint(4, 24),
            seed=0,
        )
        for index in range(GROUPS)
    ]


def batched(work: list[Generation]) -> Rate:
    """All requests in the engine at once."""
    engine = _engine(InferenceConfig())
    return _timed(engine, [work])


def one_by_one(work: list[Generation]) -> Rate:
    """Each sequence alone, after the one before it."""
    engine = _engine(InferenceConfig())
    alone = [
        [msgspec.structs.replace(request, sequences=(item,))]
        for request in work
        for item in request.sequences
    ]
    return _timed(engine, alone)


async def over_grpc(work: list[Generation]) -> Rate:
    """All requests at once through the server, in this process."""
    stop, ready = asyncio.Event(), asyncio.get_running_loop().create_future()
    serving = asyncio.ensure_future(server.run(InferenceConfig(serve_seed=True), stop, ready.set_result))
    try:
        async with asyncio.timeout(60):
            address = await ready
        async with InferenceClient(address) as client:
            await client.generate(work[0], timeout_s=60)
            began, cpu = time.perf_counter(), time.process_time()
            answers = await asyncio.gather(*(client.generate(item, timeout_s=120) for item in work[1:]))
            seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    finally:
        stop.set()
        await serving
    return Rate(sum(len(done.tokens) for answer in answers for done in answer), seconds, cpu)


def ratio(repeats: int = 3) -> tuple[Rate, Rate]:
    """The best of `repeats` by CPU time, batched and one by one, on one thread; `benchmarks.loop` shows their
    ratio."""
    torch.set_num_threads(1)
    invariant.warm_up()
    work = requests(checkpoint.load_seed()[0].vocabulary)
    pairs = [(batched(work), one_by_one(work[:LOOP_GROUPS])) for _ in range(repeats)]
    return tuple(max(rates, key=lambda rate: rate.per_cpu_s) for rates in zip(*pairs, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    repeats = parser.parse_args().repeats
    many, single = ratio(repeats)
    work = requests(checkpoint.load_seed()[0].vocabulary)
    wire = max((asyncio.run(over_grpc(work)) for _ in range(repeats)), key=lambda rate: rate.per_cpu_s)
    ways = {"one sequence at a time": single, "continuous batching": many, "over gRPC": wire}
    rows = [
        [name, rate.tokens, rate.per_s, rate.per_cpu_s, rate.per_cpu_s / single.per_cpu_s]
        for name, rate in ways.items()
    ]
    print(header("Inference: continuous batching against batch 1", "torch", "grpcio"))
    print(table(["way", "tokens", "tokens / s", "tokens / CPU s", "ratio (CPU)"], rows))


def _engine(config: InferenceConfig) -> Engine:
    model, tensors, _ = checkpoint.load_seed()
    engine = Engine(model, config)
    engine.install(ServedWeights(version=0, root=checkpoint.weights_root(tensors), tensors=tensors))
    engine.step()
    return engine


def _timed(engine: Engine, rounds: list[list[Generation]]) -> Rate:
    """Generated tokens, and the time from the first submission to the last token; prompts included."""
    began, cpu = time.perf_counter(), time.process_time()
    for together in rounds:
        for request in together:
            engine.submit(request, _ignore)
        while engine.step():
            pass
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    return Rate(engine.status().tokens_generated, seconds, cpu)


def _ignore(progress: list[Progress]) -> None:
    pass


if __name__ == "__main__":
    main()
