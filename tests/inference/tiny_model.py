"""A model of a few thousand weights, and an engine around it, for tests of everything but the numbers of the
seed."""

import torch

from headrace.clock import Clock
from headrace.inference.config import InferenceConfig
from headrace.inference.engine import Engine
from headrace.inference.sequence import Ticket
from headrace.inference.weights import ServedWeights
from headrace.policy import checkpoint
from headrace.policy.model import ModelConfig, Weights, shapes
from headrace.rpc.generation import Completion, Generation, Progress, Sequence

torch.set_num_threads(1)

TINY = ModelConfig(
    vocabulary=64,
    width=32,
    layers=2,
    heads=2,
    heads_kv=1,
    head_width=16,
    experts=4,
    experts_active=2,
    expert_width=32,
    context_max=192,
)
CONFIG = InferenceConfig(slots=12, live_slots=2, own_tokens_max=96, queue_max=400, prefix_cache_tokens=1000)


def tiny_weights(seed: int) -> Weights:
    """Random, with every part of the network in use; float32 with bf16-exact values."""
    generator = torch.Generator().manual_seed(seed)
    weights = {
        name: torch.ones(shape)
        if name.endswith("norm")
        else torch.randn(shape, generator=generator) * (0.25 if name == "embed" else shape[-1] ** -0.5)
        for name, shape in shapes(TINY).items()
    }
    return checkpoint.from_bf16(checkpoint.to_bf16(weights))


def served(version: int, seed: int) -> ServedWeights:
    tensors = tiny_weights(seed)
    return ServedWeights(version=version, root=checkpoint.weights_root(tensors), tensors=tensors)


def tiny_engine(config: InferenceConfig = CONFIG, *, seed: int = 1, clock: Clock | None = None) -> Engine:
    """Serves version 1 of the weights of `seed`."""
    engine = Engine(TINY, config, clock)
    engine.install(served(1, seed))
    engine.step()
    return engine


def tokens(count: int, salt: int = 0) -> tuple[int, ...]:
    return tuple((7 * index + 13 * salt + index * index) % 63 for index in range(count))


def generation(group_id: str = "g", *, prefix: int = 70, members: int = 1, **changes: object) -> Generation:
    """Sampled at temperature 1, 8 tokens, no stop."""
    fields: dict[str, object] = {
        "run": "r",
        "group_id": group_id,
        "prefix_tokens": tokens(prefix, salt=len(group_id)),
        "sequences": tuple(Sequence(member=member) for member in range(members)),
        "tokens_max": 8,
        "seed": 5,
    }
    return Generation(**(fields | changes))  # type: ignore[arg-type]


class Collector:
    """A sink that keeps what it gets."""

    def __init__(self) -> None:
        self.progress: list[Progress] = []

    def __call__(self, progress: list[Progress]) -> None:
        self.progress += progress

    @property
    def done(self) -> dict[int, Completion]:
        return {item.member: item.completion for item in self.progress if item.completion is not None}


def submit(engine: Engine, request: Generation) -> tuple[Ticket, Collector]:
    collector = Collector()
    return engine.submit(request, collector), collector


def run_out(engine: Engine) -> None:
    """Steps until nothing is left to do."""
    for _ in range(10_000):
        if not engine.step():
            return
    raise AssertionError("the engine never ran out of work")


def complete(engine: Engine, *requests: Generation) -> list[dict[int, Completion]]:
    """Completions by member, one dictionary a request, all submitted together."""
    collectors = [submit(engine, request)[1] for request in requests]
    run_out(engine)
    return [collector.done for collector in collectors]


def numbers(completion: Completion) -> tuple[object, ...]:
    """What must not depend on the batch: all but times and versions."""
    return (
        completion.member,
        completion.tokens,
        completion.logp,
        completion.finish,
        completion.routes,
        completion.routes_shape,
    )
