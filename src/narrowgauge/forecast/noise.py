"""The noise of a cast: the power of its rounding error over the power of what it rounds.

    e = |operand - x|^2 / |x|^2          x: 512 x 512 values of Student's t with five degrees of freedom

The distribution has heavier tails than a normal one, as activations and gradients do; where the cast
transforms its input, x is what it transforms to. `noise.csv` has e of each cast of the recipes that ship and
of the schemes of the atlas (`make forecasts` remakes it), so that a forecast takes no torch; any other cast
is measured.
"""

import csv
from functools import cache
from pathlib import Path

from narrowgauge.quantization import Cast
from narrowgauge.quantization.keys import Consumer

TABLE = Path(__file__).with_name("noise.csv")
_ROWS, _DEGREES = 512, 5


def cast_text(cast: Cast) -> str:
    """A cast's keys that are not at their defaults, but for those that hardly move a value."""
    values = cast.values()
    shown = ((key, values[key]) for key in cast.unsupported[Consumer.SAME_NOISE])
    return " ".join(f"{key}={getattr(value, 'name', value)}" for key, value in shown).replace(", ", ",")


def noise_of(cast: Cast) -> float:
    """The noise of a cast: of the table, or measured, which takes torch."""
    text = cast_text(cast)
    return _table()[text] if text in _table() else measured_noise(cast)


@cache
def measured_noise(cast: Cast) -> float:
    """The noise of a cast, measured, with three digits."""
    import torch

    from narrowgauge.quantization import QuantContext, emulate
    from narrowgauge.quantization.quantize import prepared_by

    draw = torch.Generator().manual_seed(0)
    squares = torch.randn(_DEGREES, _ROWS, _ROWS, generator=draw).square().mean(0)
    x = torch.randn(_ROWS, _ROWS, generator=draw) / squares.sqrt()
    plain = cast.having(of="") if cast.of else cast
    signs = None
    if isinstance(plain.signs, str):
        signs = torch.where(torch.rand(plain.hadamard, generator=draw) < 0.5, -1.0, 1.0)
    context = QuantContext(random=draw, signs=signs)
    operand, scale = emulate(x, plain, -1, torch.float32, context)
    values = operand.float() if scale is None else operand.float() * scale
    is_restored = plain.center or plain.compensate or plain.keep_channels
    reference = x if is_restored else prepared_by(x, plain, -1, context).x.float()
    return float(f"{float((values - reference).square().sum() / reference.square().sum()):.3g}")


@cache
def _table() -> dict[str, float]:
    with TABLE.open(encoding="utf-8", newline="") as file:
        return {row["cast"]: float(row["noise"]) for row in csv.DictReader(file)}
