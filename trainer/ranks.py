"""Several processes that compute one step together: what they say to each other.

Each rank takes a share of the units; gradient sums are integers (`kernels.gradient_sums`) and reports have
one writer for each number, so a sum over ranks is exact and any number of ranks has the bits of one. Not
here: which process is which rank and what a step begins with (`consumers.ranks`).
"""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Final, Protocol

import torch
import torch.distributed
from torch import Tensor

from headrace.errors import TrainingError

DEADLINE: Final = timedelta(seconds=120)
"""Of one exchange within a step. A rank that dies is found out at once: its connections close."""
IDLE: Final = timedelta(hours=1)
"""How long the others wait for rank 0 to have records for a step."""


class Ranks(Protocol):
    @property
    def rank(self) -> int:
        """From 0."""
        ...

    @property
    def size(self) -> int: ...

    def total(self, tensors: Sequence[Tensor]) -> None:
        """Replaces each tensor (int64 or float64) by its sum over all ranks, which give them in one order."""
        ...

    def agree(self, what: str, text: str) -> None:
        """Raises TrainingError unless all ranks have the same `text`."""
        ...


class Alone:
    """One rank."""

    rank = 0
    size = 1

    def total(self, tensors: Sequence[Tensor]) -> None:
        return

    def agree(self, what: str, text: str) -> None:
        return


ALONE: Final = Alone()


class Gloo:
    """Ranks of a torch process group on CPUs, joined by `init_method`, e.g. `tcp://127.0.0.1:29500`."""

    def __init__(self, init_method: str, rank: int, size: int) -> None:
        torch.distributed.init_process_group(
            "gloo", init_method=init_method, rank=rank, world_size=size, timeout=DEADLINE
        )
        self.rank = rank
        self.size = size
        patient = torch.distributed.new_group(timeout=IDLE)
        assert isinstance(patient, torch.distributed.ProcessGroup), "every rank is in it"
        self._patient = patient

    def total(self, tensors: Sequence[Tensor]) -> None:
        with self._named("a sum over ranks"):
            for tensor in tensors:
                torch.distributed.all_reduce(tensor)

    def agree(self, what: str, text: str) -> None:
        mine = torch.frombuffer(bytearray(hashlib.sha256(text.encode()).digest()), dtype=torch.uint8)
        theirs = [torch.empty_like(mine) for _ in range(self.size)]
        with self._named(what):
            torch.distributed.all_gather(theirs, mine)
        others = [rank for rank, found in enumerate(theirs) if not torch.equal(found, mine)]
        if others:
            raise TrainingError(
                f"rank {self.rank} of {self.size}: expected every rank to have {what} {text}, got {others}"
                " with others"
            )

    def tell(self, data: bytes | None) -> bytes:
        """What rank 0 says, at every rank (`data` is rank 0's, None elsewhere)."""
        with self._named("a message of rank 0"):
            length = torch.tensor([0 if data is None else len(data)])
            torch.distributed.broadcast(length, 0, group=self._patient)
            body = torch.frombuffer(bytearray(data or bytes(int(length))), dtype=torch.uint8)
            torch.distributed.broadcast(body, 0)
        return body.numpy().tobytes()

    def close(self) -> None:
        torch.distributed.destroy_process_group()

    @contextmanager
    def _named(self, what: str) -> Iterator[None]:
        """torch's RuntimeErrors as TrainingErrors."""
        try:
            yield
        except RuntimeError as error:
            raise TrainingError(f"rank {self.rank} of {self.size}: {what}: {error}") from error
