"""Size and speed of rollout steps on the topic, against the same content as JSON lines.

The rollouts are synthetic and of the size of the demo's: a prompt of 150 tokens that every step 0 carries, 4
to 12 generated tokens, log-probabilities that need all their digits, routes of 4 layers x 2 experts. JSON
carries each array as a list of numbers, floats with the digits that give the float32 back.
"""

import json
import random
import struct
import time
from collections.abc import Callable

import msgspec
import zstandard

from benchmarks.page import header, table
from headrace.wire import codec, packed
from headrace.wire import records as r
from headrace.wire.examples import EXAMPLES

STEPS = 2000
LAYERS, TOP_K, EXPERTS, VOCAB = 4, 2, 4, 2048


def main() -> None:
    rng = random.Random(0)
    steps = [_step(rng, i) for i in range(STEPS)]
    tokens = sum(len(step.tokens_in) // 4 + len(step.tokens_out) // 4 for step in steps)
    lines = [_json_line(step) for step in steps]
    encoded = [codec.encode(step, source="benchmark", now_ms=0) for step in steps]
    json_bytes = sum(map(len, lines))
    zstd = zstandard.ZstdCompressor(level=1)
    rows = [
        _row("JSON lines", json_bytes, tokens, json_bytes),
        _row("JSON lines, zstd per record", sum(len(zstd.compress(x)) for x in lines), tokens, json_bytes),
        _row("MessagePack", sum(len(codec.encode_plain(s)) for s in steps), tokens, json_bytes),
        _row("on the topic (value)", sum(len(v) for v, _ in encoded), tokens, json_bytes),
        _row(
            "on the topic (value and headers)",
            sum(len(v) + sum(len(k) + len(x) for k, x in h) for v, h in encoded),
            tokens,
            json_bytes,
        ),
    ]
    print(header("Wire: bytes and records per second", "msgspec", "zstandard"))
    print(f"{STEPS:,} rollout steps, {tokens:,} tokens in and out.\n")
    print(table(["form", "bytes / token", "of JSON"], rows))
    print(table(["one core", "records / s"], _speeds(steps, lines, encoded)))


def _row(name: str, size: int, tokens: int, json_bytes: int) -> list[object]:
    return [name, size / tokens, size / json_bytes]


def _speeds(
    steps: list[r.RolloutStep], lines: list[bytes], encoded: list[tuple[bytes, codec.Headers]]
) -> list[list[object]]:
    def rate(work: Callable[[], object]) -> float:
        best = float("inf")
        for _ in range(3):
            start = time.perf_counter()
            work()
            best = min(best, time.perf_counter() - start)
        return STEPS / best

    return [
        ["encode, value and headers", rate(lambda: [codec.encode(s, source="b", now_ms=0) for s in steps])],
        ["decode", rate(lambda: [codec.decode("rollout.steps", v, h) for v, h in encoded])],
        ["JSON encode (json.dumps)", rate(lambda: [_json_line(s) for s in steps])],
        ["JSON decode (json.loads)", rate(lambda: [json.loads(line) for line in lines])],
    ]


def _step(rng: random.Random, i: int) -> r.RolloutStep:
    prompt, out = 150, rng.randint(4, 12)
    template = EXAMPLES["RolloutStep"]
    assert isinstance(template, r.RolloutStep)
    routes = bytes(e for _ in range((prompt + out - 1) * LAYERS) for e in rng.sample(range(EXPERTS), TOP_K))
    return msgspec.structs.replace(
        template,
        group_id=f"demo-{i // 8:07d}",
        member=i % 8,
        tokens_in=packed.pack_u32(rng.choices(range(VOCAB), k=prompt)),
        tokens_out=packed.pack_u32(rng.choices(range(VOCAB), k=out)),
        logp=packed.pack_f32(-rng.expovariate(1.0) for _ in range(out)),
        loss_mask=bytes([1]) * out,
        spans=(r.Span(start=0, end=out, weights_version=i // 256),),
        routes=routes,
        routes_shape=(prompt + out - 1, LAYERS, TOP_K),
        prefix_length=prompt,
    )


def _json_line(step: r.RolloutStep) -> bytes:
    tree = msgspec.to_builtins(step, builtin_types=(bytes,))
    tokens, layers, top_k = step.routes_shape
    flat = list(step.routes)
    tree |= {
        "tokens_in": packed.unpack_u32(step.tokens_in),
        "tokens_out": packed.unpack_u32(step.tokens_out),
        "logp": [_shortest_float32(x) for x in packed.unpack_f32(step.logp)],
        "loss_mask": list(step.loss_mask),
        "routes": [
            [flat[(t * layers + n) * top_k : (t * layers + n + 1) * top_k] for n in range(layers)]
            for t in range(tokens)
        ],
    }
    return json.dumps(tree, separators=(",", ":")).encode() + b"\n"


def _shortest_float32(x: float) -> float:
    """The decimal with the fewest digits that still is this float32 (at most 9)."""
    for digits in range(6, 10):
        short = float(f"{x:.{digits}g}")
        if struct.pack("<f", short) == struct.pack("<f", x):
            return short
    return x


if __name__ == "__main__":
    main()
