"""Training examples of mid-training: plain functions, holes, and dialogues in which a first try fails.

An example is a list of tokens with a weight for each: how much the loss cares about predicting it. What the
harness says in a dialogue and the wrong fill weigh nothing: the policy never has to imitate them. The
template is `policy.dialogue`'s, so the seed has seen exactly what the environments send; results are imitated
in form only, no task is solved here.
"""

import random
from typing import NamedTuple

from headrace.policy.dialogue import call_tokens, prompt_tokens, result_tokens
from headrace.policy.source import Hole
from headrace.policy.tokenizer import Tokenizer
from headrace.trainer.midtrain_corpus import Function

# Share of each kind among the holes: the kinds that carry a signal in the tasks come most often.
KIND_SHARE = {"operator": 6, "constant": 6, "name": 6, "attribute": 2, "expression": 2, "argument": 1}
SPAN_SHARE = 0.06  # of the holes: any run of tokens, so that the policy stays a general filler
TEXT_SHARE = 0.12  # of the examples: plain functions
RETRY_SHARE = 0.2  # of the dialogues: the first fill is wrong
FILL_TOKENS_MAX = 12
RESULT_TOKENS_MAX = 40
FILL_WEIGHT = 3.0


class Example(NamedTuple):
    tokens: list[int]
    weights: list[float]  # of predicting tokens[i]; the first is never predicted


class Examples:
    """An endless source of examples over `functions`; the same arguments give the same examples."""

    def __init__(self, functions: list[Function], tokenizer: Tokenizer, tokens_max: int, seed: int) -> None:
        self._functions = [function for function in functions if function.holes]
        self._tokenizer = tokenizer
        self._tokens_max = tokens_max
        self._random = random.Random(seed)
        # Functions outside classes are what tasks are made of: they come twice as often.
        self._weights = [2.0 if function.free else 1.0 for function in self._functions]
        self._pools = self._pools_of_fills()

    def next(self, count: int, context_weight: float) -> list[Example]:
        """The next `count` examples; `context_weight` is the weight of predicting the program around a
        hole."""
        found: list[Example] = []
        while len(found) < count:
            for function in self._random.choices(self._functions, self._weights, k=count):
                example = self._example(function, context_weight)
                if example is not None and len(example.tokens) <= self._tokens_max and len(found) < count:
                    found.append(example)
        return found

    def hole(self, function: Function) -> Hole | None:
        """A hole of the function, its kind drawn by `KIND_SHARE`; nothing if its fill would be too long."""
        if self._random.random() < SPAN_SHARE:
            return self._span(function)
        kinds = sorted({hole.kind for hole in function.holes})
        kind = self._random.choices(kinds, [KIND_SHARE[kind] for kind in kinds])[0]
        hole = self._random.choice([hole for hole in function.holes if hole.kind == kind])
        return hole if len(self._tokenizer.encode(hole.text)) <= FILL_TOKENS_MAX else None

    def _example(self, function: Function, context_weight: float) -> Example | None:
        if self._random.random() < TEXT_SHARE:
            tokens = [self._tokenizer.special["<|text|>"], *self._tokenizer.encode(function.text)]
            return Example(tokens, [context_weight] * len(tokens))
        hole = self.hole(function)
        if hole is None:
            return None
        prompt = prompt_tokens(self._tokenizer, function.text[: hole.start], function.text[hole.end :])
        tokens, weights = prompt, [context_weight] * (len(prompt) - 1) + [0.0]
        if self._random.random() < RETRY_SHARE:
            wrong = self._wrong(function, hole)
            attempt = call_tokens(self._tokenizer, wrong)
            result = result_tokens(self._tokenizer, self._result(function, wrong), RESULT_TOKENS_MAX)
            tokens = tokens + attempt + result
            weights = weights + [1.0] + [0.0] * (len(attempt) + len(result) - 1)
        call = call_tokens(self._tokenizer, hole.text)
        return Example(tokens + call, weights + [1.0] + [FILL_WEIGHT] * (len(call) - 1))

    def _span(self, function: Function) -> Hole | None:
        gaps = [index for index, character in enumerate(function.text) if character == " "]
        first = self._random.randrange(len(gaps))
        start, end = (
            gaps[first],
            ([*gaps, len(function.text)])[min(first + self._random.randint(1, 6), len(gaps))],
        )
        text = function.text[start:end]
        if "\n" in text or len(self._tokenizer.encode(text)) > FILL_TOKENS_MAX:
            return None
        return Hole("expression", start, end, text)

    def _pools_of_fills(self) -> dict[str, list[str]]:
        sample = self._functions[:: max(1, len(self._functions) // 2000)]
        return {
            kind: [
                hole.text
                for function in sample
                for hole in function.holes
                if hole.kind == kind and len(hole.text) < 24
            ]
            or [" None"]
            for kind in KIND_SHARE
        }

    def _wrong(self, function: Function, hole: Hole) -> str:
        near = [other.text for other in function.holes if other.kind == hole.kind and other.text != hole.text]
        pool = near if near and self._random.random() < 0.7 else self._pools[hole.kind]
        choices = [text for text in pool if text != hole.text and len(text) < 40]
        return self._random.choice(choices) if choices else " None"

    def _result(self, function: Function, wrong: str) -> str:
        """Something in the form of what a harness answers: an exception's line, or what was expected and what
        came."""
        draw = self._random.random()
        name = wrong.strip()
        if name.isidentifier() and f" {name} " not in function.text:
            return f"NameError: name '{name}' is not defined"
        if draw < 0.15:
            left, right = self._random.sample(["int", "str", "list", "NoneType", "float", "tuple", "dict"], 2)
            sign = self._random.choice(["+", "-", "*", "<", ">="])
            return f"TypeError: unsupported operand type(s) for {sign}: '{left}' and '{right}'"
        if draw < 0.3:
            return self._random.choice(
                [
                    "SyntaxError: invalid syntax",
                    "IndexError: list index out of range",
                    "KeyError: 0",
                    "ValueError",
                    "TypeError",
                ]
            )
        name = function.text.split("(")[0].split()[-1]
        arguments = ", ".join(self._value() for _ in range(self._random.randint(1, 2)))
        return f"{name}({arguments}): expected {self._value()}, got {self._value()}"

    def _value(self) -> str:
        number = str(self._random.randint(0, 12))
        word = f"'{self._random.choice(['a', 'abc', 'foo', 'x y', ''])}'"
        shapes = [
            number,
            word,
            f"[{number}, {self._random.randint(0, 9)}]",
            "None",
            "True",
            "False",
            f"({number}, {word})",
            f"{number}.5",
        ]
        return self._random.choice(shapes)
