"""What is done to whom, and when: an endless list of faults that the seed alone decides.

Not here: doing it (`chaos.play`). What a victim is at just then depends on the machine; that it was hit after
this delay, by this signal, does not.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Kind = Literal["kill", "pause", "stop"]
"""kill: SIGKILL. pause: SIGSTOP, SIGCONT after `pause_s`. stop: SIGTERM, and a start (the broker alone)."""

BROKER = "broker"
PROCESSES = {
    "trainer": 4,
    "experience": 3,
    "inference-0": 2,
    "rollouts-0": 2,
    "rollouts-1": 2,
    "relay": 2,
    "prompts": 2,
}
"""With their weights in the draw: the trainer has most to lose."""
BROKER_WEIGHT = 5
PAUSES = 0.2
"""Share of the faults that only stop a process for a while."""
CLEAN_STOPS = 0.5
"""Share of the broker's faults that let it finish."""
PAUSE_S_MIN, PAUSE_S_MAX = 0.2, 6.0
LONG_PAUSE_S = 13.0
"""Longer than a session of a group: the member's partitions move."""
LONG_PAUSES = 0.1
DELAY_S_MIN = 0.05
DELAY_MEANS_MAX = 3.0


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing to do, `delay_s` after the one before."""

    number: int
    delay_s: float
    kind: Kind
    target: str
    pause_s: float = 0.0


def draw(seed: int, *, broker: bool, delay_s: float) -> Iterator[Fault]:
    """Faults without end. Delays are exponential with mean `delay_s`, cut at three times that."""
    rng = random.Random(f"headrace chaos {seed}")
    weights = {**PROCESSES, BROKER: BROKER_WEIGHT} if broker else PROCESSES
    number = 0
    while True:
        number += 1
        wait_s = DELAY_S_MIN + min(rng.expovariate(1 / delay_s), DELAY_MEANS_MAX * delay_s)
        [target] = rng.choices(list(weights), list(weights.values()))
        paused, clean, long = rng.random() < PAUSES, rng.random() < CLEAN_STOPS, rng.random() < LONG_PAUSES
        pause_s = LONG_PAUSE_S if long else rng.uniform(PAUSE_S_MIN, PAUSE_S_MAX)
        kind: Kind = "pause" if paused else "stop" if target == BROKER and clean else "kill"
        yield Fault(number, wait_s, kind, target, pause_s if paused else 0.0)
