"""Settings of the producers."""

from typing import Annotated

import msgspec

from headrace.config import AtLeastOne, AtLeastZero
from headrace.policy.source import HoleKind
from headrace.producers.people import Habits
from headrace.wire.records import Sampling


class PromptsConfig(msgspec.Struct, frozen=True, kw_only=True):
    sampling: Sampling = Sampling()
    components: dict[str, float] = msgspec.field(default_factory=lambda: {"tests": 1.0, "format": 0.1})
    """Required reward components and their weights in a rollout's total reward."""
    deadline_ms: int = 300_000
    """From admission to the end of a group: what is not there by then is missing."""
    batch_max: int = 500
    """Most prompts in one transaction."""
    alarm_ms: int = 60_000
    """Without a new version for so long while prompts are out, the feed raises an alarm in its log."""
    outage_ms_max: int = 60_000
    """How long the feed waits for a log that does not answer before it ends with an error."""


class SuggestionsConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Of the record that inference keeps of what it suggested."""

    waiting_max: AtLeastOne = 10_000
    """Suggestions that wait for the log; about 10 kB each."""
    batch_max: AtLeastOne = 200
    gather_ms: AtLeastOne = 5
    """Before a batch is written: others come meanwhile."""
    write_ms_max: AtLeastOne = 30_000
    """A suggestion that can't be written within so long is lost, and told of. Less than the feedback join
    holds events for it (`feedback_join.join.orphan_ms`)."""
    drain_ms: AtLeastOne = 3_000
    """For what waits when the process is asked to stop."""


class GatewayConfig(msgspec.Struct, frozen=True, kw_only=True):
    grpc: str = "127.0.0.1:0"
    """Address of the `Feedback` service; port 0 takes a free one."""
    http: str = "127.0.0.1:0"
    """Address of `POST /v1/events`."""
    home: str = "gateway"
    """Directory of its secrets, inside the run directory unless absolute."""
    tokens_file: str = ""
    """Lines of `NAME TOKEN`, or `NAME TOKEN own` for a name that may speak for itself alone. Empty:
    $HEADRACE_FEEDBACK_TOKENS; if that is empty too nobody is asked for one,
    on loopback addresses only."""
    secret_file: str = ""
    """`ROTATION SECRET` of the pseudonyms. Empty: $HEADRACE_PSEUDONYM_SECRET, or one made in `home`."""
    tls_cert: str = ""
    """PEM files of the certificate chain and its key: TLS on both addresses."""
    tls_key: str = ""
    tls_client_ca: str = ""
    """Only clients with a certificate of this authority."""
    plaintext: bool = False
    """Serve other machines without TLS: behind a proxy that ends it."""
    store_text: bool = False
    """Keep code that events carry, encrypted under its user's key; otherwise it is left out."""
    batch_events_max: AtLeastOne = 1000
    message_bytes_max: Annotated[int, msgspec.Meta(ge=100_000)] = 1_000_000
    rate_events_per_s: Annotated[float, msgspec.Meta(gt=0)] = 50_000.0
    """Of one token's name."""
    pending_events_max: AtLeastOne = 20_000
    """Waiting for the log, of all senders together."""
    pending_bytes_max: AtLeastOne = 64 << 20
    """Of those events, as they are written: code that users opted in to makes them large."""
    streams_max: AtLeastOne = 256
    """gRPC calls under way; where there are tokens, of one name half of them."""
    connections_max: AtLeastOne = 1000
    """Of each of the two addresses."""
    head_ms_max: AtLeastOne = 10_000
    """For the TLS handshake and the head of an HTTP request, and between two requests of a connection."""
    body_ms_max: AtLeastOne = 10_000
    """For all of an HTTP body."""
    recent_events_max: AtLeastOne = 200_000
    """Ids remembered against resends, about 200 bytes each."""
    resend_ms: AtLeastOne = 600_000
    """How far back a starting gateway reads the topic for such ids."""
    stop_ms_max: AtLeastOne = 8_000
    """For what is under way when the gateway is asked to stop."""


class EditorsConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Simulated users with open files (`producers.editors`)."""

    users: AtLeastOne = 24
    """People who type at the same time; each waits for one suggestion at most."""
    suggestions_max: AtLeastZero = 0
    """Asked for in all; 0: until told to stop."""
    distributions: tuple[str, ...] = ("pydash", "more-itertools", "pyrsistent", "packaging")
    """Installed packages whose files they have open."""
    heldout: tuple[str, ...] = ("toolz", "boltons", "humanize", "glom")
    """Packages whose files are opened for measuring only."""
    function_tokens_min: AtLeastOne = 30
    function_tokens_max: AtLeastOne = 110
    """Functions of so many tokens are opened; longer prompts cost more to answer."""
    kinds: dict[HoleKind, float] = msgspec.field(
        default_factory=lambda: {
            "operator": 4.0,
            "constant": 3.0,
            "name": 3.0,
            "expression": 1.5,
            "attribute": 1.5,
            "argument": 1.5,
        }
    )
    """How often they ask at each kind of place, in proportion."""
    temperature: Annotated[float, msgspec.Meta(gt=0.0, le=2.0)] = 0.3
    suggestion_tokens_max: AtLeastOne = 14
    pace: Annotated[float, msgspec.Meta(gt=0.0)] = 30.0
    """They read, think and type so many times faster than people; the stamps of their clocks don't."""
    pause_ms: AtLeastZero = 4_000
    """Human time between a decision and the next question, on average."""
    wait_ms_max: AtLeastOne = 10_000
    """For a suggestion; then the editor shows nothing."""
    later_max: AtLeastOne = 512
    """Events that wait for their time (undone, persisted), of all users together."""
    regions: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)] = ("local",)
    habits: Habits = Habits()
