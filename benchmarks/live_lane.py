"""What rollouts cost a live user: the latency of live answers without rollouts, and beside a queue of them.

One engine, the shipped model, one thread. Live requests come at random moments, LIVE_PER_S a second of its
own processor time, so that other work on the machine does not count. With "any" rollouts fill their slots, as
continuous batching does without a rule; the last row is `inference.beside_live_rows` at its default.

    python -m benchmarks.live_lane [--live 400]
"""

import argparse
import itertools
import random
import time
from collections.abc import Iterator

import msgspec
import torch

from benchmarks.page import header, table
from headrace.inference.config import InferenceConfig
from headrace.inference.engine import Engine
from headrace.inference.weights import ServedWeights
from headrace.kernels import invariant
from headrace.policy import checkpoint
from headrace.rpc.generation import Generation, Lane, Progress, Sequence

LIVE_PER_S = 10.0
MEMBERS = 8
QUEUED = 64
"""Rollout sequences that wait at any time."""
DEFAULT = InferenceConfig()
ANY = msgspec.structs.replace(DEFAULT, beside_live_rows=DEFAULT.slots)


def requests(lane: Lane, members: int, tokens_max: tuple[int, int], vocabulary: int) -> Iterator[Generation]:
    """Without end, the same at each call: prompts of 100 to 220 random tokens."""
    draw = random.Random(lane)
    for number in itertools.count():
        yield Generation(
            run="benchmark",
            group_id=f"{lane}-{number}",
            lane=lane,
            prefix_tokens=tuple(draw.randrange(vocabulary) for _ in range(draw.randint(100, 220))),
            sequences=tuple(Sequence(member=member) for member in range(members)),
            tokens_max=draw.randint(*tokens_max),
            seed=0,
        )


class Lanes:
    """One engine under load; `latencies_ms` of live answers, from their due moment to their last token."""

    def __init__(self, config: InferenceConfig, *, rollouts: bool) -> None:
        model, tensors, _ = checkpoint.load_seed()
        self._engine = Engine(model, config)
        self._engine.install(ServedWeights(version=0, root=checkpoint.weights_root(tensors), tensors=tensors))
        self._engine.step()
        self._live = requests("live", 1, (6, 18), model.vocabulary)
        self._rollouts = requests("rollout", MEMBERS, (8, 64), model.vocabulary) if rollouts else iter(())
        self.latencies_ms: list[float] = []
        self.rollout_tokens = 0
        self.seconds = 0.0

    def run(self, live: int) -> None:
        """Answers `live` requests."""
        draw = random.Random(0)
        began = time.thread_time()
        due = began + draw.expovariate(LIVE_PER_S)
        while len(self.latencies_ms) < live:
            self._feed()
            now = time.thread_time()
            while due <= now:
                self._ask(due)
                due += draw.expovariate(LIVE_PER_S)
            if not self._engine.step():
                _burn(due)
        self.seconds = time.thread_time() - began

    def _feed(self) -> None:
        while self._engine.status().queued_rollout < QUEUED:
            request = next(self._rollouts, None)
            if request is None:
                return
            self._engine.submit(request, self._count)

    def _ask(self, due: float) -> None:
        def answered(progress: list[Progress]) -> None:
            if progress[-1].completion is not None:
                self.latencies_ms.append(1000 * (time.thread_time() - due))

        self._engine.submit(next(self._live), answered)

    def _count(self, progress: list[Progress]) -> None:
        self.rollout_tokens += sum(len(item.completion.tokens) for item in progress if item.completion)


def _burn(until: float) -> None:
    """Processor time is the clock: there is no sleeping through it."""
    while time.thread_time() < until:
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--live", type=int, default=400)
    live = parser.parse_args().live
    torch.set_num_threads(1)
    invariant.warm_up()
    rows = []
    for name, config, rollouts in (
        ("none", DEFAULT, False),
        ("any", ANY, True),
        (f"{DEFAULT.beside_live_rows} beside live", DEFAULT, True),
    ):
        lanes = Lanes(config, rollouts=rollouts)
        lanes.run(live)
        growing = sorted(lanes.latencies_ms)
        p50, p99 = (growing[int(share * len(growing))] for share in (0.5, 0.99))
        rows.append([name, len(growing), p50, p99, lanes.rollout_tokens / lanes.seconds])
    print(header("The live lane with and without rollouts", "torch"))
    print(table(["rollouts", "live answers", "p50, CPU ms", "p99, CPU ms", "rollout tokens / CPU s"], rows))


if __name__ == "__main__":
    main()
