"""Settings of one inference replica."""

from typing import Annotated

import msgspec


class InferenceConfig(msgspec.Struct, frozen=True, kw_only=True):
    address: str = "127.0.0.1:0"
    """Where the server listens; port 0 takes a free one."""
    replica: str = "inference-0"
    serve_seed: bool = False
    """Serve the seed as version 0 from the start, instead of waiting for the relay."""
    versions_max: Annotated[int, msgspec.Meta(ge=1)] = 3
    """Sets of weights in memory: the newest, and both sides of a release. While one is read there is one
    more."""
    slots: int = 136
    """Sequences decoded at once."""
    live_slots: int = 8
    """Of `slots`, kept free of rollouts."""
    own_tokens_max: int = 160
    """Tokens of one sequence after its prompt, all turns together."""
    queue_max: int = 1024
    """Sequences that may wait, in each lane; beyond it a request is refused as overloaded."""
    prefix_cache_tokens: int = 16_384
    """Prompt tokens whose keys and values are kept for requests to come."""
    step_tokens: int = 512
    """Tokens of prompts and earlier turns computed between two decode steps, at most."""
    chunk_tokens: int = 64
    """Own tokens (earlier turns) of one sequence computed in one step, at most."""
    beside_live_rows: Annotated[int, msgspec.Meta(ge=1)] = 8
    """Rollout sequences that go on while live users are about, at most, and of new prompts one a step; the
    others wait. While a live sequence is at work, in one step of eight only. More make rollouts quicker and
    live users slower (benchmarks/live_lane.md)."""
    threads: int = 1
    """Of torch; the numbers do not depend on it."""
    stop_ms_max: int = 5_000
    """How long requests in flight may go on after the order to stop."""
