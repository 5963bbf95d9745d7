"""Tokenizer and dialogue: holes never change tokens, text never becomes a special token."""

import inspect
import textwrap

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import PolicyError
from headrace.policy import dialogue, source, tokenizer
from headrace.policy.checkpoint import load_seed
from headrace.policy.dialogue import Call, Malformed, Silent

CODEC = load_seed()[2]
TEXT = source.canonical(inspect.getsource(textwrap))
HOLES = source.holes(TEXT)
SPECIAL = CODEC.special


@settings(max_examples=150)
@given(st.sampled_from(HOLES))
def test_a_hole_never_changes_the_tokens_around_it(hole: source.Hole) -> None:
    """tokens(prefix) + tokens(fill) + tokens(suffix) == tokens(whole)."""
    prefix, suffix = TEXT[: hole.start], TEXT[hole.end :]
    assert CODEC.encode(prefix) + CODEC.encode(hole.text) + CODEC.encode(suffix) == CODEC.encode(TEXT)


@settings(max_examples=150)
@given(st.text(max_size=60))
def test_any_text_survives_and_never_yields_a_special_token(text: str) -> None:
    """decode(encode(x)) == x, with ids below the special ones, whatever the text."""
    ids = CODEC.encode(text)
    assert CODEC.decode(ids) == text
    assert all(token < tokenizer.BPE_ENTRIES for token in ids)


@pytest.mark.parametrize("name", tokenizer.SPECIAL)
def test_special_names_in_a_program_are_plain_text(name: str) -> None:
    """A program that contains the name of a special token can't inject it, in prompt, fill or result."""
    text = f" x = '{name}'"
    assert set(CODEC.encode(text)).isdisjoint(SPECIAL.values())
    assert dialogue.parse_call(CODEC, dialogue.call_tokens(CODEC, text)) == Call(text)
    prompt = dialogue.prompt_tokens(CODEC, text, text)
    assert sum(token in SPECIAL.values() for token in prompt) == 3
    assert sum(token in SPECIAL.values() for token in dialogue.result_tokens(CODEC, text, 40)) == 2


def test_the_template() -> None:
    """task prefix hole suffix turn; call fill end; result text turn, cut to the limit."""
    assert CODEC.decode(dialogue.prompt_tokens(CODEC, " a", " b")) == "<|task|> a<|hole|> b<|turn|>"
    assert CODEC.decode(dialogue.call_tokens(CODEC, " +")) == "<|call|> +<|end|>"
    assert CODEC.decode(dialogue.result_tokens(CODEC, "no", 40)) == "<|result|>no<|turn|>"
    cut = dialogue.result_tokens(CODEC, "expected 1, got 2 " * 50, 40)
    assert len(cut) == 40 and cut[-1] == SPECIAL["<|turn|>"]


@pytest.mark.parametrize(
    ("tokens", "reason"),
    [
        ([], "empty turn"),
        ([5, SPECIAL["<|end|>"]], "no <|call|> at the start"),
        ([SPECIAL["<|call|>"], 5], "no <|end|>: cut off"),
        ([SPECIAL["<|call|>"], SPECIAL["<|end|>"]], "empty call"),
        ([SPECIAL["<|call|>"], 5, SPECIAL["<|end|>"], 5], "tokens after <|end|>"),
        ([SPECIAL["<|call|>"], SPECIAL["<|turn|>"], SPECIAL["<|end|>"]], "special token inside the call"),
        ([SPECIAL["<|call|>"], CODEC.encode("é")[0], SPECIAL["<|end|>"]], "bytes that are not UTF-8"),
    ],
)
def test_malformed_turns_have_a_reason(tokens: list[int], reason: str) -> None:
    """Every way to go wrong has its own fixed sentence."""
    assert dialogue.parse_call(CODEC, tokens) == Malformed(reason)


def test_a_foreign_tokenizer_is_refused() -> None:
    """Bytes that are no tokenizer, and ids outside the vocabulary, give a clear error."""
    with pytest.raises(PolicyError, match=r"^tokenizer: expected a tokenizer in JSON"):
        tokenizer.Tokenizer(b"{}")
    with pytest.raises(PolicyError, match=r"^tokenizer: expected an id in 0..2047, got 2048"):
        CODEC.decode([2048])


def test_an_editors_prompt_opens_the_call_and_is_marked() -> None:
    """It is the task's prompt with the mark before the turn, and the call opened behind it."""
    prompt = dialogue.suggestion_prompt_tokens(CODEC, " a", " b")
    assert CODEC.decode(prompt) == "<|task|> a<|hole|> b<|text|><|turn|><|call|>"


@pytest.mark.parametrize(
    ("tokens", "told"),
    [
        ([SPECIAL["<|silent|>"]], Silent()),
        (dialogue.suggestion_tokens(CODEC, " x + 1"), Call(" x + 1")),
        ([], Malformed("no <|end|>: cut off")),
        ([SPECIAL["<|end|>"]], Malformed("empty call")),
        (dialogue.call_tokens(CODEC, " x"), Malformed("special token inside the call")),
        ([5, SPECIAL["<|silent|>"]], Malformed("no <|end|>: cut off")),
        ([SPECIAL["<|silent|>"], SPECIAL["<|end|>"]], Malformed("special token inside the call")),
    ],
)
def test_an_answer_to_an_editor_is_a_text_or_silence_or_neither(tokens: list[int], told: object) -> None:
    """Silence is its token alone, in the first place; anywhere else it is a malformed answer."""
    assert dialogue.parse_suggestion(CODEC, tokens) == told
    assert dialogue.suggestion_stop_tokens(CODEC) == [SPECIAL["<|end|>"], SPECIAL["<|silent|>"]]
