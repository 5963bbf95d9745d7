"""Imports packages without their docstrings, so that no expected answer of a doctest is in memory.

An empty string stands in each docstring's place: packages that add to `__doc__` still import.
"""

import ast
from importlib.machinery import SourceFileLoader
from types import CodeType


class BlindLoader(SourceFileLoader):
    """A source loader that neither reads nor writes compiled files: those hold the docstrings."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        tree = ast.parse(self.get_data(path), path)
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                _empty_docstring(node)
        code: CodeType = compile(tree, path, "exec", dont_inherit=True)
        return code


def _empty_docstring(node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> None:
    first = node.body[0] if node.body else None
    if (
        isinstance(first, ast.Expr)
        and isinstance(first.value, ast.Constant)
        and isinstance(first.value.value, str)
    ):
        first.value.value = ""
