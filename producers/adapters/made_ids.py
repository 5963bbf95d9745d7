"""Ids of events that an editor does not number: a hash of what the event says, the same each time."""

import hashlib
import json


def made_id(*parts: object) -> str:
    """32 hexadecimal digits of `parts`, which are plain JSON values."""
    text = json.dumps(parts, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]
