"""The AsyncAPI 3 document of all topics, made from the same definitions that the code runs on.

`python -m headrace.wire.asyncapi` prints it; docs/asyncapi.json is its output, checked for being current by
the tests.
"""

import json
from typing import Any

import msgspec

from headrace.wire.codec import CONTENT_TYPE, type_name
from headrace.wire.topics import BATCH_BYTES_MAX, TOPICS, Topic

_HEADERS: dict[str, Any] = {
    "type": "object",
    "description": "CloudEvents 1.0 in binary mode, and a W3C trace context.",
    "required": ["ce_id", "ce_type", "ce_source", "ce_time", "content-type"],
    "properties": {
        "ce_specversion": {"type": "string", "const": "1.0"},
        "ce_id": {"type": "string", "description": "Stable for records that may be sent twice."},
        "ce_type": {"type": "string", "description": "Type and version of the record."},
        "ce_source": {"type": "string", "description": "The process that wrote it."},
        "ce_time": {"type": "string", "format": "date-time", "description": "By the writer's clock."},
        "content-type": {"type": "string", "const": CONTENT_TYPE.decode()},
        "content-encoding": {"type": "string", "enum": ["zstd-1", "zstd"]},
        "traceparent": {"type": "string"},
    },
}


def document() -> dict[str, Any]:
    """The AsyncAPI 3.0 document as plain data."""
    record_types = sorted({t for topic in TOPICS.values() for t in topic.records}, key=lambda t: t.__name__)
    _, schemas = msgspec.json.schema_components(record_types, ref_template="#/components/schemas/{name}")
    return {
        "asyncapi": "3.0.0",
        "info": {
            "title": "Headrace topics",
            "version": "1",
            "description": "MessagePack maps of the schemas below; `bytes` are binary, base64 in JSON.",
            "license": {"name": "Apache-2.0"},
        },
        "defaultContentType": CONTENT_TYPE.decode(),
        "channels": {name: _channel(topic) for name, topic in TOPICS.items()},
        "operations": {
            f"{action}.{name}": {"action": action, "channel": {"$ref": f"#/channels/{name}"}}
            for name in TOPICS
            for action in ("send", "receive")
        },
        "components": {
            "schemas": dict(sorted(schemas.items())),
            "messages": {
                t.__name__: {
                    "name": type_name(t),
                    "summary": _summary(t),
                    "headers": _HEADERS,
                    "payload": {"$ref": f"#/components/schemas/{t.__name__}"},
                }
                for t in record_types
            },
        },
    }


def render() -> str:
    """The document as JSON text with a newline at its end."""
    return json.dumps(document(), indent=1) + "\n"


def _channel(topic: Topic) -> dict[str, Any]:
    return {
        "address": topic.name,
        "description": f"{topic.note}. Key: {topic.key}.",
        "messages": {t.__name__: {"$ref": f"#/components/messages/{t.__name__}"} for t in topic.records},
        "bindings": {
            "kafka": {
                "partitions": topic.partitions,
                "topicConfiguration": {
                    "cleanup.policy": ["compact"] if topic.compacted else ["delete"],
                    "retention.ms": topic.retention_ms,
                    "max.message.bytes": BATCH_BYTES_MAX,
                },
                "bindingVersion": "0.5.0",
            }
        },
    }


def _summary(record_type: type) -> str:
    return (record_type.__doc__ or "").strip().split("\n")[0]


if __name__ == "__main__":
    print(render(), end="")
