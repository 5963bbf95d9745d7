"""The canary's process on a real broker."""

import uuid

import pytest
from canary_cases import CanaryCases


@pytest.mark.kafka
class TestCanaryOnKafka(CanaryCases):
    @pytest.fixture
    def address(self, kafka: str) -> str:
        return f"kafka:{kafka}"

    @pytest.fixture
    def run_name(self) -> str:
        """The broker is shared: a run of its own."""
        return f"canary-{uuid.uuid4().hex[:8]}"
