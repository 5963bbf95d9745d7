"""Settings of the producers."""

from typing import Annotated

import msgspec

from headrace.config import AtLeastOne
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


class GatewayConfig(msgspec.Struct, frozen=True, kw_only=True):
    grpc: str = "127.0.0.1:0"
    """Address of the `Feedback` service; port 0 takes a free one."""
    http: str = "127.0.0.1:0"
    """Address of `POST /v1/events`."""
    home: str = "gateway"
    """Directory of its secrets, inside the run directory unless absolute."""
    tokens_file: str = ""
    """Lines of `NAME TOKEN`. Empty: $HEADRACE_FEEDBACK_TOKENS; if that is empty too nobody is asked for one,
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
    streams_max: AtLeastOne = 256
    """gRPC calls under way."""
    connections_max: AtLeastOne = 1000
    """Of each of the two addresses."""
    head_ms_max: AtLeastOne = 10_000
    """For the head of an HTTP request, and between two requests of a connection."""
    body_ms_max: AtLeastOne = 10_000
    recent_events_max: AtLeastOne = 200_000
    """Ids remembered against resends, about 200 bytes each."""
    resend_ms: AtLeastOne = 600_000
    """How far back a starting gateway reads the topic for such ids."""
    stop_ms_max: AtLeastOne = 8_000
    """For what is under way when the gateway is asked to stop."""
