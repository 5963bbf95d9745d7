"""Places to die at: where, when and how often."""

import subprocess
import sys
from pathlib import Path

import pytest

from headrace.errors import ConfigError
from headrace.failpoints import VARIABLE, parse, reach

REACH = """
import sys, threading
from headrace.failpoints import reach
def twice():
    for _ in range(2):
        reach("a.b/c")
        print("passed", flush=True)
if sys.argv[1] == "thread":
    thread = threading.Thread(target=twice)
    thread.start()
    thread.join()
else:
    twice()
"""


@pytest.mark.parametrize("where", ["main", "thread"])
@pytest.mark.parametrize(("nth", "passed"), [(1, 0), (2, 1), (3, 2)])
def test_it_dies_there(tmp_path: Path, where: str, nth: int, passed: int) -> None:
    """At the nth time, in whichever thread, before anything that comes after; a place never reached so often
    is passed."""
    marker = tmp_path / "hit"
    told = f"other@1=SIGKILL:{tmp_path / 'no'},a.b/c@{nth}=SIGKILL:{marker}"
    done = subprocess.run(
        [sys.executable, "-c", REACH, where], env={VARIABLE: told}, capture_output=True, timeout=60, text=True
    )
    assert done.returncode == (0 if nth > 2 else -9), done.stderr
    assert done.stdout == "passed\n" * passed
    assert marker.exists() == (nth <= 2) and not (tmp_path / "no").exists()


def test_once_for_all_that_share_the_marker(tmp_path: Path) -> None:
    """The process after the one that died passes."""
    told = {VARIABLE: f"a.b/c@1=SIGKILL:{tmp_path / 'hit'}"}
    command = [sys.executable, "-c", REACH, "main"]
    codes = [subprocess.run(command, env=told, capture_output=True, timeout=60).returncode for _ in range(2)]
    assert codes == [-9, 0]


def test_nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the variable, or with an empty one, every place is passed."""
    monkeypatch.delenv(VARIABLE, raising=False)
    reach("a.b/c")
    monkeypatch.setenv(VARIABLE, "")
    reach("a.b/c")


@pytest.mark.parametrize("told", ["a", "a@x=SIGKILL:/m", "a@1=SIGNONE:/m", "a@1=SIGKILL", "@1=SIGKILL:/m"])
def test_what_makes_no_sense_is_refused(told: str) -> None:
    """With the part that is wrong."""
    with pytest.raises(ConfigError, match=f"^{VARIABLE}: expected place@nth=SIGNAL:marker, got '{told}'"):
        parse(f"b@1=SIGKILL:/m,{told}")
