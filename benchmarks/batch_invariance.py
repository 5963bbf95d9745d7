"""What batch invariance needs, and what it costs: which plain operations change a row's bits with the batch,
and the speed of the policy's prefill, decode and tree beside forms that don't care.

Best of several rounds in CPU seconds of one thread: a machine that others use as well slows the clock, not
this figure so much.
"""

import argparse
import random
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.page import header, table
from headrace.kernels import invariant
from headrace.policy import checkpoint
from headrace.policy.decode import Decoder, Prefix, Row
from headrace.policy.model import ModelConfig, Weights
from headrace.policy.tree import Group, tree_logp
from headrace.trainer.midtrain import forward

ROWS = (1, 2, 3, 5, 8, 15, 16, 17, 31, 48, 64, 100, 128, 300)
SHAPES = [(128, 256), (128, 128), (128, 384), (192, 128), (128, 2048), (128, 4)]
GROUPS, MEMBERS = 16, 8


def changing(function: Callable[[Tensor], Tensor], whole: Tensor) -> int:
    """For how many of `ROWS` the first rows of `whole` alone give other bits than among all of them."""
    full = function(whole)
    return sum(not torch.equal(function(whole[:rows].clone()), full[:rows]) for rows in ROWS)


def invariance() -> list[list[object]]:
    """For each operation: in how many of the batch sizes its plain form, and ours, change a row."""
    generator = torch.Generator().manual_seed(1)
    rows: list[list[object]] = []
    for inputs, outputs in SHAPES:
        x = torch.randn(512, inputs, generator=generator)
        w = torch.randn(outputs, inputs, generator=generator)
        plain = changing(partial(torch.mm, mat2=w.T), x)
        rows.append([f"linear {inputs} → {outputs}", plain, changing(partial(invariant.linear, w_OI=w), x)])
    x = torch.randn(512, 127, generator=generator)
    ones = torch.ones(127)
    trios: list[tuple[str, Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = [
        ("SiLU, 127 wide", F.silu, invariant.silu),
        (
            "RMSNorm, 127 wide",
            lambda x: F.rms_norm(x, (127,), ones, 1e-6),
            lambda x: invariant.rms_norm(x, ones, 1e-6),
        ),
        ("log_softmax, 127 wide", lambda x: torch.log_softmax(x, -1), lambda x: invariant.log_probs(x, 1.0)),
    ]
    rows += [[name, changing(plain, x), changing(ours, x)] for name, plain, ours in trios]
    queries = torch.randn(512, 32, generator=generator)
    keys = torch.randn(512, 32, generator=generator)

    def ours_attention(q: Tensor) -> Tensor:
        hidden = torch.arange(512) > torch.arange(len(q)).unsqueeze(1)
        s = invariant.scores(q.unsqueeze(0), keys.unsqueeze(0), hidden)
        sums = invariant.accumulate(s, keys.unsqueeze(0), s.amax(-1, keepdim=True), None)
        return (sums.values_BMD / sums.weight_BM1)[0]

    def plain_attention(q: Tensor) -> Tensor:
        k = keys[: len(q)].view(1, 1, -1, 32)
        return F.scaled_dot_product_attention(q.view(1, 1, -1, 32), k, k, is_causal=True)[0, 0]

    rows.append(["causal attention", changing(plain_attention, queries), changing(ours_attention, queries)])
    return rows


def best_ms(work: Callable[[], object], rounds: int) -> tuple[float, float]:
    """The least milliseconds of CPU, and of the clock, over `rounds` calls after one that warms up."""
    work()
    cpu, clock = [], []
    for _ in range(rounds):
        c, t = time.process_time(), time.perf_counter()
        work()
        cpu.append(1000 * (time.process_time() - c))
        clock.append(1000 * (time.perf_counter() - t))
    return min(cpu), min(clock)


def speed(config: ModelConfig, weights: Weights, rounds: int) -> list[list[object]]:
    """Milliseconds and tokens a CPU second of the policy's three forms; a plain padded forward pass for
    comparison.
    """
    draw = random.Random(0)
    prompts = [[draw.randrange(2040) for _ in range(draw.randint(100, 220))] for _ in range(GROUPS)]
    tokens = sum(map(len, prompts))
    padded = torch.zeros(GROUPS, max(map(len, prompts)), dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        padded[row, : len(prompt)] = torch.tensor(prompt)

    @torch.inference_mode()
    def plain() -> None:
        forward(config, weights, padded)

    decoder = Decoder(config, GROUPS * MEMBERS, 128)
    prefixes = decoder.prefill(weights, prompts)
    cases: list[tuple[str, int, Callable[[], object]]] = [
        ("plain forward, padded, torch's attention", tokens, plain),
        ("prefill of 16 prompts", tokens, lambda: decoder.prefill(weights, prompts)),
    ]
    for rows in (1, 16, 64, 128):
        cases.append((f"decode step, {rows} rows", rows, partial(step, decoder, weights, prefixes, rows)))
    groups = [
        Group(prompt, [[draw.randrange(2040) for _ in range(draw.randint(5, 60))] for _ in range(MEMBERS)])
        for prompt in prompts
    ]
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in weights.items()}
    own = sum(len(sequence) for group in groups for sequence in group.own)

    def train() -> None:
        out = tree_logp(leaves, config, groups, 1.0)
        torch.autograd.backward(torch.cat([logp for group in out.logp for logp in group]).sum())

    cases.append(
        ("tree of 16 groups of 8, forward", tokens + own, lambda: tree_logp(weights, config, groups, 1.0))
    )
    cases.append(("the same, forward and backward", tokens + own, train))
    found: list[list[object]] = []
    for name, count, work in cases:
        cpu, clock = best_ms(work, rounds)
        found.append([name, count, cpu, clock, 1000 * count / cpu])
    return found


def step(decoder: Decoder, weights: Weights, prefixes: list[Prefix], rows: int) -> None:
    """One token for each of `rows` slots; a full slot starts again."""
    for slot in range(rows):
        if decoder.length(slot) == 128:
            decoder.release(slot)
    decoder.extend(weights, [Row(slot, prefixes[slot // MEMBERS], [7]) for slot in range(rows)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    invariant.warm_up()
    config, weights, _ = checkpoint.load_seed()
    print(header("Batch invariance: who needs it, and its cost", "torch"))
    print(table(["operation", f"plain: changed of {len(ROWS)} batch sizes", "ours"], invariance()))
    print(
        table(
            ["policy, one thread", "tokens", "CPU ms", "clock ms", "tokens / CPU s"],
            speed(config, weights, rounds),
        )
    )
    print(f"Probe of this machine: `{invariant.probe()}`")


if __name__ == "__main__":
    main()
