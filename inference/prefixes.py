"""Prompts already computed, for the requests to come: least recently used first out, bounded in tokens.

The key holds the root of the weights, so a prompt computed by other weights is never found. Sequences hold
their own reference: eviction never takes a prefix from under one.
"""

from collections import OrderedDict
from collections.abc import Container
from typing import Generic, TypeVar

_P = TypeVar("_P")


class PrefixCache(Generic[_P]):
    """Keyed by (root of the weights, tokens): the tokens themselves, so there is no collision to think of."""

    def __init__(self, tokens_max: int) -> None:
        self._tokens_max = tokens_max
        self._tokens = 0
        self._kept: OrderedDict[tuple[str, tuple[int, ...]], _P] = OrderedDict()

    def find(self, root: str, tokens: tuple[int, ...]) -> _P | None:
        prefix = self._kept.get((root, tokens))
        if prefix is not None:
            self._kept.move_to_end((root, tokens))
        return prefix

    def keep(self, root: str, tokens: tuple[int, ...], prefix: _P) -> None:
        """Evicts the least recently used until it fits; one longer than the whole cache is not kept."""
        if len(tokens) > self._tokens_max or (root, tokens) in self._kept:
            return
        self._kept[root, tokens] = prefix
        self._tokens += len(tokens)
        while self._tokens > self._tokens_max:
            (_, evicted), _ = self._kept.popitem(last=False)
            self._tokens -= len(evicted)

    def forget_others(self, roots: Container[str]) -> None:
        """Drops what other weights computed."""
        for key in [key for key in self._kept if key[0] not in roots]:
            del self._kept[key]
            self._tokens -= len(key[1])

    @property
    def tokens(self) -> int:
        return self._tokens
