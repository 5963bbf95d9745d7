"""The topics: which records they carry and the settings they need. The one home of names and limits.

Not here: creating them (`bus`, `headrace topics create`).
"""

from dataclasses import dataclass

from headrace.wire import records as r

DAY_MS = 86_400_000
FOR_EVER = -1
RECORD_BYTES_MAX = 1_000_000
"""Largest encoded value. The broker's limit is 1,048,588 for a whole batch and aiokafka checks 1,048,576
before compression; the rest is room for key and headers."""
BATCH_BYTES_MAX = 1_048_588
"""`max.message.bytes` of every topic: the broker's default, of which a record with its key and headers stays
short."""
CLAIM_BYTES = 900_000
"""An `Experience` above this travels as a claim check."""
PARTITIONS = 4
"""Of every topic keyed by group: the same number everywhere, so that a join finds all of a group in one
partition."""


@dataclass(frozen=True, slots=True)
class Topic:
    name: str
    records: tuple[type[r.Record], ...]
    key: str
    """What the key is, in words; `group_id` topics are co-partitioned."""
    partitions: int
    retention_ms: int
    compacted: bool = False
    note: str = ""


def _by_group(name: str, *records: type[r.Record], days: int, note: str) -> Topic:
    return Topic(name, records, "group_id", PARTITIONS, days * DAY_MS, note=note)


PROMPTS = _by_group("prompts", r.Prompt, days=7, note="one record = one group to roll out")
ROLLOUT_STEPS = _by_group(
    "rollout.steps", r.RolloutStep, r.GroupFailed, days=30, note="one record per agent turn"
)
REWARDS = _by_group("rewards", r.Reward, days=30, note="one record per rollout and component")
FEEDBACK = _by_group("feedback", r.Feedback, days=30, note="what editors report; key = suggestion_id")
EXPERIENCE = _by_group("experience", r.Experience, days=90, note="closed groups")
EXPERIENCE_LIVE = _by_group(
    "experience.live",
    r.Experience,
    days=90,
    note="closed suggestions: apart, so that each source has its share",
)
EXPOSURES = _by_group("exposures", r.Exposure, days=30, note="what became of each suggestion, for the canary")
JUDGEMENTS = Topic(
    "judgements",
    (r.Judgement,),
    "user (group_id where there is none)",
    PARTITIONS,
    7 * DAY_MS,
    note="between the feedback join and the limit of a user's weight",
)
TRAIN_STEPS = Topic("train.steps", (r.TrainStep,), "run", 1, FOR_EVER, note="the ledger")
WEIGHTS = Topic(
    "weights",
    (r.WeightsPublished, r.WeightsPromoted, r.WeightsRevoked),
    "run",
    1,
    FOR_EVER,
    note="announcements, ordered",
)
WEIGHTS_ACKS = Topic(
    "weights.acks", (r.WeightsAck,), "region/replica", 1, 7 * DAY_MS, note="versions really serving"
)
EVALUATIONS = Topic(
    "evaluations", (r.Evaluation,), "run", 1, 90 * DAY_MS, note="held-out tries, never trained on"
)


def _state(name: str, note: str) -> Topic:
    return Topic(f"streams.{name}.state", (), "group_id", PARTITIONS, FOR_EVER, compacted=True, note=note)


EXPERIENCE_STATE = _state("experience", "state of the join, written in the transaction of its outputs")
FEEDBACK_STATE = _state("feedback", "state of the feedback join, written in the transaction of its outputs")
CANARY_STATE = Topic(
    "streams.canary.state",
    (),
    "run",
    1,
    FOR_EVER,
    compacted=True,
    note="the comparison under way, written in the transaction of its decisions",
)
USERS_STATE = Topic(
    "streams.users.state",
    (),
    "user",
    PARTITIONS,
    FOR_EVER,
    compacted=True,
    note="what each user gave of late, written in the transaction of its outputs",
)
DEAD_LETTERS = Topic(
    "dead.letters", (r.DeadLetter,), "topic/partition/offset", 1, 30 * DAY_MS, note="original bytes + reason"
)

TOPICS: dict[str, Topic] = {
    topic.name: topic
    for topic in (
        PROMPTS,
        ROLLOUT_STEPS,
        REWARDS,
        FEEDBACK,
        EXPERIENCE,
        EXPERIENCE_LIVE,
        EXPOSURES,
        JUDGEMENTS,
        TRAIN_STEPS,
        WEIGHTS,
        WEIGHTS_ACKS,
        EVALUATIONS,
        EXPERIENCE_STATE,
        FEEDBACK_STATE,
        USERS_STATE,
        CANARY_STATE,
        DEAD_LETTERS,
    )
}
