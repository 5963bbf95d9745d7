"""The command line: the only place that builds a bus, and that knows which processes make a run.

`entry` finds the command; each command is a module of its own name. Importing a command module is light:
torch, gRPC and the like are imported inside the functions that need them.
"""

from headrace.cli.entry import main

__all__ = ["main"]
