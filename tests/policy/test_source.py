"""Canonical source and its holes."""

import ast
import bisect
import heapq
import inspect
import json.decoder
import textwrap
from types import ModuleType

import pytest

from headrace.errors import PolicyError
from headrace.policy import source

SAMPLE = '''
def f(a, *rest, k=2):
    """Documentation."""
    if a not in rest and -a < (k + 1) * 3:
        a += rest[0].x
    é = f"{a!r:>{k}} {k + 1}"
    return g(a, key=k)  # a remark
'''


def test_canonical_text_by_hand() -> None:
    """One space before each token, a tab per level, no docstring, no comment; an f-string stays one token."""
    assert (
        source.canonical("def f(a):\n  '''doc'''\n  return a.b+1 # x")
        == " def f ( a ) :\n\t return a . b + 1"
    )
    assert source.canonical("x = f'{a+1} b'") == " x = f'{a + 1} b'"
    assert source.canonical("def f():\n    'only a docstring'") == " def f ( ) :\n\t pass"
    assert source.restore(" def f ( a ) :\n\t return a") == "def f ( a ) :\n    return a\n"


@pytest.mark.parametrize("module", [bisect, heapq, textwrap, json.decoder])
def test_canonical_form_keeps_the_program(module: ModuleType) -> None:
    """The restored text has the syntax tree of the original without docstrings, and is canonical already."""
    text = inspect.getsource(module)
    form = source.canonical(text)
    tree = ast.parse(text)
    source._drop_docstrings(tree)
    assert ast.dump(ast.parse(source.restore(form))) == ast.dump(tree)
    assert source.canonical(source.restore(form)) == form


def test_holes_by_hand() -> None:
    """Each kind is found where it stands, with the space before it, in brackets or behind a sign."""
    text = source.canonical(SAMPLE)
    found = {(hole.kind, hole.text) for hole in source.holes(text)}
    assert {("operator", o) for o in (" not in", " and", " <", " +", " *", " +=")} <= found
    assert {("constant", c) for c in (" 1", " 3", " 0", " 2")} <= found
    assert {("name", n) for n in (" a", " rest", " k", " g")} <= found
    assert {("attribute", " x"), ("argument", " key = k"), ("argument", " a")} <= found
    assert {("expression", " ( k + 1 ) * 3"), ("expression", " k + 1"), ("expression", " - a")} <= found
    for hole in source.holes(text):
        assert text[hole.start : hole.end] == hole.text and source.fill_is_wellformed(hole.text)
        assert "!r" not in hole.text  # nothing inside an f-string


@pytest.mark.parametrize("module", [heapq, textwrap])
def test_another_fill_changes_only_the_hole(module: ModuleType) -> None:
    """A name put into a name's hole gives a program that parses and differs in that one token."""
    text = source.canonical(inspect.getsource(module))
    for hole in source.holes(text)[::40]:
        if hole.kind == "name":
            changed = text[: hole.start] + " other" + text[hole.end :]
            assert source.canonical(source.restore(changed)) == changed


@pytest.mark.parametrize(
    "fill",
    [
        " +",
        " not in",
        " f(1)",
        " k = 1",
        " * a",
        " '<|end|>'",
        " - 1",
        " x . y [ 0 ]",
        " not a",
        " '#'",
        " (1, 2)",
    ],
)
def test_wellformed_fills(fill: str) -> None:
    """An operator, an expression or one argument; a hash sign inside a string is no comment."""
    assert source.fill_is_wellformed(fill)


@pytest.mark.parametrize(
    "fill",
    [
        "",
        " ",
        " 1 ) + ( 2",
        " a # b",
        " a\n",
        " a, b",
        " a ,",
        " (1",
        " 1)",
        " yield x",
        " x = ",
        " import os",
        " + +",
        " a ; b",
        "\x00",
        " (" * 300,
        " 9" * 150,
        " ] [",
        " \\",
    ],
)
def test_malformed_fills(fill: str) -> None:
    """What closes a foreign bracket, hides the rest of the line, is two things or none is refused, never
    raised.
    """
    assert not source.fill_is_wellformed(fill)


def test_text_that_is_not_python_is_refused_with_its_place() -> None:
    """The error begins with the place and shows what came."""
    with pytest.raises(PolicyError, match=r"^source: expected Python, got 'def f'"):
        source.canonical("def f")
    with pytest.raises(PolicyError, match=r"^source: expected canonical Python"):
        source.holes(" x = (")
    with pytest.raises(PolicyError, match=r"^source: expected canonical Python"):
        source.holes("x=a+1")
