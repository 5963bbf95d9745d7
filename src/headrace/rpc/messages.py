"""Between the plain types of `rpc.generation` and the messages of `inference.proto`, both ways.

Not here: what is a sensible request (`inference.request`): only what isn't a message at all is refused.
"""

from collections.abc import Sequence as ListLike

from headrace.errors import InferenceError
from headrace.rpc import inference_pb2 as pb
from headrace.rpc.generation import Cohort, Completion, Finish, Generation, Progress, ReplicaStatus, Sequence
from headrace.wire.packed import pack_f32, pack_u32, unpack_f32, unpack_u32
from headrace.wire.records import Span

MESSAGE_BYTES_MAX = 16 << 20  # 4 M tokens: a thousand members with some 4,000 own tokens each

_FINISHES: dict[str, Finish] = {"stop": "stop", "length": "length", "cancelled": "cancelled"}
_COHORTS: dict[str, Cohort] = {"stable": "stable", "canary": "canary"}


def request_message(request: Generation) -> pb.GenerateRequest:
    """Raises InferenceError for numbers that the message cannot hold, and for a message over the limit."""
    try:
        message = pb.GenerateRequest(
            run=request.run,
            group_id=request.group_id,
            lane=pb.LIVE if request.lane == "live" else pb.ROLLOUT,
            prefix_tokens=pack_u32(request.prefix_tokens),
            sequences=[
                pb.Sequence(member=item.member, own_tokens=pack_u32(item.own_tokens))
                for item in request.sequences
            ],
            temperature=request.temperature,
            greedy=request.greedy,
            tokens_max=request.tokens_max,
            stop_tokens=request.stop_tokens,
            seed=request.seed,
            stream_tokens=request.stream_tokens,
            version_min=request.version_min,
            user=request.user,
            version=request.version,
        )
    except (ValueError, OverflowError, TypeError) as error:
        raise InferenceError(f"request {request.group_id}: expected unsigned numbers: {error}") from error
    size = message.ByteSize()
    if size > MESSAGE_BYTES_MAX:
        raise InferenceError(
            f"request {request.group_id}: expected at most {MESSAGE_BYTES_MAX} bytes, got {size}"
        )
    return message


def request_of(message: pb.GenerateRequest) -> Generation:
    """The request in `message`. Raises InferenceError with the field that is malformed."""
    return Generation(
        run=message.run,
        group_id=message.group_id,
        lane="live" if message.lane == pb.LIVE else "rollout",
        prefix_tokens=_tokens(message.prefix_tokens, f"request {message.group_id}: prefix_tokens"),
        sequences=tuple(
            Sequence(
                member=item.member,
                own_tokens=_tokens(item.own_tokens, f"request {message.group_id}/{item.member}: own_tokens"),
            )
            for item in message.sequences
        ),
        temperature=message.temperature,
        greedy=message.greedy,
        tokens_max=message.tokens_max,
        stop_tokens=tuple(message.stop_tokens),
        seed=message.seed,
        stream_tokens=message.stream_tokens,
        version_min=message.version_min,
        user=message.user,
        version=message.version if message.HasField("version") else None,
    )


def event_message(progress: Progress) -> pb.GenerateEvent:
    """`progress` as it goes over the wire; with everything about the sequence in its last event."""
    done = progress.completion
    if done is None:
        return pb.GenerateEvent(
            member=progress.member, tokens=pack_u32(progress.tokens), logp=pack_f32(progress.logp)
        )
    _, layers, top_k = done.routes_shape
    return pb.GenerateEvent(
        member=progress.member,
        tokens=pack_u32(progress.tokens),
        logp=pack_f32(progress.logp),
        done=True,
        finish=done.finish,
        spans=[pb.Span(start=s.start, end=s.end, weights_version=s.weights_version) for s in done.spans],
        weights_version=done.weights_version,
        routes=done.routes,
        layers=layers,
        top_k=top_k,
        started_ms=done.started_ms,
        ended_ms=done.ended_ms,
        cohort=done.cohort,
    )


def status_message(status: ReplicaStatus) -> pb.StatusReply:
    """`status` as it goes over the wire."""
    fields = {name: getattr(status, name) for name in status.__struct_fields__ if name != "hosted"}
    hosted = [pb.Hosted(version=version, root=root) for version, root in status.hosted]
    return pb.StatusReply(**fields, hosted=hosted)


def status_of(reply: pb.StatusReply) -> ReplicaStatus:
    """The status in `reply`; of an older replica without what it doesn't know of."""
    fields = {name: getattr(reply, name) for name in ReplicaStatus.__struct_fields__}
    fields |= {name: fields[name] if reply.HasField(name) else None for name in ("stable", "canary")}
    fields["hosted"] = tuple((item.version, item.root) for item in reply.hosted)
    return ReplicaStatus(**fields)


class EventReader:
    """Folds the events of one request into progress and completions."""

    def __init__(self, place: str) -> None:
        self._place = place
        self._tokens: dict[int, list[int]] = {}
        self._logp: dict[int, list[float]] = {}

    def progress(self, event: pb.GenerateEvent) -> Progress:
        """Raises InferenceError when the parts of the event do not fit each other."""
        place = f"{self._place}/{event.member}"
        tokens = _tokens(event.tokens, f"{place}: tokens")
        if len(event.logp) != len(event.tokens):
            raise InferenceError(f"{place}: expected {len(tokens)} log-probs, got {len(event.logp)} bytes")
        logp = tuple(unpack_f32(event.logp))
        all_tokens = self._tokens.setdefault(event.member, [])
        all_logp = self._logp.setdefault(event.member, [])
        all_tokens += tokens
        all_logp += logp
        completion = self._completion(event, all_tokens, all_logp, place) if event.done else None
        return Progress(member=event.member, tokens=tokens, logp=logp, completion=completion)

    def _completion(
        self, event: pb.GenerateEvent, tokens: ListLike[int], logp: ListLike[float], place: str
    ) -> Completion:
        row = event.layers * event.top_k
        if event.finish not in _FINISHES or (len(event.routes) % row if row else len(event.routes)):
            raise InferenceError(
                f"{place}: expected a finish and whole rows of {row} routes, got {event.finish!r} and "
                f"{len(event.routes)} bytes"
            )
        spans = tuple(Span(start=s.start, end=s.end, weights_version=s.weights_version) for s in event.spans)
        return Completion(
            member=event.member,
            tokens=tuple(tokens),
            logp=tuple(logp),
            finish=_FINISHES[event.finish],
            spans=spans,
            weights_version=event.weights_version,
            routes=event.routes,
            routes_shape=(len(event.routes) // row if row else 0, event.layers, event.top_k),
            started_ms=event.started_ms,
            ended_ms=event.ended_ms,
            cohort=_COHORTS.get(event.cohort, ""),
        )


def _tokens(value: bytes, place: str) -> tuple[int, ...]:
    try:
        return tuple(unpack_u32(value))
    except ValueError as error:
        raise InferenceError(f"{place}: expected u32 numbers, got {len(value)} bytes") from error
