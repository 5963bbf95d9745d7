"""Records for the tests of the canary: versions, and what users made of them. Not tests."""

import random
from collections.abc import Sequence

from headrace.streams.release import Canary
from headrace.wire.records import Exposure, Record, WeightsPublished, WeightsRevoked

RUN = "test"


def published(version: int, run: str = RUN) -> WeightsPublished:
    return WeightsPublished(
        run=run,
        version=version,
        root=f"{version:064x}",
        step=version,
        manifest_uri="",
        manifest_sha256="",
        encodings=(),
        published_ms=0,
    )


def exposure(
    number: int,
    version: int,
    cohort: str,
    *,
    reward: float,
    silent: bool = False,
    shown: bool | None = None,
    opened_ms: int = 1 << 42,
    latency_ms: int = 40,
    quarantined: bool = False,
    user: str | None = None,
) -> Exposure:
    return Exposure(
        run=RUN,
        group_id=f"s{number}",
        version=version,
        cohort=cohort,
        user=f"u{number}" if user is None else user,
        region="local",
        silent=silent,
        shown=not silent if shown is None else shown,
        accepted=1.0 if reward > 0 else 0.0,
        reward=reward,
        quarantined=quarantined,
        latency_ms=latency_ms,
        opened_ms=opened_ms,
        closed_ms=opened_ms,
    )


def day(count: int, *, stable: int, canary: int, broken: bool = False, seed: int = 0) -> list[Exposure]:
    """`count` exposures of each side in turn. Half of what is suggested is accepted, and a third of requests
    is answered by silence; a broken version shows always and is never accepted."""
    draw = random.Random(seed)
    found = []
    for number in range(2 * count):
        bad = broken and number % 2 == 0
        silent = not bad and draw.random() < 1 / 3
        reward = 0.0 if silent else 0.75 if not bad and draw.random() < 0.5 else -0.25
        version, cohort = ((canary, "canary"), (stable, "stable"))[number % 2]
        found.append(exposure(seed * 10**6 + number, version, cohort, reward=reward, silent=silent))
    return found


def feed(canary: Canary, records: Sequence[Record], at_ms: int = 0) -> list[Record]:
    """Learns each record and, as the log would, what the canary then decides; all that it decided."""
    decided: list[Record] = []
    for record in records:
        canary.learn(record, at_ms)
        while new := canary.decide():
            decided += new
            for own in new:
                canary.learn(own, at_ms)
    return decided


def said(records: Sequence[Record]) -> list[tuple[str, int, float]]:
    """What was decided, without the evidence."""
    return [
        ("revoked", record.version, 0.0)
        if isinstance(record, WeightsRevoked)
        else ("promoted", record.version, record.share)  # type: ignore[attr-defined]
        for record in records
    ]
