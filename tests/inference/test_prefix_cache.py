"""The cache of computed prompts."""

from headrace.inference.prefixes import PrefixCache


def test_least_recently_used_goes_first() -> None:
    """Room for 6 tokens: a (2) is used again, so b (3) leaves when c (3) comes."""
    cache: PrefixCache[str] = PrefixCache(6)
    cache.keep("w1", (1, 1), "a")
    cache.keep("w1", (2, 2, 2), "b")
    assert cache.find("w1", (1, 1)) == "a"
    cache.keep("w1", (3, 3, 3), "c")
    assert cache.find("w1", (2, 2, 2)) is None
    assert (cache.find("w1", (1, 1)), cache.find("w1", (3, 3, 3)), cache.tokens) == ("a", "c", 5)


def test_other_weights_never_match() -> None:
    """The same prompt under another root is another entry, and forgotten with its weights."""
    cache: PrefixCache[str] = PrefixCache(100)
    cache.keep("w1", (1, 2), "old")
    assert cache.find("w2", (1, 2)) is None
    cache.keep("w2", (1, 2), "new")
    cache.forget_others({"w2"})
    assert (cache.find("w1", (1, 2)), cache.find("w2", (1, 2)), cache.tokens) == (None, "new", 2)


def test_longer_than_the_cache_is_not_kept() -> None:
    """A prompt of 4 tokens in a cache of 3 is not kept and evicts nobody; keeping twice counts once."""
    cache: PrefixCache[str] = PrefixCache(3)
    cache.keep("w", (1, 2), "a")
    cache.keep("w", (1, 2), "a")
    cache.keep("w", (9, 9, 9, 9), "b")
    assert (cache.find("w", (1, 2)), cache.tokens) == ("a", 2)
