"""The policy's tokenizer: byte-level BPE over canonical source, plus eight special tokens that no text can
ever produce.

The special tokens are not in the BPE's vocabulary: they are the last eight ids, and only `policy.dialogue`
writes them. So a program that contains the characters `<|end|>` is encoded as those characters. It knows no
dialogue; shipped in `policy/seed/`.
"""

import functools
import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from headrace.errors import PolicyError

VOCABULARY: Final = 2048
SPECIAL: Final = (
    "<|silent|>",
    "<|text|>",
    "<|task|>",
    "<|hole|>",
    "<|turn|>",
    "<|call|>",
    "<|end|>",
    "<|result|>",
)
BPE_ENTRIES: Final = VOCABULARY - len(SPECIAL)
REMEMBERED_TEXTS = 4096
# A piece never holds a space, tab or line break after its first character, and needs no look-ahead: so text
# may be cut in front of any single space without changing the pieces on either side.
PIECES: Final = r" ?[^\W\d]+| ?\d+| ?[^\w\s]+|\n\t*|\s"


class Tokenizer:
    """Reads the JSON of a BPE made by `train`. Raises PolicyError if it is not one of `BPE_ENTRIES`
    entries."""

    def __init__(self, json_bytes: bytes) -> None:
        from tokenizers import Tokenizer as Backend

        try:
            self._backend = Backend.from_buffer(json_bytes)
        except Exception as error:  # the Rust library raises bare Exception
            raise PolicyError(
                f"tokenizer: expected a tokenizer in JSON, got {len(json_bytes)} bytes: {error}"
            ) from error
        entries = self._backend.get_vocab_size(with_added_tokens=True)
        if entries != BPE_ENTRIES:
            raise PolicyError(f"tokenizer: expected {BPE_ENTRIES} entries, got {entries}")
        self.json_bytes = json_bytes
        self.sha256 = hashlib.sha256(json_bytes).hexdigest()
        # The members of a group share their prompt, and most of their failures.
        self._remembered = functools.lru_cache(REMEMBERED_TEXTS)(self._encode)
        self.special = {name: BPE_ENTRIES + index for index, name in enumerate(SPECIAL)}

    @property
    def vocabulary(self) -> int:
        return VOCABULARY

    def encode(self, text: str) -> list[int]:
        """Token ids below `BPE_ENTRIES`, whatever the text: it never yields a special token."""
        return list(self._remembered(text))

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._backend.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`; a special token shows as its name, bytes that aren't UTF-8 as U+FFFD."""
        parts: list[str] = []
        run: list[int] = []
        for token in ids:
            if not 0 <= token < VOCABULARY:
                raise PolicyError(f"tokenizer: expected an id in 0..{VOCABULARY - 1}, got {token}")
            if token < BPE_ENTRIES:
                run.append(token)
                continue
            parts += [self._backend.decode(run, skip_special_tokens=False), SPECIAL[token - BPE_ENTRIES]]
            run = []
        return "".join([*parts, self._backend.decode(run, skip_special_tokens=False)])


def train(texts: Iterable[str]) -> bytes:
    """JSON of a BPE of `BPE_ENTRIES` entries over `texts`; the same texts in the same order give the same
    bytes.
    """
    from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
    from tokenizers import Tokenizer as Backend

    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=BPE_ENTRIES,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
        special_tokens=[],
    )
    backend.train_from_iterator(texts, trainer=trainer)
    return str(backend.to_str()).encode()


def load(path: Path) -> Tokenizer:
    """The tokenizer stored at `path`. Raises PolicyError if it is missing or damaged."""
    try:
        return Tokenizer(path.read_bytes())
    except OSError as error:
        raise PolicyError(f"{path}: expected a tokenizer: {error.strerror}") from error
