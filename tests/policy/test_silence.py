"""The start of silence: two rows change, editors get about the share, tasks keep their numbers."""

import random

import pytest
import torch

from headrace.errors import PolicyError
from headrace.policy import dialogue, silence
from headrace.policy.checkpoint import load_seed
from headrace.policy.decode import Decoder

MODEL, WEIGHTS, CODEC = load_seed()
ROWS = [CODEC.special[silence.MARK], CODEC.special[silence.SILENT]]


def _places(count: int) -> list[silence.Place]:
    draw = random.Random(1)
    found = []
    for _ in range(count):
        left, right = draw.sample(["a", "key", "value", "index", "items", "self", "text", "count"], 2)
        found.append(silence.Place(f" return {left}", f" {right}", draw.choice([" +", " ==", " in", " and"])))
    return found


def test_silence_changes_two_rows_and_gives_editors_about_the_share() -> None:
    """Every other weight has its bits, so a task's scores of all other tokens have theirs."""
    places = _places(64)
    fit = silence.prepare(WEIGHTS, MODEL, CODEC, places, share=0.1, temperature=0.3, steps=3)
    for name, tensor in WEIGHTS.items():
        differs = (tensor != fit.weights[name]).reshape(tensor.shape[0], -1).any(1).nonzero().flatten()
        assert differs.tolist() == (sorted(ROWS) if name == silence.EMBEDDING else [])
    assert 0.02 < float(fit.share_P.median()) < 0.4
    prompt = dialogue.prompt_tokens(CODEC, places[0].prefix, places[0].suffix)
    scores = [Decoder(MODEL, 1, 1).prefill(w, [prompt])[0].logits_V for w in (WEIGHTS, fit.weights)]
    kept = [token for token in range(len(scores[0])) if token not in ROWS]
    assert torch.equal(scores[0][kept], scores[1][kept])


def test_states_give_back_the_scores() -> None:
    """The embedding times a recovered state is what the network said."""
    prompt = dialogue.prompt_tokens(CODEC, " return a", " b")
    state_PC = silence.states(WEIGHTS, MODEL, [prompt])
    scores_V = Decoder(MODEL, 1, 1).prefill(WEIGHTS, [prompt])[0].logits_V
    assert torch.allclose(state_PC[0] @ WEIGHTS["embed"].T, scores_V, atol=1e-2)


@pytest.mark.parametrize(("share", "count"), [(0.0, 1), (1.0, 1), (0.1, 0)])
def test_what_can_not_be_prepared_is_refused(share: float, count: int) -> None:
    """A share of nothing or all, or no place to fit on."""
    with pytest.raises(PolicyError, match="silence: expected"):
        silence.prepare(WEIGHTS, MODEL, CODEC, _places(count), share=share, temperature=0.3)
