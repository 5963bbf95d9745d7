"""Behind an editor: asks for a suggestion at a cursor and reports what became of it, under one id.

python ask_and_report.py RUN_NAME REPLICA_HOST:PORT http://GATEWAY_HOST:PORT
"""

import asyncio
import secrets
import sys
import uuid
from pathlib import Path

from headrace.policy import checkpoint, dialogue, source
from headrace.producers.client import FeedbackClient
from headrace.rpc.client import InferenceClient
from headrace.rpc.generation import Generation, Sequence

FILE = "def area(width, height):\n    return width * height\n"


async def main(run: str, replica: str, gateway: str) -> None:
    codec = checkpoint.load_seed()[2]
    prefix, suffix = source.canonical(FILE).rsplit("height", 1)  # the cursor: what stood there is asked for
    suggestion_id, user = f"ask-{uuid.uuid4().hex}", "ada"
    question = Generation(
        run=run,
        group_id=suggestion_id,  # this is the suggestion's id: whoever asks makes it, never twice
        lane="live",
        user=user,  # as in the feedback: an event of somebody else is refused
        prefix_tokens=tuple(dialogue.suggestion_prompt_tokens(codec, prefix, suffix)),
        sequences=(Sequence(member=0),),
        temperature=0.3,  # greedy answers are not trained
        tokens_max=16,
        stop_tokens=tuple(dialogue.suggestion_stop_tokens(codec)),
        seed=secrets.randbits(64),
    )
    async with InferenceClient(replica) as inference:  # its process writes the record that is trained
        [completion] = await inference.generate(question, timeout_s=10.0)
    told = dialogue.parse_suggestion(codec, list(completion.tokens))
    if not isinstance(told, dialogue.Call):
        print(f"{suggestion_id}: nothing to show: {told}")  # silence is trained too, without a report
        return
    print(f"{suggestion_id}: {told.fill!r}, by weights {completion.weights_version}")
    buffer = Path.home() / ".cache" / "my-plugin" / "feedback.db"
    with FeedbackClient(gateway, buffer=buffer, client="my-plugin/1.0") as client:
        client.publish(suggestion_id=suggestion_id, user=user, kind="shown")
        client.publish(suggestion_id=suggestion_id, user=user, kind="accepted")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:4]))
