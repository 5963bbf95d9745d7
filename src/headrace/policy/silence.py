"""The first form of silence: what a policy that never saw `<|silent|>` needs before live feedback can teach
it when to be silent.

Mid-training teaches no silence, and the seed hardly tells an editor's prompt from a task's. So two rows of
the embedding are fitted, and nothing else is touched:

- the row of `<|text|>`, the mark in an editor's prompt, until the state in which an answer begins tells
  prompts with the mark from those without, while the fill stays what it was;
- the row of `<|silent|>`, so that it gets about a chosen share of the first tokens of answers to editors, and
  hardly any in a task or behind the first token.

A task holds neither, so its other scores keep their bits. The share differs from prompt to prompt, as a row
can say only so much. Used once, before a run (`trainer.start_from`).

P prompts  C width  V vocabulary
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.errors import PolicyError
from headrace.policy import dialogue, tree
from headrace.policy.checkpoint import from_bf16, to_bf16
from headrace.policy.decode import Decoder
from headrace.policy.dialogue import TokenCodec
from headrace.policy.model import ModelConfig, Weights

EMBEDDING: Final = "embed"
MARK: Final = "<|text|>"
SILENT: Final = "<|silent|>"
PREFILL: Final = 32  # prompts in one prefill
BATCH: Final = 16  # places in a step of the gradient
RATE: Final = 0.06  # of Adam, on rows whose norm is about 1
NEVER: Final = -5.0
"""The most that the log-probability of silence should be where it has no place: 0.7 %."""
RIDGE: Final = 0.02
"""Of the row's squared norm, in the last fit: a thousand states say little about 128 columns."""
POLISH_STEPS: Final = 150
ODDS_SCALE: Final = 100.0
"""Squared log-odds at a low temperature are large: this weighs them like the others."""


@dataclass(frozen=True, slots=True)
class Place:
    """A place in code, as an editor and as a task may ask about it, and what stands there."""

    prefix: str
    suffix: str
    fill: str


@dataclass(frozen=True, slots=True)
class Fit:
    """`weights`: bf16-exact, those given but for two rows. `share_P`: silence among the first tokens of each
    of the answers to editors that were fitted, at the temperature asked for; `task_share`: mean, of tasks at
    temperature 1."""

    weights: Weights
    share_P: Tensor
    task_share: float


def prepare(
    weights: Weights,
    model: ModelConfig,
    codec: TokenCodec,
    places: Sequence[Place],
    *,
    share: float,
    temperature: float,
    steps: int = 120,
    seed: int = 0,
) -> Fit:
    """A start from which about `share` of the editors' requests at `temperature` is answered with silence.
    Deterministic. Raises PolicyError for a share outside (0, 1), or without a place."""
    if not 0 < share < 1:
        raise PolicyError(f"silence: expected a share between 0 and 1, got {share}")
    if not places:
        raise PolicyError("silence: expected places, got none")
    silent = codec.special[SILENT]
    tasks = [dialogue.prompt_tokens(codec, place.prefix, place.suffix) for place in places]
    answers = [dialogue.call_tokens(codec, place.fill) for place in places]
    draw = random.Random(seed)
    # Where a task's silence would be wrong: at the turn, where the fill begins, and inside it.
    cut = [answer[: draw.choice((0, 1, 1, draw.randrange(1, len(answer))))] for answer in answers]
    task_PC = states(weights, model, [[*task, *part] for task, part in zip(tasks, cut, strict=True)])
    fitted = _fitted(weights, model, codec, places, task_PC, share, temperature, steps, draw)
    prompts = [dialogue.suggestion_prompt_tokens(codec, place.prefix, place.suffix) for place in places]
    live_PC = states(fitted, model, prompts)
    inside = [
        [*prompt, *answer[1 : draw.randrange(2, len(answer))]]
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    inside_PC = states(fitted, model, inside)
    row_C = _polished(fitted[EMBEDDING], silent, live_PC, task_PC, inside_PC, share, temperature)
    embedding = fitted[EMBEDDING].clone()
    embedding[silent] = row_C
    done = from_bf16(to_bf16({**fitted, EMBEDDING: embedding}))
    row_C = done[EMBEDDING][silent]
    live = _Seen(done[EMBEDDING], silent, live_PC, temperature)
    tasks_seen = _Seen(done[EMBEDDING], silent, task_PC, 1.0)
    return Fit(done, live.logp(row_C).exp(), float(tasks_seen.logp(row_C).exp().mean()))


@torch.inference_mode()
def states(weights: Weights, model: ModelConfig, prompts: Sequence[Sequence[int]]) -> Tensor:
    """What the embedding is multiplied with for the scores of the token behind each prompt: float32 `[P, C]`,
    recovered from the scores by least squares (there are more tokens than columns)."""
    decoder = Decoder(model, 1, 1)
    scores = [
        prefix.logits_V
        for start in range(0, len(prompts), PREFILL)
        for prefix in decoder.prefill(weights, [list(prompt) for prompt in prompts[start : start + PREFILL]])
    ]
    inverse_CV = torch.linalg.pinv(weights[EMBEDDING].double())
    state_PC: Tensor = torch.stack(scores).double() @ inverse_CV.T
    return state_PC.float()


def _fitted(
    weights: Weights,
    model: ModelConfig,
    codec: TokenCodec,
    places: Sequence[Place],
    task_PC: Tensor,
    share: float,
    temperature: float,
    steps: int,
    draw: random.Random,
) -> Weights:
    """`weights` with both rows fitted by gradient."""
    mark, silent = codec.special[MARK], codec.special[SILENT]
    embedding = weights[EMBEDDING]
    tasks = _Seen(embedding, silent, task_PC, 1.0)
    mark_C, silent_C = (embedding[token].clone().requires_grad_() for token in (mark, silent))
    rows = torch.tensor([mark, silent])
    optimizer = torch.optim.Adam([mark_C, silent_C], lr=RATE, betas=(0.9, 0.95))
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1.0, 2 * (1 - step / steps))
        now = {**weights, EMBEDDING: embedding.index_copy(0, rows, torch.stack([mark_C, silent_C]))}
        some = [places[draw.randrange(len(places))] for _ in range(BATCH)]
        loss = _live_loss(now, model, codec, some, share, temperature)
        loss = loss + 3 * _above(tasks.logp(silent_C))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    kept = embedding.clone()
    kept[mark], kept[silent] = mark_C.detach(), silent_C.detach()
    return from_bf16(to_bf16({**weights, EMBEDDING: kept}))


def _live_loss(
    weights: Weights,
    model: ModelConfig,
    codec: TokenCodec,
    places: Sequence[Place],
    share: float,
    temperature: float,
) -> Tensor:
    """Distance of the share from the one asked for, and the negative log-likelihood of the fills."""
    silent = codec.special[SILENT]
    groups = [
        tree.Group(
            dialogue.suggestion_prompt_tokens(codec, place.prefix, place.suffix),
            [dialogue.suggestion_tokens(codec, place.fill), [silent]],
        )
        for place in places
    ]
    logp = tree.tree_logp(weights, model, groups, temperature).logp
    silence_P = torch.stack([silent_T[0] for _, silent_T in logp])
    fills_P = torch.stack([fill_T.sum() for fill_T, _ in logp])
    return _off(silence_P, share) - temperature * fills_P.mean()


def _polished(
    embedding_VC: Tensor,
    silent: int,
    live_PC: Tensor,
    task_PC: Tensor,
    inside_PC: Tensor,
    share: float,
    temperature: float,
) -> Tensor:
    """The row of silence, float32 `[C]`, once the mark stands: on all states at once."""
    live = _Seen(embedding_VC, silent, live_PC, temperature)
    tasks = _Seen(embedding_VC, silent, task_PC, 1.0)
    inside = _Seen(embedding_VC, silent, inside_PC, temperature)
    row_C = embedding_VC[silent].clone().requires_grad_()
    optimizer = torch.optim.LBFGS([row_C], max_iter=POLISH_STEPS, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        odds_P = live.odds(row_C) - math.log(share / (1 - share))
        loss = odds_P.pow(2).mean() / ODDS_SCALE + RIDGE * row_C.pow(2).sum()
        loss = loss + _above(tasks.logp(row_C))
        loss = loss + _above(inside.logp(row_C))
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    optimizer.step(closure)  # type: ignore[no-untyped-call]
    return row_C.detach()


def _off(logp_P: Tensor, share: float) -> Tensor:
    """How far log-probabilities of silence are from that of `share`; linear far off, so that the few prompts
    whose scores are extreme don't bend the row."""
    return F.huber_loss(logp_P, torch.full_like(logp_P, math.log(share)))


def _above(logp_P: Tensor) -> Tensor:
    return F.relu(logp_P - NEVER).pow(2).mean()


class _Seen:
    """Some states at a temperature, with what all tokens but silence score there together: that stands while
    the row of silence is fitted."""

    def __init__(self, embedding_VC: Tensor, silent: int, state_PC: Tensor, temperature: float) -> None:
        rest_VC = torch.cat([embedding_VC[:silent], embedding_VC[silent + 1 :]])
        self._state_PC = state_PC.clone() / temperature  # out of inference mode: a constant of the graph
        self._rest_P = torch.logsumexp(self._state_PC @ rest_VC.T, 1)

    def odds(self, row_C: Tensor) -> Tensor:
        """Log-odds `[P]` of silence with the row `row_C`."""
        return self._state_PC @ row_C - self._rest_P

    def logp(self, row_C: Tensor) -> Tensor:
        return F.logsigmoid(self.odds(row_C))
