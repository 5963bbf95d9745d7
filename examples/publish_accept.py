"""An editor plug-in reports that its user accepted a suggestion: python publish_accept.py http://HOST:PORT"""

import sys
from pathlib import Path

from headrace.producers.client import FeedbackClient

gateway = sys.argv[1] if sys.argv[1:] else sys.exit(__doc__)
buffer = Path.home() / ".cache" / "my-plugin" / "feedback.db"
with FeedbackClient(gateway, buffer=buffer, user="ada", client="my-plugin/1.0") as client:
    client.publish(suggestion_id="demo-live-7", kind="shown")
    client.publish(suggestion_id="demo-live-7", kind="accepted", accepted_length=31)
    # Both are in the file when `publish` returns, and leave it when the gateway has answered for them.
    client.flush(5.0)
    print(client.status())
