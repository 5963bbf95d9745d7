"""Named places between two effects where a process can be told to die, so that a test hits that very place.

Nothing happens unless `HEADRACE_FAILPOINT` names one. Not a fault model: random kills come from outside.
"""

import os
import signal
from collections import Counter
from pathlib import Path
from typing import Final

VARIABLE: Final = "HEADRACE_FAILPOINT"
"""`place@nth=SIGNAL:marker`, e.g. `trainer.uploaded@3=SIGKILL:/tmp/x/hit`: at the third time; once for all
processes that share the marker, a file that is made then."""

_reached: Counter[str] = Counter()


def reach(place: str) -> None:
    """Ends, or stops, this process if it was told so of `place`."""
    told = os.environ.get(VARIABLE)
    if told is None or not told.startswith(f"{place}@"):
        return
    _reached[place] += 1
    nth, _, rest = told.removeprefix(f"{place}@").partition("=")
    name, _, marker = rest.partition(":")
    if _reached[place] != int(nth):
        return
    try:
        Path(marker).touch(exist_ok=False)
    except FileExistsError:
        return
    os.kill(os.getpid(), signal.Signals[name])
