"""Settings of the producers."""

import msgspec

from headrace.wire.records import Sampling


class PromptsConfig(msgspec.Struct, frozen=True, kw_only=True):
    sampling: Sampling = Sampling()
    components: dict[str, float] = msgspec.field(default_factory=lambda: {"tests": 1.0, "format": 0.1})
    """Required reward components and their weights in a rollout's total reward."""
    deadline_ms: int = 300_000
    """From admission to the end of a group: what is not there by then is missing."""
    batch_max: int = 500
    """Most prompts in one transaction."""
    alarm_ms: int = 60_000
    """Without a new version for so long while prompts are out, the feed raises an alarm in its log."""
    outage_ms_max: int = 60_000
    """How long the feed waits for a log that does not answer before it ends with an error."""
