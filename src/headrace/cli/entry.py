"""`headrace COMMAND ...`: finds the command, runs it, turns errors into one line and an exit code.

Exit codes: 0 done; 1 a fault without a code of its own; 2 wrong arguments or settings; 3 to 9 the boundary
that failed (`headrace.errors`); 130 interrupted. Not here: what the commands do.
"""

import argparse
import difflib
import importlib
import os
import sys
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import NoReturn

from headrace import __version__
from headrace.errors import ConfigError, HeadraceError

COMMANDS: dict[str, tuple[str, str]] = {
    "demo": ("demo", "train a small model on real code, live, from nothing; ends with a report"),
    "status": ("status", "a run's numbers now: step, reward, lag, processes, drops"),
    "topics": (
        "topics",
        "the topics: partitions, records, bytes, lag of each consumer group; create them",
    ),
    "tail": ("tail", "print a topic's records, decoded"),
    "trajectory": ("trajectory", "one group as a person reads it, and what became of it"),
    "trace": ("trace", "the way of a group, rollout, suggestion or event: where, when, into which weights"),
    "replay": ("replay", "training steps computed again from the log, compared with the ledger"),
    "step": ("step", "one step of the ledger, and what each of its units contributed"),
    "diff": ("diff", "the first step at which two runs part, and why"),
    "account": ("account", "what became of every prompt, by the ledger and by the topics: equal or not"),
    "report": ("report", "write the report of a run again"),
    "dead-letters": ("dead_letters", "records that could not be handled: list, show, redrive"),
    "tasks": ("tasks", "the task set: list, show, build, verify"),
    "weights": ("weights", "versions and who is served which: list, promote, revoke, pin, unpin"),
    "evaluate": ("evaluate", "a held-out round under one version of the weights"),
    "measure": ("measure", "what suggestions of one version are worth to simulated users, on held-out files"),
    "silence": ("silence", "make the checkpoint that an online run starts from: the seed, able to be silent"),
    "sweep": ("sweep", "remove blobs that no record of the log names"),
    "midtrain": ("midtrain", "make the seed checkpoint again"),
    "kafka": ("kafka", "a local Apache Kafka: up, down, status"),
    "prompts": ("processes", "process: feeds prompts"),
    "rollouts": ("processes", "process: rolls prompts out"),
    "inference": ("processes", "process: generates tokens (gRPC)"),
    "experience": ("processes", "process: joins steps and rewards into closed groups"),
    "feedback-join": ("processes", "process: joins what editors report into rewards of suggestions"),
    "trainer": ("processes", "process: the one trainer"),
    "rank": ("rank", "process: computes steps with a trainer of several ranks"),
    "relay": ("processes", "process: brings published weights to the replicas"),
    "canary": ("processes", "process: releases new weights by stages, takes bad ones back"),
    "watch": ("processes", "process: tries held-out tasks on new weights, for the curve"),
    "gateway": ("gateway", "process: takes editors' feedback (gRPC, HTTP); forget a user"),
    "editors": ("editors", "process: simulated editors that ask, type and report"),
    "feedback": ("feedback", "publish feedback: one event, or a recorded log of an editor"),
    "completion": ("completion", "print the completion script of a shell"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code. Never a traceback for an error that Headrace names."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        dotted, words = split_dotted(words)
        parser = build_parser(only=next((word for word in words if not word.startswith("-")), ""))
        _check_options(parser, words)
        args = parser.parse_args(words)
        if not args.command:
            parser.print_help()
            return 0
        args.dotted = dotted
        return int(args.run(args))
    except HeadraceError as error:
        print(f"headrace: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("headrace: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of our output went away (`| head`): nothing is wrong, and nothing more can be printed.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if error.filename is None:
            raise
        print(f"headrace: {error.filename}: {error.strerror}", file=sys.stderr)
        return 1


def build_parser(only: str | None = None) -> argparse.ArgumentParser:
    """The parser; with the arguments of the command `only`, or of all commands when None (completion)."""
    parser = _Parser(
        prog="headrace",
        description="Event-streaming reinforcement learning for coding models, built around a log.",
        epilog="Every command has its own --help. Settings are flags too: --trainer.lr 3e-6.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"headrace {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=_Parser)
    for name, (module, line) in COMMANDS.items():
        chosen = only is None or name == only
        command = commands.add_parser(
            name,
            help=line,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if chosen:
            loaded = _command_module(module)
            command.description = f"{line[0].upper()}{line[1:]}.\n\n{getattr(loaded, 'DETAIL', '')}".strip()
            loaded.arguments(command)
            command.set_defaults(run=loaded.run)
    return parser


def split_dotted(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """The settings among the arguments (`--trainer.lr 3e-6`, `--trainer.lr=3e-6`), by dotted name, and the
    other words. Raises ConfigError when a value is missing."""
    flags: dict[str, str] = {}
    others: list[str] = []
    remaining = iter(words)
    for word in remaining:
        name, equals, value = word.partition("=")
        if not (name.startswith("--") and "." in name):
            others.append(word)
            continue
        if not equals:
            value = next(remaining, "")
            if not value:
                raise ConfigError(f"{name}: expected a value, got the end of the line")
        flags[name.removeprefix("--").replace("-", "_")] = value
    return flags, others


def _check_options(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """Exits with 2 at the first option that no parser here knows, and names the nearest: argparse would take
    its value for something else first."""
    known = set(_options(parser))
    for name in (word.partition("=")[0] for word in words if word.startswith("--")):
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            parser.error(f"unknown argument {name!r}" + (f": did you mean {near[0]}?" if near else ""))


def _options(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        yield from action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            for inner in set(action.choices.values()):
                yield from _options(inner)


def _command_module(name: str) -> ModuleType:
    return importlib.import_module(f"headrace.cli.{name}")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line, with the nearest command when one is misspelt."""
        word = message.partition("argument COMMAND: invalid choice: '")[2].partition("'")[0]
        near = difflib.get_close_matches(word, COMMANDS, n=1, cutoff=0.5) if word else []
        if near:
            message = f"unknown command {word!r}: did you mean {near[0]!r}?"
        self.exit(2, f"{self.prog}: {message}\n{self.prog}: see {self.prog} --help\n")
