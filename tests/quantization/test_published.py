"""Errors of random numbers as the code and the notebooks of Quartet II report them.

IST-DASLab/Quartet-II @ 8776a90: `notebooks/plots.ipynb` (bits of one quantized tensor of normal numbers) and
`notebooks/unbiasedness.ipynb` (bits of a product of two, averaged over N draws: four times the draws gain a
bit if the numbers are right on average). Bits are half the binary logarithm of signal over noise.
"""

import math

import pytest
import torch

from narrowgauge.formats import random_stream
from narrowgauge.quantization import QuantContext, emulate, make_cast
from narrowgauge.recipes import recipe

CASTS = {
    "nearest": make_cast("nvfp4"),
    "stochastic": make_cast({"cast": "nvfp4", "rounding": "stochastic", "headroom": 16 / 17}),
    "MS-EDEN": recipe("quartet2").casts["dgrad.dy"],
    "four over six": recipe("quartet2").casts["fprop.x"],
}
BITS = {"nearest": 3.40, "stochastic": 2.70, "MS-EDEN": 3.34, "four over six": 3.524}
AVERAGED = {"stochastic": {1: 2.197, 4: 3.196, 16: 4.196}, "MS-EDEN": {1: 2.847, 4: 3.839, 16: 4.843}}


def normal(rows, seed):
    return torch.randn(rows, 512, generator=torch.Generator().manual_seed(seed))


def seen(x, cast, draw=0, number=0):
    """The numbers of a cast, in float64; the transform is undone by that of the other operand."""
    signs = None
    if cast.hadamard.size:
        signs = 1 - 2 * (random_stream(0, draw, 9).bits((cast.hadamard.size,)) & 1)
    values, scale = emulate(x, cast, -1, torch.float32, QuantContext(random_stream(0, draw, number), signs))
    return values.double() * (1.0 if scale is None else scale.double())


def bits(got, exact):
    return -math.log2(((got - exact).square().mean() / exact.square().mean()).item()) / 2


@pytest.mark.parametrize("name", BITS)
def test_bits_of_a_tensor(name):
    x, cast = normal(256, 0), CASTS[name]
    plain = make_cast({"cast": "fp32", "hadamard": cast.hadamard.size, "signs": cast.hadamard.signs})
    assert bits(seen(x, cast), seen(x, plain)) == pytest.approx(BITS[name], abs=0.02)


@pytest.mark.parametrize("name", AVERAGED)
def test_averaging_gains_a_bit_for_four_times_the_draws(name):
    a, b = normal(96, 1), normal(96, 2)
    exact, total = a.double() @ b.double().T, torch.zeros(96, 96, dtype=torch.float64)
    found = {}
    for draw in range(16):
        total += seen(a, CASTS[name], draw, 1) @ seen(b, CASTS[name], draw, 2).T
        if draw + 1 in AVERAGED[name]:
            found[draw + 1] = bits(total / (draw + 1), exact)
    assert found == pytest.approx(AVERAGED[name], abs=0.06)


def test_averaging_what_is_rounded_to_nearest_gains_nothing():
    a = normal(96, 1)
    assert torch.equal(seen(a, CASTS["nearest"], 0, 1), seen(a, CASTS["nearest"], 1, 1))
