"""Weight gradients as exact integer sums: the same bits for any grouping, order and split of the units.

Floating-point sums depend on their order, so a packed batch, another microbatch size or another rank would
give other weights. Here each *unit* (a group of rows that belongs together in every packing) makes its own
float32 product, every product is rounded to a grid of 2^-40, and the grid's integers are added: integer
addition has no order. Autograd computes the activations' gradients only; a `Taps` beside the forward pass
hooks each use of a weight and computes the weight's part when the gradient comes by.

It knows no model: who uses a weight tells which (`policy.model`). Ranks add their integers (`trainer.ranks`).

N rows of all units  I inputs  O outputs  C channels  V vocabulary
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import torch
from torch import Tensor

from headrace.errors import TrainingError
from headrace.kernels.invariant import ROW_TILE
from headrace.kernels.moe import Tapped

GRID_BITS: Final = 40
TERM_MAX: Final = 1024.0
"""Largest element of one unit's gradient. Below 2^11 the shift to the grid is exact, and 2^12 units of it
stay below 2^63."""
_SHIFT: Final = 1.5 * 2.0 ** (52 - GRID_BITS)
"""Added in float64, it leaves no bits below the grid: the lower half of the sum's bits is the integer (Knuth,
TAOCP 2, 4.2.2, on rounding by adding)."""
_SHIFT_BITS: Final = int(torch.tensor(_SHIFT, dtype=torch.float64).view(torch.int64))


@dataclass(frozen=True, slots=True)
class Span:
    """Rows `[start, end)` of a packed batch that belong to one unit."""

    start: int
    end: int


@dataclass(slots=True)
class GradientSums:
    """int64 sums in units of 2^-40, by weight name. Adding raises TrainingError for a term that is not
    finite or above `TERM_MAX`."""

    sums: dict[str, Tensor]

    @classmethod
    def like(cls, weights: dict[str, Tensor]) -> "GradientSums":
        return cls({name: torch.zeros(w.shape, dtype=torch.int64) for name, w in weights.items()})

    def gradients(self) -> dict[str, Tensor]:
        """float32, rounded once from the exact sums."""
        return {name: (total.double() * 2.0**-GRID_BITS).float() for name, total in self.sums.items()}


def on_grid(name: str, term: Tensor) -> Tensor:
    """`term` (float32) rounded to multiples of 2^-40, ties to even, as their int64 count."""
    least, most = torch.aminmax(term)
    if not (float(least) >= -TERM_MAX and float(most) <= TERM_MAX):  # false for NaN
        raise TrainingError(
            f"{name}: expected a gradient within ±{TERM_MAX:g}, got {float(least):g} to {float(most):g}"
        )
    return term.double().add_(_SHIFT).view(torch.int64).sub_(_SHIFT_BITS)


class Taps:
    """Hooks of one packed forward pass: `units` are the spans of its rows, in order."""

    def __init__(self, sums: GradientSums, units: Sequence[Span]) -> None:
        self._sums = sums
        self.units = units

    def over(self, units: Sequence[Span]) -> "Taps":
        """The same sums for other rows, e.g. those that reach the head."""
        return Taps(self._sums, units)

    def embedded(self, name: str, index_N: Tensor, y_NC: Tensor) -> None:
        """y = w[index]: the entrance, from where gradients are asked for. Every row is a term of its own."""

        def add(grad_NC: Tensor) -> None:
            self._sums.sums[name].index_add_(0, index_N, on_grid(name, grad_NC))

        y_NC.requires_grad_().register_hook(add)  # type: ignore[no-untyped-call]

    def scaled(self, name: str, x_NC: Tensor, y_NC: Tensor) -> None:
        """y = x * w, w of `[C]`. Every row is a term of its own."""
        x_NC = x_NC.detach()

        def add(grad_NC: Tensor) -> None:
            self._sums.sums[name].add_(on_grid(name, grad_NC * x_NC).sum(0))

        y_NC.register_hook(add)  # type: ignore[no-untyped-call]

    def product(self, name: str, x_NI: Tensor, y_NO: Tensor, part: int | None = None) -> None:
        """y = x @ w.T, w of `[O, I]` (or the `part`-th of several)."""
        x_NI = x_NI.detach()
        total_OI = self._sums.sums[name] if part is None else self._sums.sums[name][part]

        def add(grad_NO: Tensor) -> None:
            outputs = grad_NO.shape[1]
            # A row starts on a multiple of 64 bytes whatever stands before it: the BLAS may look at that.
            wide_NO = torch.nn.functional.pad(grad_NO, (0, -outputs % ROW_TILE)).contiguous()
            for unit in self.units:
                rows = slice(unit.start, unit.end)
                total_OI.add_(on_grid(name, torch.mm(wide_NO[rows].t(), x_NI[rows])[:outputs]))

        y_NO.register_hook(add)  # type: ignore[no-untyped-call]

    def routed(self, up: str, down: str) -> Tapped:
        """For `moe.experts`: the two weights of every expert, `[E, O, I]`."""
        borders = torch.tensor([self.units[0].start, *(unit.end for unit in self.units)])

        def tap(
            expert: int, sources: Tensor, first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]
        ) -> None:
            at = torch.searchsorted(sources, borders).tolist()
            own = self.over([Span(start, end) for start, end in pairwise(at) if end > start])
            own.product(up, *first, part=expert)
            own.product(down, *second, part=expert)

        return tap


def spans(lengths: Iterable[int]) -> list[Span]:
    """One after the other."""
    found = []
    start = 0
    for length in lengths:
        found.append(Span(start, start + length))
        start += length
    return found
