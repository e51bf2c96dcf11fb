"""How state is stored beyond codes and scales: range expansion and codebooks.

**Range expansion** (COAT, arXiv 2410.19313, section 4). The moments of a block cover few binades, while E4M3
has eighteen, so most of its codes are never used. Before quantization, each block is stretched to the
format's full range by a power,

    f(x) = sign(x) |x / c|^k        c = sqrt(largest * smallest),  k = log2(range) / log2(largest / smallest)

where largest and smallest are the block's magnitudes (without zeros), range = max^2 / 2 of the format, and k
is rounded down to the next 1/16. Decoding computes x = sign(y) |y|^(1/k) c. Relative rounding errors shrink
by a factor of k. A block with a single magnitude has k = 1.

**Codebooks**: the dynamic map of 8-bit optimizers (arXiv 2110.02861, section 1.3). Moments spread over many
decades, small ones far more often than large ones. The map has seven decades, from the block's amax down.
Each decade has half as many codes as the next larger one:

    signed      0, 1, and +-10^(e-6) times the midpoints of 2^e equal parts of [0.1, 1]        e = 0 .. 6
    unsigned    0, 1, and   10^(e-6) times the midpoints of 2^(e+1) such parts

Each map has 256 values. A block is divided by its amax and every element gets the code of the nearest value;
half way between two it gets the lower one.
"""

from __future__ import annotations

import math
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from narrowgauge.formats import Format

if TYPE_CHECKING:
    import torch

DECADES = 7
LARGEST_K = 64.0  # for a block whose magnitudes are nearly equal


class RangeExpansion(NamedTuple):
    """The inverse parameters of a block: float32, one entry per block, broadcastable over its elements."""

    k: torch.Tensor
    c: torch.Tensor


def range_expansion(magnitudes: torch.Tensor, inner: tuple[int, ...], element: Format) -> RangeExpansion:
    """The k and c of each block of a split tensor's magnitudes (float32, finite)."""
    import torch

    largest = magnitudes.amax(inner, keepdim=True)
    smallest = torch.where(magnitudes > 0, magnitudes, math.inf).amin(inner, keepdim=True)
    is_zero = largest == 0
    largest, smallest = torch.where(is_zero, 1.0, largest), torch.where(is_zero, 1.0, smallest)
    binades = torch.log2(largest) - torch.log2(smallest)
    available = math.log2(element.max * element.max / 2)
    k = torch.floor(available / binades * 16) / 16
    k = torch.where(binades > 0, k.clamp(1 / 16, LARGEST_K), 1.0)
    return RangeExpansion(k, torch.sqrt(largest) * torch.sqrt(smallest))


def expand(x: torch.Tensor, e: RangeExpansion) -> torch.Tensor:
    """f from the module docstring."""
    return x.sign() * (x.abs() / e.c) ** e.k


def contract(y: torch.Tensor, e: RangeExpansion) -> torch.Tensor:
    """The inverse of `expand`."""
    return y.sign() * y.abs() ** (1 / e.k) * e.c


@cache
def code_values(name: str) -> tuple[float, ...]:
    """The 256 values of a map in ascending order, exact float32."""
    import torch

    signed = name == "dynamic"
    values = [0.0, 1.0]
    for e in range(DECADES):
        parts = 2**e if signed else 2 ** (e + 1)
        middles = [0.1 + 0.9 * (i + 0.5) / parts for i in range(parts)]
        values += [10.0 ** (e - DECADES + 1) * m * s for m in middles for s in ((1, -1) if signed else (1,))]
    return tuple(torch.tensor(sorted(values), dtype=torch.float32, device="cpu").tolist())


@cache
def _borders(name: str) -> torch.Tensor:
    """The largest float32 for each code but the last: half way to the next value, rounded down."""
    import torch

    values = torch.tensor(code_values(name), dtype=torch.float64, device="cpu")
    middle = (values[:-1] + values[1:]) / 2
    border = middle.float()
    below = torch.nextafter(border, torch.full_like(border, -torch.inf))
    return torch.where(border.double() > middle, below, border)


def to_codes(x: torch.Tensor, name: str) -> torch.Tensor:
    """The uint8 codes of the values nearest to a float32 tensor in [-1, 1]."""
    import torch

    return torch.bucketize(x, _borders(name).to(x.device), out_int32=True).to(torch.uint8)


def from_codes(codes: torch.Tensor, name: str) -> torch.Tensor:
    """The float32 values of codes."""
    import torch

    return torch.tensor(code_values(name), dtype=torch.float32, device=codes.device)[codes.int()]
