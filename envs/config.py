"""Settings of environments: the sandbox's limits, the harness, the rewards."""

from typing import Literal

import msgspec

from headrace.policy.source import HoleKind


class SandboxConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of a child. The defaults hold doctests of small functions with room to spare."""

    isolation: Literal["auto", "namespaces", "landlock", "limits"] = "auto"
    """auto: namespaces, else Landlock. limits: neither and no seccomp; only ever chosen by name."""
    servers: int = 1
    """Fork servers, each running one job at a time."""
    check_cpu_ms: int = 250
    """Processor time of one check: five times what the slowest task in the index may take."""
    wall_ms: int = 3000
    """A child that neither speaks nor computes for this long is killed."""
    cpu_s: int = 120
    """Processor time of one child, which runs a whole batch."""
    memory_bytes: int = 512 << 20
    tmp_bytes: int = 16 << 20
    output_bytes: int = 4096
    """What one check may print."""
    candidates_max: int = 256
    """Candidates in one job."""
    hash_seed: int = 0
    """Order of sets of strings; fixed, so that a check means the same every day."""


class EnvConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Of the one environment there is so far: fill a hole in a function, judged by its doctests."""

    name: str = "doctest"
    tries_max: int = 2
    prompt_tokens_max: int = 224
    result_tokens_max: int = 40
    """Of the harness's answer to a failed try, its two markers included."""
    kinds: tuple[HoleKind, ...] = ("operator", "constant", "name")
    """Kinds of holes that are asked for (docs/tasks.md)."""
    value_later_try: float = 0.5
    """Reward `tests` when it passes, but not at the first try."""
    sandbox: SandboxConfig = SandboxConfig()
