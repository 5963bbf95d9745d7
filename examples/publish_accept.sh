#!/bin/sh
# The same without Python: sh publish_accept.sh http://HOST:PORT (the token, if any, in $HEADRACE_FEEDBACK_TOKEN)
curl -sS --fail-with-body "$1/v1/events" -H "Authorization: Bearer $HEADRACE_FEEDBACK_TOKEN" -H 'Content-Type: application/json' \
  -d '{"events": [{"event_id": "e-7", "suggestion_id": "demo-live-7", "kind": "accepted", "accepted_length": 31, "user": "ada"}]}'
