"""Every setting, its default and what it means, as a page: docs/settings.md.

    python -m headrace.cli.settings_page > docs/settings.md

A meaning is the docstring below its field, read from the source; one without says all by its name. Not here:
the settings (`cli.settings`, `<folder>/config.py`).
"""

import ast
import inspect
import json
import sys
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from typing import Any, Final

import msgspec

from headrace.cli.settings import Settings

HEAD: Final = """# Settings

Generated from the source (`make docs`). How they are given, and which of several wins: [cli.md](cli.md).
Each is a key of a TOML file and a flag, `--trainer.lr 3e-6`. `-`: none.
"""


def render() -> str:
    """The page, as Markdown with a newline at its end."""
    parts = [HEAD]
    for section in msgspec.structs.fields(Settings):
        rows = [f"| `{name}` | {_cell(default)} | {meaning} |" for name, default, meaning in _leaves(section)]
        parts.append(
            "\n".join([f"## {section.name}\n", "| setting | default | |", "|---|---|---|", *rows, ""])
        )
    return "\n".join(parts)


def _leaves(field: msgspec.structs.FieldInfo, prefix: str = "") -> Iterator[tuple[str, Any, str]]:
    """Name below its section, default and meaning of all settings in `field`, a struct of settings."""
    owner = field.type
    meanings = _meanings(owner)
    for inner in msgspec.structs.fields(owner):
        if isinstance(inner.type, type) and issubclass(inner.type, msgspec.Struct):
            yield from _leaves(inner, f"{prefix}{inner.name}.")
        else:
            yield f"{prefix}{inner.name}", _default(inner), meanings.get(inner.name, "")


def _default(field: msgspec.structs.FieldInfo) -> Any:
    made = field.default_factory
    return field.default if made is msgspec.NODEFAULT else made()


def _cell(default: Any) -> str:
    if default is None or default in ("", {}, []):
        return "-"
    text = json.dumps(msgspec.to_builtins(default), ensure_ascii=False)
    return f"`{text}`"


@cache
def _meanings(owner: type) -> dict[str, str]:
    """By field: the docstring below it in the source of `owner`, on one line."""
    tree = ast.parse(inspect.getsource(sys.modules[owner.__module__]))
    body = next(n.body for n in ast.walk(tree) if isinstance(n, ast.ClassDef) and n.name == owner.__name__)
    found = {}
    for field, below in pairwise(body):
        match field, below:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                found[name] = " ".join(text.split()).replace("|", "\\|")
    return found


if __name__ == "__main__":
    print(render(), end="")
