"""Steps of whole models counted on an imagined H200, from models of few layers: a count is linear in them."""

from dataclasses import dataclass
from functools import cache

from narrowgauge.bench.count import count_step
from narrowgauge.recipes import named_device
from narrowgauge.training import make_config


@dataclass(frozen=True)
class Count:
    """The figures of a micro-batch that budgets are set for; seconds are calibrated ones, unless said."""

    launches: float
    functions: float
    waits: float
    bytes: float
    seconds: float
    ceiling_seconds: float
    peak_bytes: float

    def plus(self, other: "Count", times: float) -> "Count":
        """The sum with a multiple of another count."""
        return Count(*(getattr(self, f) + times * getattr(other, f) for f in self.__dataclass_fields__))


@cache
def counted(model, recipe, micro_batch, length, layers, options=()):
    """The count with this number of layers, at the real width; tokens of a step are 524,288."""
    training = {"batch_size": 524288 // length, "micro_batch_size": micro_batch}
    config = make_config(
        {
            "model": {"name": model, "layers": layers},
            "data": {"sequence_length": length},
            "training": training | dict(options),
            "recipe": {"name": recipe},
        }
    )
    step = count_step(config, named_device("h200"))
    at_ceilings, micro = step.micro_batch(), step.micro_batch(calibrated=True)
    return Count(
        micro.launches,
        micro.functions,
        micro.waits,
        micro.bytes,
        micro.seconds,
        at_ceilings.seconds,
        step.peak_bytes,
    )


def whole(model, recipe, micro_batch, length, layers, kept=None, options=()):
    """The count of the model with all its layers, from one with few.

    `kept(layers)` is how many of the layers a recipe keeps wide, the last ones; then both kinds are counted.
    """

    def of(n):
        return counted(model, recipe, micro_batch, length, n, options)

    if kept is None:
        return of(2).plus(of(3).plus(of(2), -1), layers - 2)
    # 5 and 6 layers keep one, 7 keep two
    narrow, wide = of(6).plus(of(5), -1), of(7).plus(of(6), -1)
    return of(6).plus(narrow, layers - kept(layers) - 5).plus(wide, kept(layers) - 1)
