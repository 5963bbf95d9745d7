"""The gateway's OpenAPI page, made from the types themselves."""

from functools import cache
from typing import Any

import msgspec

from headrace import __version__
from headrace.producers.adapters.tabby import TabbyEvent
from headrace.rpc.feedback import KINDS, Event, Reply

_ANSWERS = {
    "400": "the body is not a batch",
    "401": "no token, or one that nobody was given",
    "403": "a gateway without tokens, called by another name than this machine's",
    "408": "the body did not come in time",
    "413": "the body is too large",
    "415": "the body is not application/json",
    "429": "a limit is reached; see Retry-After. Nothing of the batch is acknowledged",
    "503": "the log is away, or the gateway stops; see Retry-After. Nothing of the batch is acknowledged",
}


@cache
def page() -> dict[str, Any]:
    """The whole page as plain values."""
    (event, tabby, reply), components = msgspec.json.schema_components(
        (Event, TabbyEvent, Reply), ref_template="#/components/schemas/{name}"
    )
    components["Event"]["properties"]["kind"]["enum"] = sorted(KINDS)
    batch = {"type": "object", "required": ["events"], "properties": {"events": _list_of(event)}}
    answer = {"application/json": {"schema": reply}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Headrace feedback gateway", "version": __version__},
        "paths": {
            "/v1/events": {
                "post": {
                    "summary": "Publish a batch; safe to send again (same event ids)",
                    "security": [{"token": []}],
                    "requestBody": {
                        "required": True,
                        "content": {"application/json": {"schema": {"oneOf": [batch, tabby]}}},
                    },
                    "responses": {
                        "200": {"description": "what is not refused is durable", "content": answer},
                        "422": {"description": "every event is refused, for good", "content": answer},
                        **{status: {"description": text} for status, text in _ANSWERS.items()},
                    },
                }
            },
            "/healthz": {
                "get": {
                    "summary": "Whether the log takes events",
                    "responses": {"200": {"description": "it does"}, "503": {"description": "it does not"}},
                }
            },
        },
        "components": {
            "schemas": components,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _list_of(item: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": item}
