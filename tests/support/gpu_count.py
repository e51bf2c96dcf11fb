"""Steps of whole models counted on an imagined GPU, from models of few layers: a count is linear in them."""

from dataclasses import dataclass
from functools import cache

from narrowgauge.cluster.plan.cluster_spec import cluster_names, load_cluster
from narrowgauge.cluster.plan.counted import speeds_of
from narrowgauge.recipes import named_device
from narrowgauge.simulate import H200, count_step, count_whole
from narrowgauge.training import make_config


@dataclass(frozen=True)
class Count:
    """The figures of a micro-batch that budgets are set for; seconds are calibrated, unless noted."""

    launches: float
    functions: float
    waits: float
    bytes: float
    seconds: float
    ceiling_seconds: float
    peak_bytes: float

    @classmethod
    def of(cls, micro, at_ceilings, peak_bytes):
        return cls(
            micro.launches,
            micro.functions,
            micro.waits,
            micro.bytes,
            micro.seconds,
            at_ceilings.seconds,
            peak_bytes,
        )

    def plus(self, other: "Count", times: float) -> "Count":
        """The sum with a multiple of another count."""
        return Count(*(getattr(self, f) + times * getattr(other, f) for f in self.__dataclass_fields__))


def config_of(model, recipe, micro_batch, length, layers, options=()):
    """A configuration at the real width; tokens of a step are 524,288.

    `options` are keys of [training], or of [recipe] after "recipe.".
    """
    training = {"batch_size": 524288 // length, "micro_batch_size": micro_batch}
    places = {k.removeprefix("recipe."): v for k, v in options if k.startswith("recipe.")}
    training |= {k: v for k, v in options if not k.startswith("recipe.")}
    return make_config(
        {
            "model": {"name": model, "layers": layers},
            "data": {"sequence_length": length},
            "training": training,
            "recipe": {"name": recipe} | places,
        }
    )


@cache
def counted(*model, options=()):
    """The count of all layers, one by one."""
    step = count_step(config_of(*model, options), named_device("h200"))
    return Count.of(step.totals(H200.calibrated()).further, step.totals(H200).further, step.peak_bytes)


@cache
def whole(*model, options=(), gpu="h200"):
    """The count of all layers, from models of few; at an H200's speeds where no machine file has others."""
    speeds = speeds_of(load_cluster(gpu)) if gpu in cluster_names() else H200
    step = count_whole(config_of(*model, options), named_device(gpu), speeds)
    return Count.of(step.expected.further, step.best.further, step.peak_bytes)


@cache
def updated(*model, options=()):
    """The total of the update, of all layers one by one."""
    return count_step(config_of(*model, options), named_device("h200")).totals(H200).update
