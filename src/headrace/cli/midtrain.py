"""`headrace midtrain`: makes the seed checkpoint again, from the standard library and installed packages.

Its settings are flags too: `--midtrain.steps 100`.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from headrace import log
from headrace.errors import ConfigError

DETAIL = """Takes about half an hour on two cores. The shipped seed is not touched unless --out names it."""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where the files go")
    parser.add_argument("--config", type=Path, action="append", default=[], metavar="FILE", help="TOML file")
    parser.add_argument("--json", action="store_true", help="progress as JSON lines")


def run(args: argparse.Namespace) -> int:
    log.configure("midtrain")
    # torch and all that: only now, so that `--help` stays quick.
    from headrace.config import resolve
    from headrace.trainer.midtrain import MidtrainConfig
    from headrace.trainer.midtrain import run as midtrain

    flags = {}
    for name, value in args.dotted.items():
        if not name.startswith("midtrain."):
            raise ConfigError(f"--{name}: expected a setting of midtrain (--midtrain.steps ...)")
        flags[name.removeprefix("midtrain.")] = value
    config = resolve(MidtrainConfig, files=args.config, flags={**flags, "out": str(args.out)})
    midtrain(config, _progress(args.json))
    return 0


def _progress(as_json: bool) -> Any:
    def show(text: str) -> None:
        print(json.dumps({"progress": text}) if as_json else text, flush=True)

    return show
