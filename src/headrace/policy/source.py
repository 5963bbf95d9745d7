"""Python source in the one canonical form that the policy reads and writes, and the holes that can be cut
into it.

Canonical form: the text of `ast.unparse` without docstrings; every Python token (an f-string counts as one)
is preceded by exactly one space; a line starts with one tab per level. So a piece cut out between two Python
tokens never changes the BPE tokens of what stands left and right of it (`policy.tokenizer` splits before each
space and at line breaks):

    tokens(prefix) + tokens(fill) + tokens(suffix) == tokens(prefix + fill + suffix)

It is not a formatter, never runs code, and knows nothing about tasks or rewards. Read by envs and by
mid-training.
"""

import ast
import functools
import io
import itertools
import re
import tokenize
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from headrace.errors import PolicyError

HoleKind = Literal["operator", "constant", "name", "expression", "attribute", "argument"]

FILL_CHARACTERS_MAX = 200  # no sensible fill is longer; it also bounds what a hostile fill costs the parser
FILLS_REMEMBERED = 4096  # the same few names and operators come again and again
INDENT = "    "
_SKIPPED = {tokenize.COMMENT, tokenize.NL, tokenize.ENCODING, tokenize.ENDMARKER}
# Python 3.12 splits an f-string into tokens; 3.14 does the same to t-strings. Here each stays one token.
_OPENERS = {getattr(tokenize, name) for name in ("FSTRING_START", "TSTRING_START") if hasattr(tokenize, name)}
_CLOSERS = {getattr(tokenize, name) for name in ("FSTRING_END", "TSTRING_END") if hasattr(tokenize, name)}
_COMPOUND: tuple[type[ast.expr], ...] = (
    ast.BinOp,
    ast.BoolOp,
    ast.Compare,
    ast.UnaryOp,
    ast.Call,
    ast.Subscript,
    ast.IfExp,
    ast.Attribute,
    ast.Tuple,
    ast.List,
    ast.Dict,
    ast.ListComp,
    ast.GeneratorExp,
    ast.Lambda,
)
_ARITHMETIC = ("+", "-", "*", "/", "//", "%", "**", "@", "<<", ">>", "&", "|", "^")
_COMPARING = ("==", "!=", "<", "<=", ">", ">=", "in", "not in", "is", "is not")
_OPERATORS = frozenset({*_ARITHMETIC, *(f"{sign}=" for sign in _ARITHMETIC), *_COMPARING, "and", "or"})


@dataclass(frozen=True, slots=True)
class Hole:
    """A piece of canonical text: `canonical[start:end] == text`; it begins with the space before its first
    token."""

    kind: HoleKind
    start: int
    end: int
    text: str


@dataclass(frozen=True, slots=True)
class _Token:
    kind: int
    text: str
    start: tuple[int, int]
    end: tuple[int, int]


def canonical(source: str) -> str:
    """Canonical form of runnable Python `source`, without docstrings; the same for sources with equal syntax
    trees.

    Raises PolicyError for text that Python can't parse. `canonical(restore(canonical(s))) == canonical(s)`.
    """
    try:
        return canonical_tree(_parse(source))
    except (SyntaxError, ValueError, RecursionError, MemoryError, tokenize.TokenError) as error:
        raise PolicyError(f"source: expected Python, got {_short(source)!r}: {error}") from error


def canonical_tree(tree: ast.AST) -> str:
    """Canonical form of a syntax tree (a module, or one function of it). The tree loses its docstrings."""
    _drop_docstrings(tree)
    lines: list[str] = []
    words: list[str] = []
    depth = 0
    for token in _tokens(ast.unparse(ast.fix_missing_locations(tree))):
        if token.kind == tokenize.INDENT:
            depth += 1
        elif token.kind == tokenize.DEDENT:
            depth -= 1
        elif token.kind == tokenize.NEWLINE:
            lines.append("\t" * depth + " " + " ".join(words))
            words = []
        else:
            words.append(token.text)
    return "\n".join(lines)


def restore(text: str) -> str:
    """Runnable Python of canonical `text` (tabs back to four spaces, the space before each line's first token
    gone).

    Never raises: text that isn't Python stays so, and fails where it is compiled.
    """
    lines = []
    for line in text.split("\n"):
        body = line.lstrip("\t")
        lines.append(INDENT * (len(line) - len(body)) + body.removeprefix(" "))
    return "\n".join(lines) + "\n"


def holes(text: str) -> list[Hole]:
    """All holes of canonical `text`, by position. Raises PolicyError if it isn't canonical Python.

    operator: of a binary, boolean or comparing expression or an augmented assignment. constant: number,
    string, True, False, None. name: a variable that is read. attribute: what follows a dot. argument: one
    argument of a call, with its keyword. expression: any larger expression. Nothing inside an f-string.
    """
    plain = restore(text)
    try:
        tree = _parse(plain)
        tokens = [token for token in _tokens(plain) if token.text.strip()]
    except (SyntaxError, ValueError, tokenize.TokenError) as error:
        raise PolicyError(f"source: expected canonical Python, got {_short(text)!r}: {error}") from error
    place = _Places(text, plain)
    found = {}
    for kind, start, end in _spans(tree, tokens, place):
        hole = Hole(kind, start - 1, end, text[start - 1 : end])
        if not hole.text.startswith(" "):
            raise PolicyError(f"source: expected canonical Python (one space before {text[start:end]!r})")
        found[(hole.start, hole.end, kind)] = hole
    return [found[key] for key in sorted(found)]


@functools.lru_cache(FILLS_REMEMBERED)
def fill_is_wellformed(text: str) -> bool:
    """Whether `text` alone is one operator, or one expression or call argument: no comment, no line break,
    nothing that closes a bracket it did not open. Never raises; never runs anything.
    """
    if len(text) > FILL_CHARACTERS_MAX or not text.isprintable() or not text.strip():
        return False
    if " ".join(text.split()) in _OPERATORS:
        return True
    try:
        if any(token.kind == tokenize.COMMENT for token in _raw_tokens(text.strip())):
            return False
        statement = _parse(f"f({text})").body[0]
        tokens = [token.text for token in _tokens(f"f({text})") if token.text.strip()]
    except (SyntaxError, ValueError, RecursionError, MemoryError, tokenize.TokenError):
        return False
    call = statement.value if isinstance(statement, ast.Expr) else None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
        return False
    return len(call.args) + len(call.keywords) == 1 and tokens[-2] != ","


def _parse(source: str) -> ast.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a doubtful escape in somebody's source is not ours to report
        return ast.parse(source)


def _drop_docstrings(tree: ast.AST) -> None:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            kept = [
                statement
                for statement in node.body
                if not (
                    isinstance(statement, ast.Expr)
                    and isinstance(statement.value, ast.Constant)
                    and isinstance(statement.value.value, str)
                )
            ]
            node.body = kept or ([] if isinstance(node, ast.Module) else [ast.Pass()])


def _raw_tokens(plain: str) -> Iterator[_Token]:
    for kind, text, start, end, _ in tokenize.generate_tokens(io.StringIO(plain).readline):
        yield _Token(kind, text, start, end)


def _tokens(plain: str) -> Iterator[_Token]:
    """Python's tokens without comments and blank lines, an f-string as one."""
    lines = plain.split("\n")
    depth = 0
    start = (0, 0)
    for token in _raw_tokens(plain):
        if token.kind in _OPENERS:
            start = token.start if depth == 0 else start
            depth += 1
        elif token.kind in _CLOSERS:
            depth -= 1
            if depth == 0:
                text = "\n".join(lines[start[0] - 1 : token.end[0]])
                cut = len(lines[token.end[0] - 1]) - token.end[1]
                yield _Token(tokenize.STRING, text[start[1] : len(text) - cut], start, token.end)
        elif depth == 0 and token.kind not in _SKIPPED:
            yield token


class _Places:
    """From positions in the runnable text to offsets in the canonical text."""

    def __init__(self, text: str, plain: str) -> None:
        self._lines = plain.split("\n")
        self._starts = []
        self._shifts = []
        offset = 0
        for line in text.split("\n"):
            tabs = len(line) - len(line.lstrip("\t"))
            self._starts.append(offset)
            self._shifts.append(tabs + 1 - len(INDENT) * tabs)
            offset += len(line) + 1

    def of_characters(self, line: int, column: int) -> int:
        return self._starts[line - 1] + column + self._shifts[line - 1]

    def of_bytes(self, line: int, column_bytes: int) -> int:
        characters = len(self._lines[line - 1].encode()[:column_bytes].decode())
        return self.of_characters(line, characters)

    def of_node(self, node: ast.expr | ast.keyword) -> tuple[int, int]:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return self.of_bytes(node.lineno, node.col_offset), self.of_bytes(
            node.end_lineno, node.end_col_offset
        )


def _spans(tree: ast.AST, tokens: list[_Token], place: _Places) -> Iterator[tuple[HoleKind, int, int]]:
    offsets = [(place.of_characters(*t.start), place.of_characters(*t.end), t.text) for t in tokens]
    starts = {start for start, _, _ in offsets}
    ends = {end for _, end, _ in offsets}

    def between(left: int, right: int) -> tuple[int, int]:
        inner = [o for o in offsets if left <= o[0] and o[1] <= right and o[2] not in "()"]
        return inner[0][0], inner[-1][1]

    for node in _walk_outside_fstrings(tree):
        if isinstance(node, ast.BinOp):
            yield "operator", *between(place.of_node(node.left)[1], place.of_node(node.right)[0])
        elif isinstance(node, ast.BoolOp):
            for left, right in itertools.pairwise(node.values):
                yield "operator", *between(place.of_node(left)[1], place.of_node(right)[0])
        elif isinstance(node, ast.Compare):
            parts = [node.left, *node.comparators]
            for left, right in itertools.pairwise(parts):
                yield "operator", *between(place.of_node(left)[1], place.of_node(right)[0])
        elif isinstance(node, ast.AugAssign):
            yield "operator", *between(place.of_node(node.target)[1], place.of_node(node.value)[0])
        elif isinstance(node, ast.Constant) and node.value is not Ellipsis:
            yield "constant", *place.of_node(node)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            yield "name", *place.of_node(node)
        elif isinstance(node, ast.Attribute):
            end = place.of_node(node)[1]
            yield "attribute", end - len(node.attr), end
        elif isinstance(node, ast.Call):
            arguments: list[ast.expr | ast.keyword] = [*node.args, *node.keywords]
            for argument in arguments:
                yield "argument", *place.of_node(argument)
        if isinstance(node, _COMPOUND) and isinstance(getattr(node, "ctx", ast.Load()), ast.Load):
            start, end = place.of_node(node)
            if start in starts and end in ends:
                yield "expression", start, end


def _walk_outside_fstrings(tree: ast.AST) -> Iterator[ast.AST]:
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        if type(node).__name__ not in ("JoinedStr", "TemplateStr"):
            yield node
            waiting.extend(ast.iter_child_nodes(node))


def _short(text: str) -> str:
    return re.sub(r"\s+", " ", text)[:60]
