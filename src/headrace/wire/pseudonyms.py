"""Users under other names: a keyed hash of the user, the same in every process that has the secret.

`r1-5f0c...`: the rotation of the secret, then 128 bits of HMAC-SHA-256 over the user's name. Without the
secret nobody can go from a name to a pseudonym or back; with a new secret the same user is somebody else, and
the prefix says so.
"""

import hashlib
import hmac
import os
import re
import secrets
from functools import lru_cache
from pathlib import Path
from typing import Final

from headrace.errors import ConfigError

VARIABLE: Final = "HEADRACE_PSEUDONYM_SECRET"
"""`ROTATION SECRET`, instead of a file."""
SECRET_CHARS_MIN: Final = 32
USERS_REMEMBERED: Final = 65_536
_LINE: Final = re.compile(rf"([A-Za-z0-9]{{1,16}})\s+(\S{{{SECRET_CHARS_MIN},}})")


class Pseudonyms:
    """`of("ada@example.org")` is `r1-` and 32 hexadecimal digits."""

    def __init__(self, rotation: str, secret: bytes) -> None:
        self.rotation = rotation
        self._secret = secret
        self.of = lru_cache(USERS_REMEMBERED)(self._of)

    def _of(self, user: str) -> str:
        # Lone surrogates can come out of JSON; they are as good a name as any.
        digest = hmac.digest(self._secret, user.encode(errors="surrogatepass"), hashlib.sha256)
        return f"{self.rotation}-{digest[:16].hex()}"


def load(path: Path | None) -> Pseudonyms:
    """The secret of `path`, or of the environment. Raises ConfigError; never shows the secret."""
    place = VARIABLE if path is None else str(path)
    try:
        text = os.environ.get(VARIABLE, "") if path is None else path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{place}: cannot be read: {error}") from error
    found = _LINE.fullmatch(text.strip())
    if found is None:
        raise ConfigError(
            f"{place}: expected 'ROTATION SECRET', e.g. 'r1 ' and at least {SECRET_CHARS_MIN} characters, "
            f"got {len(text)} characters that are not"
        )
    return Pseudonyms(found[1], found[2].encode())


def made(path: Path) -> Pseudonyms:
    """The secret of `path`; a new random one, readable by this user alone, when there is none."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        staged = path.with_name(f"{path.name}.{os.getpid()}")
        with open(os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(f"r1 {secrets.token_hex(32)}\n")
        try:
            os.link(staged, path)  # two processes that start at once agree on the first
        except FileExistsError:
            pass
        finally:
            staged.unlink()
    return load(path)
