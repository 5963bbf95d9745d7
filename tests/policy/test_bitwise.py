"""The promise "same numbers": prefill, decode, chunks and the trainer's tree give the same bits, whatever
stands beside.
"""

import hashlib
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from small_policy import SMALL, random_tokens, random_weights

from headrace.errors import PolicyError
from headrace.kernels.invariant import log_probs
from headrace.policy.checkpoint import load_seed
from headrace.policy.decode import Decoder, Prefix, Row
from headrace.policy.model import ModelConfig, Weights
from headrace.policy.tree import Group, tree_logp

# (prefix length, lengths of the sequences behind it): around the blocks of 64, alone and in groups, up to 300
# tokens.
PLAN = [(1, [1, 2]), (63, [16]), (64, [64, 65, 1]), (65, [30] * 8), (130, [70, 5, 64, 17, 128]), (200, [100])]


def _plan(
    config: ModelConfig, seed: int, plan: list[tuple[int, list[int]]] = PLAN
) -> list[tuple[list[int], list[list[int]]]]:
    draw = random.Random(seed)
    return [
        (
            random_tokens(draw, prefix, config.vocabulary),
            [random_tokens(draw, own, config.vocabulary) for own in owns],
        )
        for prefix, owns in plan
    ]


def _sampled_logp(
    config: ModelConfig,
    weights: Weights,
    groups: list[tuple[list[int], list[list[int]]]],
    seed: int,
    temperature: float,
) -> tuple[dict[tuple[int, int], dict[int, float]], dict[tuple[int, int], torch.Tensor], list[Prefix]]:
    """Log-probability of the first token of each piece, as a decoder sees it that is fed in random batches of
    random pieces.
    """
    draw = random.Random(seed)
    decoder = Decoder(config, 24, 128)
    prefixes = decoder.prefill(weights, [prefix for prefix, _ in groups])
    waiting = [(g, o) for g, (_, owns) in enumerate(groups) for o in range(len(owns))]
    slots = dict(zip(waiting, draw.sample(range(24), len(waiting)), strict=True))
    following = {pair: prefixes[pair[0]].logits_V for pair in waiting}
    logp: dict[tuple[int, int], dict[int, float]] = {pair: {} for pair in waiting}
    routes: dict[tuple[int, int], list[torch.Tensor]] = {pair: [] for pair in waiting}
    while waiting:
        chosen = draw.sample(waiting, draw.randint(1, len(waiting)))
        rows = []
        for g, o in chosen:
            at = decoder.length(slots[g, o])
            piece = groups[g][1][o][at : at + draw.choice([1, 1, 1, 2, 8, 9, 40])]
            logp[g, o][at] = float(log_probs(following[g, o].unsqueeze(0), temperature)[0, piece[0]])
            rows.append(Row(slots[g, o], prefixes[g], piece))
        extension = decoder.extend(weights, rows)
        for pair, logits_V, routes_TLK in zip(chosen, extension.logits_RV, extension.routes, strict=True):
            following[pair] = logits_V
            routes[pair].append(routes_TLK)
        waiting = [(g, o) for g, o in waiting if decoder.length(slots[g, o]) < len(groups[g][1][o])]
    return logp, {pair: torch.cat(parts) for pair, parts in routes.items()}, prefixes


def _bits(weights: Weights, config: ModelConfig, seed: int) -> None:
    """Asserts that decoder and tree agree on every bit."""
    groups = _plan(config, seed)
    logp, routes, prefixes = _sampled_logp(config, weights, groups, seed, 0.7)
    out = tree_logp(weights, config, [Group(*group) for group in groups], 0.7)
    for (g, o), pieces in logp.items():
        for at, value in pieces.items():
            assert float(out.logp[g][o][at]) == value, (g, o, at)
        assert torch.equal(routes[g, o], out.own_routes[g][o])
    for prefix, routes_TLK in zip(prefixes, out.prefix_routes, strict=True):
        assert torch.equal(prefix.routes_TLK, routes_TLK)


@pytest.mark.parametrize("seed", [1, 2])
def test_decoder_and_tree_agree_bit_for_bit(seed: int) -> None:
    """Random pieces in random batches, prefixes of 1 to 200 tokens, against one packed pass: every bit and
    every route.
    """
    _bits(random_weights(SMALL, seed), SMALL, seed)


def _digest(threads: int) -> str:
    """Hash of the seed's log-probabilities of five sequences, computed with this many threads."""
    torch.set_num_threads(threads)
    config, weights, _ = load_seed()
    groups = [Group(*group) for group in _plan(config, 3, PLAN[4:5])]
    logp = torch.cat([value for group in tree_logp(weights, config, groups, 1.0).logp for value in group])
    assert torch.get_num_threads() == threads
    return hashlib.sha256(logp.detach().numpy().tobytes()).hexdigest()


def test_the_shipped_model_agrees_bit_for_bit() -> None:
    """Decoder and tree of the seed policy, over the whole plan."""
    config, weights, _ = load_seed()
    _bits(weights, config, 3)


def test_the_number_of_threads_leaves_no_trace() -> None:
    """One thread here and two threads in another process compute the same log-probabilities of the seed
    policy.
    """
    here = Path(__file__)
    program = (
        f"import sys; sys.path.insert(0, {str(here.parent)!r}); import {here.stem} as t; print(t._digest(2))"
    )
    # Passive: on a busy machine two spinning threads would wait for each other at every step.
    environment = os.environ | {"OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": "2"}
    child = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=100
    )
    threads = torch.get_num_threads()
    try:
        assert child.stdout.strip() == _digest(1), child.stderr
    finally:
        torch.set_num_threads(threads)


def test_a_sequence_is_the_same_alone_and_in_company() -> None:
    """Prefill of one prompt, and the tree of one sequence, have the bits that they have among others."""
    weights = random_weights(SMALL, 4)
    groups = _plan(SMALL, 4)
    together = Decoder(SMALL, 1, 64).prefill(weights, [prefix for prefix, _ in groups])
    out = tree_logp(weights, SMALL, [Group(*group) for group in groups], 1.0)
    for index, (prefix, owns) in enumerate(groups):
        alone = Decoder(SMALL, 1, 64).prefill(weights, [prefix])[0]
        assert torch.equal(alone.logits_V, together[index].logits_V)
        assert torch.equal(alone.k_LGSD, together[index].k_LGSD)
        for own, logp_T in zip(owns, out.logp[index], strict=True):
            assert torch.equal(tree_logp(weights, SMALL, [Group(prefix, [own])], 1.0).logp[0][0], logp_T)


def test_a_slot_is_clean_after_release() -> None:
    """What a slot held before leaves no trace, and prefixes that are no longer used make room."""
    weights = random_weights(SMALL, 5)
    draw = random.Random(5)
    decoder = Decoder(SMALL, 2, 128)
    wanted = None
    for turn in range(12):
        prompt = random_tokens(draw, 20 + 11 * turn, 64) if turn not in (0, 11) else list(range(33))
        own = random_tokens(draw, 90, 64) if turn not in (0, 11) else list(range(10))
        prefix = decoder.prefill(weights, [prompt])[0]
        logits_V = decoder.extend(weights, [Row(1, prefix, own)]).logits_RV[0]
        decoder.release(1)
        assert decoder.length(1) == 0
        if turn in (0, 11):
            assert wanted is None or torch.equal(wanted, logits_V)
            wanted = logits_V


def test_rows_that_do_not_fit_are_refused_and_change_nothing() -> None:
    """Empty rows, one slot twice, a slot that isn't there, too many tokens, an empty prompt."""
    weights = random_weights(SMALL, 6)
    decoder = Decoder(SMALL, 2, 8)
    prefix = decoder.prefill(weights, [[1, 2, 3]])[0]
    for rows in (
        [],
        [Row(0, prefix, [])],
        [Row(0, prefix, [1]), Row(0, prefix, [1])],
        [Row(2, prefix, [1])],
        [Row(0, prefix, [1] * 9)],
    ):
        with pytest.raises(PolicyError, match=r"^extend: "):
            decoder.extend(weights, rows)
    assert decoder.length(0) == 0
    for prompt in ([], [1] * 512):
        with pytest.raises(PolicyError, match=r"^prefill: prompts\[0\]: expected 1..511 tokens"):
            decoder.prefill(weights, [prompt])
    assert decoder.prefill(weights, []) == []
