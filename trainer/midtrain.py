"""Mid-training: from fresh weights to the seed policy, by predicting tokens of functions, holes and
dialogues.

`headrace midtrain` runs it; the result is shipped in `policy/seed/` (docs/seed.md). Attention here is torch's
own, fast and not bit-equal to `policy.decode`: nothing is ever compared with these numbers. Not reinforcement
learning, and no broker.

B examples  T tokens  N = B*T rows  C width
"""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.kernels import invariant, moe
from headrace.policy import checkpoint, model, tokenizer
from headrace.policy.model import ModelConfig, Weights
from headrace.trainer import midtrain_corpus
from headrace.trainer.midtrain_examples import Example, Examples
from headrace.trainer.muon import MuonAdam

FILLER = "<|silent|>"  # fills up short rows; the network never predicts what follows it


class MidtrainConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`out` is the folder that gets the seed's files, `probes` the held-out examples behind the figures. The
    rest fixes the result, up to the processor's rounding.
    """

    out: Path
    seed: int = 1
    steps: int = 1600
    batch_tokens: int = 6000
    example_tokens_max: int = 320
    distributions: list[str] = msgspec.field(default_factory=midtrain_corpus.DISTRIBUTIONS.split)
    distribution_bytes_max: int = 40_000_000
    function_characters_max: int = 1100
    workers: int = 2
    matrix_rate: float = 0.02
    vector_rate: float = 3e-3
    warmup_steps: int = 100
    decay_share: float = 0.5
    context_weight_first: float = 1.0
    context_weight_last: float = 0.15
    balance_weight: float = 0.01
    checkpoint_steps: int = 200
    probes: int = 512
    threads: int = 1
    model: ModelConfig = ModelConfig()


def run(config: MidtrainConfig, progress: Callable[[str], None]) -> None:
    """Reads the corpus, trains the tokenizer and the network, and writes the seed to `config.out` (also every
    `checkpoint_steps`), with `midtrain.json`: the configuration, the sources, the loss curve and the numbers
    at the end.
    """
    torch.set_num_threads(config.threads)
    invariant.warm_up()
    functions, sources = midtrain_corpus.read(
        config.distributions,
        config.distribution_bytes_max,
        config.function_characters_max,
        config.workers,
        progress,
    )
    codec = tokenizer.Tokenizer(tokenizer.train(function.text for function in functions))
    progress(f"corpus: {len(functions)} functions, {sum(len(f.text) for f in functions)} characters")
    train(config, functions, sources, codec, progress)


def train(
    config: MidtrainConfig,
    functions: list[midtrain_corpus.Function],
    sources: list[midtrain_corpus.Source],
    codec: tokenizer.Tokenizer,
    progress: Callable[[str], None],
) -> None:
    """The part of `run` after the corpus. One function in fifty is held out for the figures."""
    kept = [function for index, function in enumerate(functions) if index % 50]
    held = [function for index, function in enumerate(functions) if index % 50 == 0]
    examples = Examples(kept, codec, config.example_tokens_max, config.seed)
    probes = Examples(held, codec, config.example_tokens_max, config.seed).next(config.probes, 0.0)
    weights = model.initial_weights(config.model, config.seed)
    for tensor in weights.values():
        tensor.requires_grad_()
    optimizer = MuonAdam(weights, config.matrix_rate, config.vector_rate)
    curve: list[dict[str, float]] = []
    seen_tokens = 0
    started = time.monotonic()
    for step in range(1, config.steps + 1):
        share = step / config.steps
        context = config.context_weight_first + share * (
            config.context_weight_last - config.context_weight_first
        )
        batch = _buckets(examples.next(config.batch_tokens // 150, context), codec.special[FILLER])
        total = sum(float(weights_BT[:, 1:].sum()) for _, weights_BT in batch)
        loss = 0.0
        for tokens_BT, weights_BT in batch:
            nll, balance = loss_sums(config.model, weights, tokens_BT, weights_BT)
            part = nll / total + config.balance_weight * balance * tokens_BT.numel() / config.batch_tokens
            torch.autograd.backward(part)
            loss += float(nll.detach()) / total
            seen_tokens += tokens_BT.numel()
        optimizer.step(_rate(config, step))
        if step % 50 == 0 or step == 1:
            speed = seen_tokens / (time.monotonic() - started)
            progress(f"step {step}/{config.steps} loss {loss:.3f} tokens {seen_tokens} ({speed:.0f}/s)")
        if step % config.checkpoint_steps == 0 or step == config.steps:
            figures = evaluate(config.model, weights, probes, codec)
            curve.append({"step": step, "tokens": seen_tokens, **figures})
            progress(f"step {step}: held-out {figures}")
            _write(config, weights, codec, sources, curve, time.monotonic() - started)


def forward(config: ModelConfig, weights: Weights, tokens_BT: Tensor) -> tuple[Tensor, Tensor]:
    """The residual stream `[N, C]` at the exit, and the mean balance loss of the layers."""
    b, t = tokens_BT.shape
    x_NC = model.embed(weights, tokens_BT.flatten())
    rope = model.rope_at(config, torch.arange(t).repeat(b))
    balance = torch.zeros(())
    for layer in range(config.layers):
        q, k, v = model.attention_inputs(config, weights, layer, x_NC, rope)
        q, k, v = (part.view(b, t, -1, config.head_width).transpose(1, 2) for part in (q, k, v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        attended_NC = attended.transpose(1, 2).reshape(b * t, -1)
        x_NC, routing = model.after_attention(config, weights, layer, x_NC, attended_NC, None)
        balance = balance + moe.balance_loss(routing.scores_NE, routing.used_NK) / config.layers
    return x_NC, balance


def loss_sums(
    config: ModelConfig, weights: Weights, tokens_BT: Tensor, weights_BT: Tensor
) -> tuple[Tensor, Tensor]:
    """Weighted sum of the negative log-likelihoods, and the balance loss."""
    x_NC, balance = forward(config, weights, tokens_BT)
    target_N = torch.cat((tokens_BT[:, 1:], tokens_BT[:, :1]), 1).flatten()
    care_N = torch.cat((weights_BT[:, 1:], torch.zeros_like(weights_BT[:, :1])), 1).flatten()
    used_R = care_N.nonzero().squeeze(1)
    logits_RV = model.logits(config, weights, x_NC.index_select(0, used_R))
    nll_R = F.cross_entropy(logits_RV, target_N[used_R], reduction="none")
    return (nll_R * care_N[used_R]).sum(), balance


@torch.no_grad()
def evaluate(
    config: ModelConfig, weights: Weights, probes: list[Example], codec: tokenizer.Tokenizer
) -> dict[str, float]:
    """Over held-out dialogues, on the last call of each: mean loss per fill token, share of fills whose every
    token is the likeliest (exact, greedy), mean probability of the whole fill (exact, sampled), and the least
    probability of `<|call|>`.
    """
    call = codec.special["<|call|>"]
    nll_sum, tokens, greedy, sampled, fills, opening = 0.0, 0, 0, 0.0, 0, 1.0
    dialogues = [example for example in probes if call in example.tokens]
    for start in range(0, len(dialogues), 32):
        part = dialogues[start : start + 32]
        tokens_BT, _ = _pad(part, codec.special[FILLER])
        x_NC, _ = forward(config, weights, tokens_BT)
        logp_BTV = torch.log_softmax(model.logits(config, weights, x_NC), -1).view(*tokens_BT.shape, -1)
        for row, example in enumerate(part):
            first = len(example.tokens) - example.tokens[::-1].index(call) - 1
            opening = min(opening, float(logp_BTV[row, first - 1, call].exp()))
            places = torch.arange(first, len(example.tokens) - 1)
            wanted = tokens_BT[row, places + 1]
            logp = logp_BTV[row, places].gather(1, wanted.unsqueeze(1)).squeeze(1)
            greedy += bool((logp_BTV[row, places].argmax(-1) == wanted).all())
            sampled += float(logp.sum().exp())
            nll_sum -= float(logp.sum())
            tokens += len(logp)
            fills += 1
    figures = {
        "fill_loss": nll_sum / tokens,
        "greedy": greedy / fills,
        "sampled": sampled / fills,
        "call_least": opening,
    }
    return {name: round(value, 4) for name, value in figures.items()}


def _pad(examples: list[Example], pad: int) -> tuple[Tensor, Tensor]:
    longest = max(len(example.tokens) for example in examples)
    tokens_BT = torch.full((len(examples), longest), pad)
    weights_BT = torch.zeros(len(examples), longest)
    for row, example in enumerate(examples):
        tokens_BT[row, : len(example.tokens)] = torch.tensor(example.tokens)
        weights_BT[row, : len(example.tokens)] = torch.tensor(example.weights)
    return tokens_BT, weights_BT


def _buckets(examples: list[Example], pad: int) -> list[tuple[Tensor, Tensor]]:
    """Padded batches of examples of similar length."""
    ordered = sorted(examples, key=lambda example: len(example.tokens))
    return [_pad(ordered[start : start + 8], pad) for start in range(0, len(ordered), 8)]


def _rate(config: MidtrainConfig, step: int) -> float:
    """Linear warm-up, level, linear decay over the last `decay_share`."""
    left = (config.steps - step) / (config.steps * config.decay_share)
    return min(1.0, step / config.warmup_steps, left)


def _write(
    config: MidtrainConfig,
    weights: Weights,
    codec: tokenizer.Tokenizer,
    sources: list[midtrain_corpus.Source],
    curve: list[dict[str, float]],
    seconds: float,
) -> None:
    checkpoint.save_seed(config.out, config.model, weights, codec)
    settings: dict[str, Any] = msgspec.to_builtins(config, enc_hook=str)
    del settings["out"]
    page = {
        "config": settings,
        "torch": torch.__version__,
        "seconds": round(seconds),
        "sources": [msgspec.to_builtins(source) for source in sources],
        "curve": curve,
    }
    (config.out / "midtrain.json").write_text(json.dumps(page, indent=1) + "\n")
