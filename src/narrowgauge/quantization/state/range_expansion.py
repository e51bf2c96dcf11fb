"""Range expansion for optimizer state in FP8 (COAT, arXiv 2410.19313, section 4).

The moments of a block cover few binades, and E4M3 has eighteen: most of its codes are never used. Before it
is quantized, each block is stretched to the format's full range by a power,

    f(x) = sign(x) |x / c|^k        c = sqrt(largest * smallest),  k = log2(range) / log2(largest / smallest)

where largest and smallest are the block's magnitudes (without zeros), range = max^2 / 2 of the format, and k
is rounded down to the next 1/16. Afterwards x = sign(y) |y|^(1/k) c. Relative rounding errors shrink by the
factor k. A block of one magnitude has k = 1.
"""

import math
from typing import NamedTuple

import torch

from narrowgauge.formats import Format

LARGEST_K = 64.0  # of a block whose magnitudes are nearly one


class RangeExpansion(NamedTuple):
    """What takes a block back: float32, one entry a block, in the shape that broadcasts over its elements."""

    k: torch.Tensor
    c: torch.Tensor


def range_expansion(magnitudes: torch.Tensor, inner: tuple[int, ...], element: Format) -> RangeExpansion:
    """The k and c of each block of a split tensor's magnitudes (float32, finite)."""
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
    """f of above."""
    return x.sign() * (x.abs() / e.c) ** e.k


def contract(y: torch.Tensor, e: RangeExpansion) -> torch.Tensor:
    """The inverse of `expand`."""
    return y.sign() * y.abs() ** (1 / e.k) * e.c
