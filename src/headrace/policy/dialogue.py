"""The one template of a conversation between harness and policy, in tokens.

    harness   <|task|>{prefix}<|hole|>{suffix}<|turn|>
    model     <|call|>{fill}<|end|>
    harness   <|result|>{text}<|turn|>
    model     <|call|>{fill}<|end|>

An editor that asks for a suggestion at its cursor opens the call itself: there the model knows how sure it
is of what would follow, and may say that it would rather show nothing:

    editor    <|task|>{prefix}<|hole|>{suffix}<|text|><|turn|><|call|>
    model     {fill}<|end|>   or   <|silent|>

Prefix, suffix and fill are canonical source (`policy.source`). Text is never interpreted: only these
functions write special tokens, so code or results that contain `<|end|>` can't inject one. It knows no
environment and gives no reward. Used by envs (both ways) and by mid-training, so that the seed has seen
exactly what the harness will send.
"""

from dataclasses import dataclass
from typing import Protocol


class TokenCodec(Protocol):
    """What the dialogue needs of `policy.tokenizer.Tokenizer`."""

    special: dict[str, int]

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: list[int]) -> str: ...


@dataclass(frozen=True, slots=True)
class Call:
    """A well-formed turn of the model: it asks to put `fill` into the hole."""

    fill: str


@dataclass(frozen=True, slots=True)
class Silent:
    """The model chose to show nothing."""


@dataclass(frozen=True, slots=True)
class Malformed:
    """A turn that is no tool call; `reason` is one of a few fixed sentences, fit for counting."""

    reason: str


def prompt_tokens(tokenizer: TokenCodec, prefix: str, suffix: str) -> list[int]:
    """Tokens of the first prompt: the text around the hole."""
    special = tokenizer.special
    return [
        special["<|task|>"],
        *tokenizer.encode(prefix),
        special["<|hole|>"],
        *tokenizer.encode(suffix),
        special["<|turn|>"],
    ]


def suggestion_prompt_tokens(tokenizer: TokenCodec, prefix: str, suffix: str) -> list[int]:
    """Tokens of an editor's request: the text around the cursor. `<|text|>` tells it from a task."""
    *around, turn = prompt_tokens(tokenizer, prefix, suffix)
    return [*around, tokenizer.special["<|text|>"], turn, tokenizer.special["<|call|>"]]


def call_tokens(tokenizer: TokenCodec, fill: str) -> list[int]:
    """Tokens of the model's turn that `parse_call` reads as `Call(fill)`."""
    special = tokenizer.special
    return [special["<|call|>"], *tokenizer.encode(fill), special["<|end|>"]]


def result_tokens(tokenizer: TokenCodec, text: str, tokens_max: int) -> list[int]:
    """Tokens of the harness's answer; at most `tokens_max` in all, markers included (the text
    is cut at its end).
    """
    if tokens_max < 2:
        raise ValueError(f"result_tokens: expected tokens_max of 2 or more, got {tokens_max}")
    special = tokenizer.special
    return [special["<|result|>"], *tokenizer.encode(text)[: tokens_max - 2], special["<|turn|>"]]


def stop_tokens(tokenizer: TokenCodec) -> list[int]:
    """The tokens that end a turn of the model."""
    return [tokenizer.special["<|end|>"]]


def suggestion_tokens(tokenizer: TokenCodec, fill: str) -> list[int]:
    """Tokens of the answer that `parse_suggestion` reads as `Call(fill)`."""
    return call_tokens(tokenizer, fill)[1:]


def suggestion_stop_tokens(tokenizer: TokenCodec) -> list[int]:
    """The tokens that end the model's answer to an editor."""
    return [*stop_tokens(tokenizer), tokenizer.special["<|silent|>"]]


def parse_suggestion(tokenizer: TokenCodec, tokens: list[int]) -> Call | Silent | Malformed:
    """What an editor is told after the model's answer `tokens`: a text to show, nothing by choice, or nothing
    because the answer is none. Never raises for ids of the vocabulary."""
    if tokens == [tokenizer.special["<|silent|>"]]:
        return Silent()
    return parse_call(tokenizer, [tokenizer.special["<|call|>"], *tokens])


def parse_call(tokenizer: TokenCodec, tokens: list[int]) -> Call | Malformed:
    """The call in the model's turn `tokens` (all that it wrote after `<|turn|>`), or why it is none. Never
    raises for ids of the vocabulary.
    """
    special = tokenizer.special
    if not tokens:
        return Malformed("empty turn")
    if tokens[0] != special["<|call|>"]:
        return Malformed("no <|call|> at the start")
    if special["<|end|>"] not in tokens:
        return Malformed("no <|end|>: cut off")
    end = tokens.index(special["<|end|>"])
    if end != len(tokens) - 1:
        return Malformed("tokens after <|end|>")
    inner = tokens[1:end]
    if not inner:
        return Malformed("empty call")
    if set(inner) & set(special.values()):
        return Malformed("special token inside the call")
    text = tokenizer.decode(inner)
    if "\ufffd" in text:
        return Malformed("bytes that are not UTF-8")
    return Call(text)
