"""What a gateway keeps to itself: who somebody is, and their code."""

import sqlite3
import stat
from pathlib import Path

import pytest
from gateway_place import Place, event, json_batch, on_a_gateway

from headrace.errors import ConfigError, FeedbackError
from headrace.producers.feedback import KEYS_FILE, SECRET_FILE
from headrace.producers.gateway.text_keys import Text, TextKeys
from headrace.wire import pseudonyms
from headrace.wire.pseudonyms import Pseudonyms
from headrace.wire.records import Feedback

CODE = "def secret():\n    return '🎉'"


def test_pseudonyms_are_keyed_hashes() -> None:
    """HMAC-SHA-256 of the name: equal for equal secrets, another for another secret; any name goes."""
    one, same, other = Pseudonyms("r1", b"k" * 32), Pseudonyms("r1", b"k" * 32), Pseudonyms("r2", b"x" * 32)
    assert one.of("ada") == same.of("ada") == "r1-a8b373bd9a0f9800c50bbfebdb7cf079"
    assert one.of("ada")[3:] != other.of("ada")[3:]
    assert other.of("ada").startswith("r2-")
    assert len({one.of(name) for name in ("", "ada", "Ada", "名", "\ud800")}) == 5


def test_a_secret_is_made_once_for_its_owner(tmp_path: Path) -> None:
    """The first start makes it, readable by nobody else; later starts find the same."""
    path = tmp_path / "gateway" / SECRET_FILE
    made = pseudonyms.made(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert pseudonyms.made(path).of("ada") == pseudonyms.load(path).of("ada") == made.of("ada")


@pytest.mark.parametrize("text", ["", "r1", "r1 short", "r-1 " + "x" * 40, "r1 " + "x" * 40 + " more"])
def test_secrets_that_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """A malformed secret is refused by its place, from a file or the environment, and never shown."""
    path = tmp_path / "secret"
    path.write_text(text)
    monkeypatch.setenv(pseudonyms.VARIABLE, text)
    for place, where in ((str(path), path), (pseudonyms.VARIABLE, None)):
        with pytest.raises(ConfigError, match="expected 'ROTATION SECRET'") as caught:
            pseudonyms.load(where)
        assert str(caught.value).startswith(place)
        assert "xxxx" not in str(caught.value)


def test_code_is_left_out_unless_the_gateway_keeps_it(tmp_path: Path) -> None:
    """An event with code is taken by a gateway that keeps none: without the code."""

    async def act(place: Place) -> None:
        assert (await place.post(json_batch([event(1, text=CODE)]))).body["accepted"] == 1
        [record] = await place.records()
        assert record.text == b""

    on_a_gateway(tmp_path, act)


def test_a_forgotten_user_cannot_be_read(tmp_path: Path) -> None:
    """Code is unreadable on the topic, readable with its key; once the key is destroyed, never again, and not
    in the key file either. Another user's stays readable."""
    found: list[Feedback] = []

    async def act(place: Place) -> None:
        sent = [event(1, text=CODE), event(2, text=CODE, user="bob"), event(3)]
        assert (await place.post(json_batch(sent))).body["accepted"] == 3
        found.extend(sorted(await place.records(), key=lambda r: r.event_id))

    on_a_gateway(tmp_path, act, store_text=True)
    ada, bob, plain = found
    assert plain.text == b""
    assert b"secret" not in ada.text
    assert ada.text != bob.text
    path = tmp_path / KEYS_FILE
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    keys = TextKeys(path)
    assert keys.opened(ada) == keys.opened(bob) == CODE
    db = sqlite3.connect(path)
    (key,) = db.execute("SELECT key FROM keys WHERE user = ?", (ada.user,)).fetchone()
    db.close()
    assert key in path.read_bytes()
    assert keys.forget(ada.user)
    assert not keys.forget(ada.user)
    assert key not in path.read_bytes()
    with pytest.raises(FeedbackError, match="it was destroyed"):
        keys.opened(ada)
    assert keys.opened(bob) == CODE


def test_code_belongs_to_its_event(tmp_path: Path) -> None:
    """A ciphertext moved to another event, cut or changed does not open; a new key does not open old code."""
    keys = TextKeys(tmp_path / "keys")
    [sealed] = keys.sealed([Text(CODE, "u", "e1")])

    def record(text: bytes, event_id: str = "e1") -> Feedback:
        return Feedback(event_id=event_id, suggestion_id="s", kind="shown", editor_ms=0, user="u", text=text)

    assert keys.opened(record(sealed)) == CODE
    flipped = sealed[:-1] + bytes([sealed[-1] ^ 1])
    for wrong in (record(sealed, "e2"), record(sealed[:20]), record(flipped), record(b"\x02" + sealed[1:])):
        with pytest.raises(FeedbackError, match="feedback e"):
            keys.opened(wrong)
    keys.forget("u")
    keys.sealed([Text("new", "u", "e9")])
    with pytest.raises(FeedbackError, match="does not fit its key"):
        keys.opened(record(sealed))
