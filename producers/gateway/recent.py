"""The ids of the newest events that are durable, a bounded number: what makes a resend harmless.

Two generations: when the young one is full it becomes the old one, which is forgotten. So between half and
all of `events_max` ids are known at any time.
"""

from collections.abc import Iterable


class Recent:
    def __init__(self, events_max: int) -> None:
        self._half = max(1, events_max // 2)
        self._young: set[str] = set()
        self._old: set[str] = set()

    def __contains__(self, event: str) -> bool:
        return event in self._young or event in self._old

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def add(self, events: Iterable[str]) -> None:
        for event in events:
            if len(self._young) >= self._half:
                self._old, self._young = self._young, set()
            self._young.add(event)


def name_of(user: str, event_id: str) -> str:
    """An event is its user's: nobody can take another's id. `user` is the pseudonym."""
    return f"{event_id} {user}"
