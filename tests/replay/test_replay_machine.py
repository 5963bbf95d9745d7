"""Another instruction set, for real: the ledger's kernel probe says beforehand that bits may change.

In a process of its own, as the libraries choose their code once. `MKL_CBWR=COMPATIBLE` takes the matrix
products that every processor has; docs/replay.md says what else was tried.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

from altered_log import record_run
from packed_place import Place

SCRIPT = Path(__file__).with_name("altered_log.py")


def test_another_instruction_set(tmp_path: Path) -> None:
    """The probe is another, numbers differ in their last digits, and the exit code says whose doing it is."""
    place = Place(tmp_path / "run")
    steps = record_run(place)
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(place.directory), "1..6", "--json"],
        capture_output=True,
        text=True,
        timeout=90,
        env=os.environ | {"MKL_CBWR": "COMPATIBLE"},
    )
    assert done.returncode == 11, done.stdout + done.stderr
    document = json.loads(done.stdout)
    assert document["machine_differs"]
    assert document["not_as_then"][0]["kind"] == "machine"
    assert document["not_as_then"][0]["text"].startswith(f"kernel probe: {steps[0].kernel_probe[:12]} then")
    # A checkpoint every other step: each second step is computed from a state that the ledger vouches for.
    outcomes = [step["outcome"] for step in document["steps"]]
    assert "machine" in outcomes
    assert not {"differs", "missing"} & set(outcomes)
