"""Named places between two effects where a process can be told to die or to stand still, so that a test hits
that very place.

Nothing happens unless `HEADRACE_FAILPOINT` names one. Not a fault model: random faults come from outside.

    trainer.learned            a step is computed, nothing of it stored
    trainer.uploaded           its blobs are stored, nobody was told
    bus.in_transaction/ID      the records of a transaction of ID are sent, not committed
    trainer.committed          the step is in the ledger, the trainer has not gone on
    checkpoint.written_half    a checkpoint is half computed or written
    checkpoint.uploaded        it is stored, no ledger record names it
    bus.rebalance/GROUP        a member of GROUP gets or loses partitions
"""

import os
import signal
import threading
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

from headrace.errors import ConfigError

VARIABLE: Final = "HEADRACE_FAILPOINT"
"""`place@nth=SIGNAL:marker`, several separated by commas: at the nth time in a process, e.g.
`trainer.uploaded@3=SIGKILL:/tmp/x/hit`. Once for all processes that share the marker, a file with the pid of
the one that was hit."""

_reached: Counter[str] = Counter()


class Failpoint(NamedTuple):
    place: str
    nth: int
    signal: signal.Signals
    marker: Path


def reach(place: str) -> None:
    """Ends, or stops, this process if it was told so of `place`. Raises ConfigError for a variable that makes
    no sense."""
    told = os.environ.get(VARIABLE)
    if not told:
        return
    _reached[place] += 1
    for point in parse(told):
        if (point.place, point.nth) == (place, _reached[place]):
            _hit(point)


@cache
def parse(told: str) -> tuple[Failpoint, ...]:
    """What the variable says. Raises ConfigError that names the part that is wrong."""
    points = []
    for part in told.split(","):
        place, _, rest = part.partition("@")
        nth, _, rest = rest.partition("=")
        name, _, marker = rest.partition(":")
        if not (place and nth.isdecimal() and name in signal.Signals.__members__ and marker):
            raise ConfigError(f"{VARIABLE}: expected place@nth=SIGNAL:marker, got {part!r}")
        points.append(Failpoint(place, int(nth), signal.Signals[name], Path(marker)))
    return tuple(points)


def _hit(point: Failpoint) -> None:
    try:
        with point.marker.open("x") as marker:
            marker.write(str(os.getpid()))
    except FileExistsError:
        return
    # To this very thread: sent to the process, another one may take it, and this one goes on meanwhile.
    signal.pthread_kill(threading.get_ident(), point.signal)
