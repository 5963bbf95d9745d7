"""The canary's process on a real broker."""

import uuid

import pytest
from canary_cases import CanaryCases

from headrace.errors import BusError


@pytest.mark.kafka
class TestCanaryOnKafka(CanaryCases):
    OVERTAKEN = BusError
    """Fenced as a rule; a broker that is fencing just then may answer the end of a transaction with "unknown
    server error" (docs/bus.md), which ends the process too, under that name."""

    @pytest.fixture
    def address(self, kafka: str) -> str:
        return f"kafka:{kafka}"

    @pytest.fixture
    def run_name(self) -> str:
        """The broker is shared: a run of its own."""
        return f"canary-{uuid.uuid4().hex[:8]}"
