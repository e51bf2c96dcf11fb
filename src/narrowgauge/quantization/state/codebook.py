"""Numbers that are codes into a table: the dynamic map of 8-bit optimizers (arXiv 2110.02861, section 1.3).

Moments spread over many decades, small ones far more often than large ones. The map has seven decades, from
the block's largest magnitude down, and gives each as many codes as the next larger one has halves:

    signed      0, 1, and +-10^(e-6) times the middles of 2^e equal parts of [0.1, 1]        e = 0 .. 6
    unsigned    0, 1, and   10^(e-6) times the middles of 2^(e+1) such parts

Each map has 256 numbers. A block is divided by its largest magnitude and every element takes the code of the
nearest number; half-way between two it takes the lower one.
"""

from functools import cache

import torch

from narrowgauge.quantization.blocks import Blocks

DECADES = 7


@cache
def code_values(name: str) -> tuple[float, ...]:
    """The 256 numbers of a map in ascending order, exact float32."""
    signed = name == "dynamic"
    numbers = [0.0, 1.0]
    for e in range(DECADES):
        parts = 2**e if signed else 2 ** (e + 1)
        middles = [0.1 + 0.9 * (i + 0.5) / parts for i in range(parts)]
        numbers += [10.0 ** (e - DECADES + 1) * m * s for m in middles for s in ((1, -1) if signed else (1,))]
    return tuple(torch.tensor(sorted(numbers), dtype=torch.float32).tolist())


@cache
def _borders(name: str) -> torch.Tensor:
    """The largest float32 that takes each code but the last: half-way to the next number, rounded down."""
    values = torch.tensor(code_values(name), dtype=torch.float64)
    middle = (values[:-1] + values[1:]) / 2
    border = middle.float()
    return torch.where(
        border.double() > middle,
        torch.nextafter(border, torch.tensor(-torch.inf, dtype=torch.float32)),
        border,
    )


def to_codes(x: torch.Tensor, name: str) -> torch.Tensor:
    """The uint8 codes of the numbers nearest to a float32 tensor in [-1, 1]."""
    return torch.bucketize(x, _borders(name).to(x.device), out_int32=True).to(torch.uint8)


def encoded(x: torch.Tensor, name: str, blocks: Blocks) -> dict[str, torch.Tensor]:
    """The "codes" of a float32 tensor, and the "scales" that its blocks were divided by."""
    split = blocks.split(x)
    largest = split.abs().amax(blocks.inner, keepdim=True)
    divisor = torch.where(largest.isfinite() & (largest > 0), largest, 1.0)
    codes = blocks.merge(to_codes(split / divisor, name)).contiguous()
    return {"codes": codes, "scales": torch.where(largest.isfinite(), divisor, torch.nan).view(blocks.grid)}


def from_codes(codes: torch.Tensor, name: str) -> torch.Tensor:
    """The float32 numbers of codes."""
    return torch.tensor(code_values(name), dtype=torch.float32, device=codes.device)[codes.int()]
