"""The count of a step on a GPU: totals of its parts.

A step is its first micro-batch, which casts weights for all of them and finds no gradients; any number of
further ones, which are alike; and the update. Three micro-batches are simulated, and the second stands for
all further ones.
"""

from dataclasses import dataclass

from narrowgauge.recipes import choose_backend
from narrowgauge.system.devices import Device
from narrowgauge.system.errors import UserError
from narrowgauge.trainer.simulate.recorder import Part
from narrowgauge.trainer.simulate.speeds import FUNCTION_S, LAUNCH_S, Speeds
from narrowgauge.trainer.simulate.step import UPDATE, phase_of, simulate_step
from narrowgauge.trainer.training import Config

_MICRO_BATCHES = 3


@dataclass(frozen=True)
class Total:
    """The sum of some events, and what the host does for them."""

    launches: int
    functions: int
    waits: int
    bytes: int
    flops: float
    seconds: float
    product_seconds: float
    attention_seconds: float
    cast_seconds: float

    @property
    def host_seconds(self) -> float:
        """The host's time, as assumed in `speeds`."""
        return self.launches * LAUNCH_S + self.functions * FUNCTION_S

    @property
    def step_seconds(self) -> float:
        """The longer of the host's and the device's time."""
        return max(self.seconds, self.host_seconds)

    @classmethod
    def of(cls, part: Part, speeds: Speeds) -> "Total":
        """The total of a part of a step at given speeds."""
        events, times = part.events, [(e, speeds.seconds(e.cost)) for e in part.events]
        attention = sum(s for e, s in times if e.cost.kind.startswith("attention"))
        return cls(
            sum(e.cost.launches for e in events),
            part.functions,
            part.waits,
            sum(e.cost.bytes for e in events),
            sum(e.cost.flops for e in events),
            sum(s for _, s in times),
            sum(s for e, s in times if e.cost.flops) - attention,
            attention,
            sum(s for e, s in times if e.is_cast),
        )


@dataclass(frozen=True)
class StepTotals:
    """The totals of a step's parts, at the same speeds."""

    first: Total
    further: Total
    update: Total
    micro_batches: int

    @property
    def seconds(self) -> float:
        """The seconds of the step: of each part, the longer of the host's and the device's time."""
        further = (self.micro_batches - 1) * self.further.step_seconds
        return self.first.step_seconds + further + self.update.step_seconds

    def of_micro_batches(self, name: str) -> float:
        """A field of `Total`, summed over the micro-batches."""
        return float(getattr(self.first, name) + (self.micro_batches - 1) * getattr(self.further, name))


@dataclass(frozen=True)
class StepCount:
    """What a step costs on an imagined GPU.

    Attributes:
        micro_batches: micro-batches of a step.
        first: the first micro-batch.
        micro: one that is neither the first nor the last.
        update: clipping, the update and what follows.
        peak_bytes: the most bytes that are alive.
        state_bytes: bytes on the device between steps.
    """

    micro_batches: int
    first: Part
    micro: Part
    update: Part
    peak_bytes: int
    state_bytes: int

    def totals(self, at: Speeds) -> StepTotals:
        """The totals of the step's parts at given speeds."""
        first, further, update = (Total.of(part, at) for part in (self.first, self.micro, self.update))
        return StepTotals(first, further, update, self.micro_batches)


def count_step(config: Config, facts: Device) -> StepCount:
    """Count what a step costs on a GPU, on any machine.

    Args:
        config: the model, its recipe, its micro-batch; one process.
        facts: the facts of the GPU.

    Returns:
        The count. State that is kept in the host's memory is not moved in it.

    Raises:
        UserError: it is not a GPU, the recipe requires native GEMMs that
            it does not have, or the step is compiled.
    """
    if not facts.is_gpu:
        raise UserError(f"a step is counted for a GPU, not for {facts}; name one, such as h200")
    if config.training.compile:
        raise UserError(
            "a compiled step is not counted, because torch's compiler generates its kernels; leave "
            "training.compile out"
        )
    choose_backend(config.spec.recipe, facts, config.spec.backend)
    step = simulate_step(config, _MICRO_BATCHES, count_on=facts)
    parts, t = step.recorder.parts, config.training
    return StepCount(
        t.batch_size // t.micro_batch_size,
        parts[phase_of(0)],
        parts[phase_of(1)],
        parts[UPDATE],
        step.recorder.live.peak,
        step.state_bytes,
    )
