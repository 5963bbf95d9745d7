"""Wrong fills for a hole: what a careless author would write. A task is only kept if they fail.

Drawn by a generator seeded with the hole's own name, so that an index is built the same way twice.
"""

import ast
import random
from collections.abc import Sequence

from headrace.policy.source import Hole

_ARITHMETIC = ("+", "-", "*", "//", "%", "/")
_COMPARING = ("==", "!=", "<", "<=", ">", ">=")
_PAIRS = {
    "and": ("or",),
    "or": ("and",),
    "in": ("not in", "==", "is", "!="),
    "not in": ("in", "!=", "is not", "=="),
    "is": ("is not", "!=", "==", "in"),
    "is not": ("is", "==", "!=", "not in"),
}
_COMMON_NAMES = ("None", "len", "list", "str", "range", "iter")
COUNT = 6


def distractors(hole: Hole, others: Sequence[Hole], seed: str) -> list[str]:
    """Up to COUNT different fills of the hole's kind, none of them its own text. `others`: the holes of the
    same function."""
    own = hole.text.strip()
    same = [other.text.strip() for other in others if other.kind == hole.kind]
    if hole.kind == "operator":
        pool = _operators(own)
    elif hole.kind == "constant":
        pool = [*_constants(own), *same]
    elif hole.kind == "name":
        pool = [*same, *_COMMON_NAMES]
    else:
        pool = [*same, "None", "0", "''"] if hole.kind != "attribute" else [*same, "append", "get", "name"]
    pool = [text for text in dict.fromkeys(pool) if text != own]
    generator = random.Random(seed)
    if len(pool) > COUNT:
        pool = [pool[place] for place in sorted(generator.sample(range(len(pool)), COUNT))]
    return pool


def _operators(own: str) -> list[str]:
    if own in _PAIRS:
        return list(_PAIRS[own])
    if own in _COMPARING:
        return list(_COMPARING)
    assigned = "=" if own.endswith("=") else ""
    return [f"{sign}{assigned}" for sign in _ARITHMETIC]


def _constants(own: str) -> list[str]:
    value = ast.literal_eval(own)
    if isinstance(value, bool) or value is None:
        return ["True", "False", "None", "0", "1"]
    if isinstance(value, int | float):
        return [str(value + 1), str(value - 1), "0", "1", "2", "-1", "None"]
    if isinstance(value, str):
        return [repr(value + "_"), repr(value[:-1]), "''", "' '", "','", "None", repr(value.swapcase())]
    return ["None", "0", "b''"]
