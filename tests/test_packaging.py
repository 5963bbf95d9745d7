"""The wheel: built from the tracked files alone, it works in another directory, without the checkout."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CLIENT = (
    "headrace.wire.codec",
    "headrace.wire.topics",
    "headrace.bus",
    "headrace.bus.sqlite",
    "headrace.store",
    "headrace.producers.client",
    "headrace.producers.adapters.vscode",
)
HEAVY = ("torch", "numpy", "faust", "matplotlib", "tokenizers")


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel's contents, as pip would lay them out."""
    home = tmp_path_factory.mktemp("wheel")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False, timeout=30)
    if listed.returncode:
        pytest.skip("not a git checkout")
    for name in listed.stdout.decode().split("\0"):
        source, target = ROOT / name, home / "source" / name
        if name and (source.is_symlink() or source.is_file()):
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target, follow_symlinks=False)
    built = subprocess.run(
        [
            sys.executable,
            "-m",
            "build",
            "--wheel",
            "--no-isolation",
            "--outdir",
            home / "out",
            home / "source",
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert built.returncode == 0, built.stdout[-2000:] + built.stderr[-2000:]
    (wheel,) = (home / "out").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(home / "site")
    return home / "site"


def python(unpacked: Path, tmp_path: Path, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, *words],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(unpacked)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_wheel_holds_everything_that_runs(unpacked: Path) -> None:
    """All folders, the seed, the task index and the report's page are in it; tests and benchmarks are not."""
    for name in (
        "trainer/learner.py",
        "cli/report.html",
        "envs/tasksets/doctests.json.zst",
        "policy/seed/model.safetensors",
        "policy/seed/tokenizer.json",
        "rpc/inference.proto",
        "py.typed",
    ):
        assert (unpacked / "headrace" / name).is_file(), name
    assert {path.name.partition("-")[0] for path in unpacked.iterdir()} == {"headrace"}


def test_the_command_line_runs_from_the_wheel(unpacked: Path, tmp_path: Path) -> None:
    """In another directory, `headrace --help` comes from the wheel, and a log can be made and looked at."""
    where = python(unpacked, tmp_path, "-c", "import headrace.trainer; print(headrace.trainer.__file__)")
    assert where.startswith(str(unpacked))
    assert "demo" in python(unpacked, tmp_path, "-m", "headrace", "--help")
    address = f"sqlite:{tmp_path}/log"
    python(unpacked, tmp_path, "-m", "headrace", "topics", "create", "--bus", address)
    assert "rollout.steps" in python(unpacked, tmp_path, "-m", "headrace", "topics", "--bus", address)


def test_client_parts_need_nothing_heavy(unpacked: Path, tmp_path: Path) -> None:
    """Records, codec, bus, store and the feedback client import without torch and the like."""
    code = f"import sys\nfor name in {HEAVY!r}: sys.modules[name] = None\nimport {', '.join(CLIENT)}"
    python(unpacked, tmp_path, "-c", code)
