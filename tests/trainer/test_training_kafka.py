"""The trainer's process on Apache Kafka."""

import uuid
from pathlib import Path

import pytest
from training_cases import TrainingCases
from training_place import Place

pytestmark = [pytest.mark.timeout(400), pytest.mark.kafka]


class TestTrainingOnKafka(TrainingCases):
    @pytest.fixture
    def place(self, tmp_path: Path, kafka: str) -> Place:
        return Place(tmp_path / "here", f"kafka:{kafka}", f"run-{uuid.uuid4().hex[:8]}")

    @pytest.fixture
    def other(self, tmp_path: Path, kafka: str) -> Place:
        return Place(tmp_path / "there", f"kafka:{kafka}", f"run-{uuid.uuid4().hex[:8]}")

    @pytest.fixture
    def asleep_at(self, place: Place) -> str:
        """The third transaction: its records are sent, and not committed."""
        return f"bus.in_transaction/trainer-{place.run.name}@3"
