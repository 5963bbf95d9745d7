"""`headrace completion bash|zsh`: prints a completion script for the shell, made from the parser by shtab."""

import argparse

DETAIL = """Put this line into the start-up file of your shell:

    eval "$(headrace completion bash)"
"""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=["bash", "zsh"])


def run(args: argparse.Namespace) -> int:
    import shtab

    from headrace.cli.entry import build_parser

    print(shtab.complete(build_parser(), shell=args.shell))
    return 0
