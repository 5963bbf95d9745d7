"""Settings of the consumers."""

import msgspec

from headrace.wire.records import Sampling


class RolloutsConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Of one rollout worker."""

    groups_in_flight: int = 8
    """Most groups that one worker runs at the same time."""
    attempts_max: int = 3
    """Tries of one group before it is given up. Waiting for a replica that is away or full is not a try."""
    turn_ms_max: int = 30_000
    """For one turn's generation of a whole group."""
    retry_ms: int = 250
    """Before the second try; doubles up to `retry_ms_max`."""
    retry_ms_max: int = 2_000
    drain_ms: int = 5_000
    """When told to stop: for groups that are nearly done; the others are left to another worker."""
    outage_ms_max: int = 60_000
    """How long a worker waits for a log that does not answer before it ends with an error."""


class EvaluationConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Of held-out rounds. Tasks and their seeds hang on `seed` alone, so that rounds can be paired."""

    seed: int = 0
    tasks: int = 400
    samples: int = 4
    """Sampled tries a task; one greedy try comes on top."""
    watch_tasks: int = 96
    watch_samples: int = 1
    watch_versions: int = 10
    """A small round each time this many versions have passed."""
    sampling: Sampling = Sampling()
    tasks_in_flight: int = 16
    turn_ms_max: int = 60_000
    attempts_max: int = 3
    """Tries of one task before the round fails."""
    threads: int = 1
    """Of torch; the numbers do not depend on it."""
    outage_ms_max: int = 60_000
    """How long an evaluation waits for a log that does not answer before it ends with an error."""


class RelayConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Of one region's weights relay."""

    stage_dir: str = "replicas"
    """Where weights are staged: `<stage_dir>/<replica>/`, readable by the replicas."""
    cache: str = ""
    """Redis that the relays of a region share (`redis://HOST:PORT/DB`), so that each blob comes from the
    store once. Empty: none."""
    staged_max: int = 2
    """Files kept per replica."""
    poll_ms: int = 500
    """Between two looks at a replica."""
    load_ms_max: int = 60_000
    """For the answer to one load. Without it, the replica is not asked again while it may be in the middle of
    it: four times as long, unless it restarted or serves the version."""
    retry_ms: int = 5_000
    """After a version could not be had, or was refused."""
    versions_max: int = 256
    """Announcements remembered, to build a version from a snapshot and deltas."""
    outage_ms_max: int = 60_000
    """How long the relay waits for a log that does not answer before it ends with an error."""
