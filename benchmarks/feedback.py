"""Live feedback: what the gateway takes, what the join does with it, what 400 million requests a day need.

Each part measures on a broker of its own, or on `HEADRACE_KAFKA`: `benchmarks.feedback_gateway` and
`benchmarks.feedback_join`. `--only` runs one of them.
"""

import argparse
import tempfile
from pathlib import Path

from benchmarks import feedback_gateway, feedback_join
from benchmarks.page import header


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=("gateway", "join"))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        parts = []
        if arguments.only != "join":
            parts.append("## Gateway\n\n" + feedback_gateway.run(Path(temporary)))
        if arguments.only != "gateway":
            parts.append(feedback_join.run(Path(temporary)))
    print(header("Live feedback", "msgspec", "grpcio", "aiokafka", "faust-streaming"))
    print("\n".join(parts))


if __name__ == "__main__":
    main()
