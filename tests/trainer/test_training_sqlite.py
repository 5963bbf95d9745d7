"""The trainer's process on the embedded log."""

from pathlib import Path

import pytest
from training_cases import TrainingCases
from training_place import Place

pytestmark = pytest.mark.timeout(400)


class TestTrainingOnSqlite(TrainingCases):
    @pytest.fixture
    def place(self, tmp_path: Path) -> Place:
        return Place(tmp_path / "here")

    @pytest.fixture
    def other(self, tmp_path: Path) -> Place:
        return Place(tmp_path / "there")

    @pytest.fixture
    def asleep_at(self) -> str:
        """Not in the transaction itself: there it holds the file's lock, and everybody waits for it."""
        return "trainer.uploaded@2"
