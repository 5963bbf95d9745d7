"""The tree of errors. The type names the boundary that failed; `retriable` says whether trying again can
help.

    HeadraceError
    ├── ConfigError            a setting is unknown, missing or out of range
    ├── WireError              bytes that are not the record they should be
    │   └── RecordTooLarge     over the limit of its topic
    ├── BusError               the log refused or lost us
    │   ├── BusUnavailable     (retriable) no broker, or a file locked for too long
    │   ├── Fenced             another process took over this transactional id
    │   ├── OffsetGone         the position asked for is no longer, or not yet, in the log
    │   └── TopicMismatch      a topic is missing or differs from its definition
    ├── StoreError             a blob is missing or is not what its name says
    │   └── StoreUnavailable   (retriable)
    ├── PolicyError            a checkpoint or tokenizer of another model, or damaged
    │   └── WeightsUnfit       what was announced, yet no replica can serve it: numbers are not finite
    ├── SandboxError           (retriable) the sandbox, not the program in it, failed
    ├── InferenceError         the engine refused a request
    │   ├── Overloaded         (retriable) its queue is full
    │   └── InferenceUnavailable (retriable) no replica answers in time, or it has no weights yet
    ├── FeedbackError          a gateway refused feedback, or an editor's side gave up
    │   ├── FeedbackUnauthenticated  no token, or one that nobody was given
    │   ├── FeedbackOverloaded (retriable) a limit is reached; says when to come back
    │   └── FeedbackUnavailable (retriable) no gateway answers, or its log is away
    ├── TrainingError          a step could not be computed; names the record
    └── ProcessDied            a process of the run ended when it should not have, or never got ready

A message begins with the place, then what was expected and what came: `rollout.steps[3]@1042: tokens_out:
expected bytes, got int`. A broken invariant is not in this tree: it is an assertion.
"""

from typing import ClassVar


class HeadraceError(Exception):
    """Base of all faults that Headrace names. `exit_code` is what a command ends with when one reaches its
    top."""

    retriable: ClassVar[bool] = False
    exit_code: ClassVar[int] = 1


class ConfigError(HeadraceError):
    exit_code = 2


class WireError(HeadraceError):
    exit_code = 3


class RecordTooLarge(WireError):
    pass


class BusError(HeadraceError):
    exit_code = 4


class BusUnavailable(BusError):
    retriable = True


class Fenced(BusError):
    pass


class OffsetGone(BusError):
    pass


class TopicMismatch(BusError):
    pass


class StoreError(HeadraceError):
    exit_code = 5


class StoreUnavailable(StoreError):
    retriable = True


class PolicyError(HeadraceError):
    exit_code = 6


class WeightsUnfit(PolicyError):
    pass


class SandboxError(HeadraceError):
    retriable = True
    exit_code = 7


class InferenceError(HeadraceError):
    exit_code = 8


class Overloaded(InferenceError):
    retriable = True


class InferenceUnavailable(InferenceError):
    retriable = True


class FeedbackError(HeadraceError):
    exit_code = 12


class FeedbackUnauthenticated(FeedbackError):
    pass


class _FeedbackLater(FeedbackError):
    retriable = True

    def __init__(self, message: str, *, retry_after_ms: int = 1000) -> None:
        super().__init__(message)
        self.retry_after_ms = retry_after_ms


class FeedbackOverloaded(_FeedbackLater):
    pass


class FeedbackUnavailable(_FeedbackLater):
    pass


class TrainingError(HeadraceError):
    exit_code = 9


class ProcessDied(HeadraceError):
    exit_code = 10
