"""The count of a step on a GPU: totals of a micro-batch and of the update, and the largest sinks.

The step has three micro-batches and the update, and the second micro-batch is reported: allocations that are
made once are behind it, and gradients exist.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from narrowgauge.devices import Device
from narrowgauge.errors import UserError
from narrowgauge.recipes import choose_backend
from narrowgauge.simulate.recorder import Event
from narrowgauge.simulate.speeds import FUNCTION_S, H200, LAUNCH_S, Speeds
from narrowgauge.simulate.step import UPDATE, phase_of, simulate_step
from narrowgauge.training import Config

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
    def of(cls, events: Sequence[Event], functions: int, waits: int, speeds: Speeds) -> "Total":
        """The total of events at given speeds."""
        times = [(e, speeds.seconds(e.cost)) for e in events]
        attention = sum(s for e, s in times if e.cost.kind.startswith("attention"))
        return cls(
            sum(e.cost.launches for e in events),
            functions,
            waits,
            sum(e.cost.bytes for e in events),
            sum(e.cost.flops for e in events),
            sum(s for _, s in times),
            sum(s for e, s in times if e.cost.flops) - attention,
            attention,
            sum(s for e, s in times if e.is_cast),
        )

    def as_json(self) -> dict[str, Any]:
        """The figures as JSON values."""
        return vars(self) | {"host_seconds": self.host_seconds}


@dataclass(frozen=True)
class Sink:
    """A place where time goes: one operation in one function of the program, in a micro-batch."""

    site: str
    name: str
    launches: int
    bytes: int
    seconds: float


@dataclass(frozen=True)
class Held:
    """Memory that is alive at the peak: made by one operation in one function of the program."""

    site: str
    name: str
    bytes: int


@dataclass(frozen=True)
class StepCount:
    """What a step costs on an imagined GPU.

    Attributes:
        gpu: the facts of the GPU, as words.
        backend: whether the recipe is native there.
        tokens: tokens of a micro-batch.
        micro_batches: micro-batches of a step.
        micro: events of one micro-batch that is neither the first nor the last.
        update: events of clipping, the update and what follows.
        functions: calls of Python autograd functions in a micro-batch.
        waits: (place, times) at which the host waits in a micro-batch.
        update_waits: the number of waits in the update.
        peak_bytes: the most bytes that are alive.
        held: those bytes by (place, operation) that made them.
        speeds: the speeds that seconds are told by.
    """

    gpu: str
    backend: str
    tokens: int
    micro_batches: int
    micro: Sequence[Event]
    update: Sequence[Event]
    functions: int
    waits: Sequence[tuple[str, int]]
    update_waits: int
    peak_bytes: int
    held: Mapping[tuple[str, str], int]
    speeds: Speeds

    def micro_batch(self, calibrated: bool = False, at: Speeds | None = None) -> Total:
        """The total of a micro-batch, at the count's speeds or at others."""
        waits = sum(times for _, times in self.waits)
        return Total.of(self.micro, self.functions, waits, at or self._speeds(calibrated))

    def of_update(self, calibrated: bool = False) -> Total:
        """The total of the update."""
        return Total.of(self.update, 0, self.update_waits, self._speeds(calibrated))

    def step_seconds(self, calibrated: bool = False) -> float:
        """The seconds of a step."""
        micro = self.micro_batch(calibrated).step_seconds
        return self.micro_batches * micro + self.of_update(calibrated).step_seconds

    def tokens_per_s(self, calibrated: bool = False) -> float:
        """Tokens a second."""
        return self.micro_batches * self.tokens / self.step_seconds(calibrated)

    def sinks(self) -> list[Sink]:
        """The places where a micro-batch's time goes at calibrated speeds, the largest first."""
        speeds = self._speeds(calibrated=True)
        groups: dict[tuple[str, str], list[Event]] = {}
        for event in self.micro:
            groups.setdefault((event.site, event.name), []).append(event)
        totals = {key: Total.of(events, 0, 0, speeds) for key, events in groups.items()}
        found = [Sink(*key, t.launches, t.bytes, t.seconds) for key, t in totals.items()]
        return sorted(found, key=lambda sink: -sink.seconds)

    def largest_held(self) -> list[Held]:
        """What is alive at the peak, the largest first."""
        found = [Held(*maker, size) for maker, size in self.held.items() if size]
        return sorted(found, key=lambda held: -held.bytes)

    def _speeds(self, calibrated: bool) -> Speeds:
        return self.speeds.calibrated() if calibrated else self.speeds

    def as_json(self) -> dict[str, Any]:
        """All figures as JSON values; seconds at the speeds as they are, and calibrated."""
        at = {"at_speeds": False, "calibrated": True}
        return {
            "gpu": self.gpu,
            "backend": self.backend,
            "speeds": self.speeds.words,
            "tokens": self.tokens,
            "micro_batches": self.micro_batches,
            "peak_bytes": self.peak_bytes,
            "held_at_peak": [vars(held) for held in self.largest_held()],
            "micro_batch": {name: self.micro_batch(c).as_json() for name, c in at.items()},
            "update": {name: self.of_update(c).as_json() for name, c in at.items()},
            "step_seconds": {name: self.step_seconds(c) for name, c in at.items()},
            "tokens_per_s": {name: self.tokens_per_s(c) for name, c in at.items()},
            "waits": [{"place": place, "times": times} for place, times in self.waits],
            "sinks": [vars(sink) for sink in self.sinks()],
        }


def count_step(config: Config, facts: Device, speeds: Speeds = H200) -> StepCount:
    """Count what a step costs on a GPU, on any machine.

    Args:
        config: the model, its recipe, its micro-batch; one process.
        facts: the facts of the GPU.
        speeds: the speeds that turn work into seconds.

    Returns:
        The count. State that is kept in the host's memory is not moved in it.

    Raises:
        UserError: it is no GPU, the recipe asks for native products that
            it does not have, or the step is compiled.
    """
    if not facts.is_gpu:
        raise UserError(f"a step is counted for a GPU, not for {facts}; name one, such as h200")
    if config.training.compile:
        raise UserError(
            "a compiled step is not counted, because torch's compiler makes kernels of its own; leave "
            "training.compile out"
        )
    backend = choose_backend(config.spec.recipe, facts, config.spec.backend)
    step = simulate_step(config, _MICRO_BATCHES, count_on=facts)
    recorder, counted = step.recorder, phase_of(1)
    t = config.training
    return StepCount(
        str(facts),
        backend.name,
        step.tokens,
        t.batch_size // t.micro_batch_size,
        [e for e in recorder.events if e.phase == counted],
        [e for e in recorder.events if e.phase == UPDATE],
        recorder.functions[counted],
        [(place, n) for (phase, place), n in recorder.waits.most_common() if phase == counted],
        sum(n for (phase, _), n in recorder.waits.items() if phase == UPDATE),
        recorder.live.peak,
        recorder.live.held_at_peak(),
        speeds,
    )
