"""The habits of the house, held over the source itself: layout, names, sizes, docstrings.

A ratchet: a limit may be tightened here, and an exception needs its reason beside it.
"""

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("consumers", "envs", "inference", "kernels", "producers", "streams", "trainer")
LINES_MAX = 400
LONGER = {"src/headrace/wire/records.py": 450}
"""The one list of all records: a reader wants it whole."""
TEST_LINES_MAX = 650
"""A contract suite is one idea and stays in one file."""
SELF_EVIDENT_LINES = 12
BANNED_NAMES = {"utils", "util", "helpers", "helper", "manager", "data", "misc"}
GENERATED = re.compile(r"_pb2(_grpc)?\.pyi?$")
REGISTRIES = re.compile(
    r"(py" + r"pi|python" + r"hosted|repo1?\.mav" + r"en|npm" + r"js|crates)[a-z.]*\.(org|com|io)"
)
"""Hosts that packages come from: tools know them by themselves. In pieces, or it would find itself."""
MACHINE_PATHS = re.compile(r"(^|[^\w./])/(home|root|work|Users)/\w")


@cache
def tracked() -> tuple[str, ...]:
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False, timeout=30)
    if done.returncode:
        pytest.skip("not a git checkout")
    return tuple(name for name in done.stdout.decode().split("\0") if name and (ROOT / name).exists())


def sources() -> Iterator[tuple[str, str]]:
    """Name and text of each Python file that people write."""
    for name in tracked():
        if name.endswith(".py") and not GENERATED.search(name) and not (ROOT / name).is_symlink():
            yield name, (ROOT / name).read_text(encoding="utf-8")


def parsed(text: str) -> ast.Module:
    """Parsed on a thread of its own: CPython 3.11 keeps a recursion count for each, and one that an earlier
    test left wrong makes the parser refuse good source ("recursion depth mismatch")."""
    with ThreadPoolExecutor(1) as fresh:
        return fresh.submit(ast.parse, text).result(30)


def ours() -> Iterator[tuple[str, ast.Module]]:
    """Parsed files of the product: no tests, benchmarks or examples."""
    for name, text in sources():
        if name.startswith(("src/", *(f"{folder}/" for folder in FOLDERS))):
            yield name, parsed(text)


def test_seven_links() -> None:
    """`src/headrace` holds a relative link to each of the seven folders, and to nothing else."""
    links = {path.name: path.readlink() for path in (ROOT / "src/headrace").iterdir() if path.is_symlink()}
    assert links == {folder: Path("../..") / folder for folder in FOLDERS}


def test_files_are_small() -> None:
    """No Python file is longer than 400 lines; a test file may have 650."""
    long = {
        name: text.count("\n")
        for name, text in sources()
        if text.count("\n") > LONGER.get(name, TEST_LINES_MAX if name.startswith("tests/") else LINES_MAX)
    }
    assert long == {}


def test_names_say_something() -> None:
    """No module or folder is named after nothing (`utils`, `helpers`, `data` ...)."""
    found = [name for name in tracked() if BANNED_NAMES & set(Path(name).with_suffix("").parts)]
    assert found == []


def test_modules_say_what_they_are() -> None:
    """Every module that has code begins with a docstring."""
    found = [name for name, tree in ours() if tree.body and ast.get_docstring(tree) is None]
    assert found == []


def test_public_functions_are_documented() -> None:
    """A public function has a docstring, unless it is so short that its name and types say everything."""
    bare = [
        f"{name}:{node.lineno} {node.name}"
        for name, tree in ours()
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and not node.name.startswith("_")
        and ast.get_docstring(node) is None
        and (node.end_lineno or 0) - node.lineno > SELF_EVIDENT_LINES
        and not _is_command(name, node)
    ]
    assert bare == []


def _is_command(name: str, node: ast.AST) -> bool:
    """`arguments` and `run` of a command are explained by its module."""
    return name.startswith("src/headrace/cli/") and getattr(node, "name", "") in ("arguments", "run")


def test_imports_are_absolute() -> None:
    """`from headrace.x import y`: the same line works from a link and from its target."""
    relative = [
        f"{name}:{node.lineno}"
        for name, tree in ours()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.level
    ]
    assert relative == []


def test_no_error_is_swallowed() -> None:
    """No handler of every exception has an empty body."""
    swallowed = [
        f"{name}:{handler.lineno}"
        for name, tree in ours()
        for handler in ast.walk(tree)
        if isinstance(handler, ast.ExceptHandler)
        and (handler.type is None or ast.unparse(handler.type) in ("Exception", "BaseException"))
        and all(isinstance(statement, ast.Pass | ast.Continue) for statement in handler.body)
    ]
    assert swallowed == []


def test_nothing_of_one_machine() -> None:
    """No absolute path of a machine and no host of a package registry stands in any tracked text."""
    found = []
    for name in tracked():
        path = ROOT / name
        if path.is_symlink() or path.suffix in (".safetensors", ".zst", ".dict", ".png"):
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if REGISTRIES.search(line) or MACHINE_PATHS.search(line):
                found.append(f"{name}:{number}: {line.strip()[:80]}")
    assert found == []


def test_test_files_have_their_own_names() -> None:
    """Tests live in folders without packages: two files of one name would hide each other."""
    counts = Counter(
        Path(name).name for name in tracked() if name.startswith("tests/") and name.endswith(".py")
    )
    assert [name for name, count in counts.items() if count > 1] == []


def test_tests_say_what_they_hold() -> None:
    """Each test has a docstring, and no test waits by sleeping in a loop-free line."""
    bare = [
        f"{name}:{node.lineno} {node.name}"
        for name, text in sources()
        if Path(name).name.startswith("test_")
        for node in ast.walk(parsed(text))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_") and not ast.get_docstring(node)
    ]
    assert bare == []


def test_import_contracts() -> None:
    """The layers of ARCHITECTURE.md hold: import-linter's contracts in pyproject.toml are all kept."""
    command = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"
    done = subprocess.run(  # a process of its own: it disables the loggers of whoever calls it
        [sys.executable, "-c", command], cwd=ROOT, capture_output=True, text=True, check=False, timeout=100
    )
    assert done.returncode == 0, done.stdout + done.stderr
