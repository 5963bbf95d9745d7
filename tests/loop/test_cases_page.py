"""docs/cases.md names tests: they exist."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_names_tests_that_exist() -> None:
    """Each `file::test` of the page is a test in that file."""
    named = re.findall(r"`([\w/]+\.py)::(test_\w+)`", (ROOT / "docs/cases.md").read_text())
    assert len(named) > 50
    missing = [
        f"{file}::{test}"
        for file, test in named
        if not re.search(rf"def {test}\(", (ROOT / "tests" / file).read_text())
    ]
    assert missing == []
