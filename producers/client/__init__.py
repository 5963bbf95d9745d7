"""The editor's side: a feedback client that a plug-in embeds.

    client = FeedbackClient("http://127.0.0.1:8480", buffer="~/.cache/plugin/feedback.db", user="ada")
    client.publish(suggestion_id="demo-live-7", kind="accepted", accepted_length=31)
    client.close(deadline_s=2)

`publish` writes to a bounded file and returns; a thread sends. Imports neither torch, numpy, grpc nor
aiokafka (grpc only for a `grpc://` address).
"""

from headrace.producers.client.client import FeedbackClient, Status

__all__ = ["FeedbackClient", "Status"]
