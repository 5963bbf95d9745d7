"""A request in the engine's hands: its sequences from the queue to their last token, and what they report.

Not here: computing (`inference.engine`) and slots (`inference.scheduler`).

T tokens  L layers  K experts per token
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from headrace.inference.hosting import Choice, Hosting
from headrace.inference.sampler import Draw
from headrace.inference.weights import ServedWeights
from headrace.kernels import rng
from headrace.policy.decode import Prefix
from headrace.rpc.generation import Cohort, Completion, Finish, Generation, Progress
from headrace.wire.records import Span

Sink = Callable[[list[Progress]], None]
"""Called by the engine's thread, at most once a step and request."""


@dataclass(eq=False, slots=True)
class Ticket:
    """One request; the handle for `Engine.cancel`."""

    request: Generation
    sink: Sink
    pinned: ServedWeights | None = None
    """What the request named; it keeps them to its end."""
    sequences: list["Running"] = field(default_factory=list)

    @classmethod
    def of(
        cls, request: Generation, budgets: tuple[int, ...], sink: Sink, pinned: ServedWeights | None = None
    ) -> "Ticket":
        """`budgets`: tokens that each sequence may generate (`inference.request.check`)."""
        ticket = cls(request, sink, pinned)
        ticket.sequences = [
            Running(
                ticket=ticket,
                member=item.member,
                own_tokens=item.own_tokens,
                budget=budget,
                key=rng.key(request.seed, request.group_id, item.member),
            )
            for item, budget in zip(request.sequences, budgets, strict=True)
        ]
        return ticket


@dataclass(eq=False, slots=True)
class Running:
    """One member of a request."""

    ticket: Ticket
    member: int
    own_tokens: tuple[int, ...]
    budget: int
    key: int
    slot: int = -1
    prefix: Prefix | None = None
    feed: list[int] = field(default_factory=list)
    """Tokens that the decoder has not seen yet."""
    tokens: list[int] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)
    versions: list[tuple[int, int]] = field(default_factory=list)
    """(first output token, weights version), one a span."""
    routes: list[Tensor] = field(default_factory=list)
    """u8 `[T, L, K]` of each piece that was fed."""
    reported: int = 0
    current: ServedWeights | None = None
    """What computes its next token."""
    cohort: Cohort = ""
    started_version: int = 0
    started_ms: int = 0
    ended: bool = False

    @property
    def weights(self) -> ServedWeights:
        assert self.current is not None, f"{self.member}: runs without weights"
        return self.current

    def begin(self, hosting: Hosting) -> ServedWeights:
        """The weights it starts with; asked again as long as it waits."""
        pinned = self.ticket.pinned
        choice = Choice(pinned, "") if pinned is not None else hosting.choose(self.ticket.request)
        assert choice is not None, "a request queues only where there are weights for it"
        self.current, self.cohort = choice
        self.started_version = choice.weights.version
        return choice.weights

    def go_on(self, hosting: Hosting) -> ServedWeights:
        """The weights of its next token."""
        self.current = self.ticket.pinned or hosting.go_on(self.started_version, self.cohort)
        return self.current

    def draw(self) -> Draw:
        """How its next token is chosen."""
        request = self.ticket.request
        position = len(request.prefix_tokens) + len(self.own_tokens) + len(self.tokens)
        return Draw(request.temperature, request.greedy, self.key, position)

    def take(self, token: int, logp: float, version: int) -> Finish | None:
        """Appends a sampled token; says how the sequence ends, if it does."""
        if not self.versions or self.versions[-1][1] != version:
            self.versions.append((len(self.tokens), version))
        self.tokens.append(token)
        self.logp.append(logp)
        self.feed = [token]
        if token in self.ticket.request.stop_tokens:
            return "stop"
        return "length" if len(self.tokens) == self.budget else None

    def progress(self, completion: Completion | None = None) -> Progress:
        """What is new since the last call."""
        start, self.reported = self.reported, len(self.tokens)
        return Progress(
            member=self.member,
            tokens=tuple(self.tokens[start:]),
            logp=tuple(self.logp[start:]),
            completion=completion,
        )

    def completion(self, finish: Finish, *, layers: int, active: int, now_ms: int) -> Completion:
        """All of it. Routes are `[T, layers, active]`."""
        ends = [start for start, _ in self.versions[1:]] + [len(self.tokens)]
        fed = [] if self.prefix is None else [self.prefix.routes_TLK, *self.routes]
        routes_TLK = torch.cat(fed) if fed else torch.empty(0, layers, active, dtype=torch.uint8)
        return Completion(
            member=self.member,
            tokens=tuple(self.tokens),
            logp=tuple(self.logp),
            finish=finish,
            spans=tuple(
                Span(start=start, end=end, weights_version=version)
                for (start, version), end in zip(self.versions, ends, strict=False)
            ),
            weights_version=self.started_version,
            routes=routes_TLK.numpy().tobytes(),
            routes_shape=(routes_TLK.shape[0], layers, active),
            started_ms=self.started_ms,
            ended_ms=now_ms,
            cohort=self.cohort,
        )
