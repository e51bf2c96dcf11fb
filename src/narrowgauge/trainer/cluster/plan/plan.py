"""Plans a run before it starts: memory by class, traffic, time and cost.

The memory estimate is that of `train` (`simulate/memory_estimate.py`), so a plan and the run have the same
classes. The time at best and the expected share of it (`estimate.py`) refer to a cluster described by a file
(`cluster_spec.py`). `plan_text.py` prints a plan.

Does a narrow recipe pay? `breakeven` sets its speed against the tokens that buy its loss back.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from narrowgauge.distributed import ParallelDims, resolve_dims
from narrowgauge.forecast import Forecast, Forecaster
from narrowgauge.recipes import Backend, choose_backend, device_facts
from narrowgauge.system.devices import Device, imagine
from narrowgauge.system.units import human_bytes, parse_bytes
from narrowgauge.trainer.cluster.plan.budget import Price
from narrowgauge.trainer.cluster.plan.cluster_spec import Cluster
from narrowgauge.trainer.cluster.plan.estimate import Estimate, estimate
from narrowgauge.trainer.models import count_block_weights, count_parameters
from narrowgauge.trainer.runs import choose_device, lay_out
from narrowgauge.trainer.runs.loop.resolve import room_here
from narrowgauge.trainer.simulate import Memory, Room, StepEstimate, estimate_memory, estimate_step, fitting
from narrowgauge.trainer.simulate.memory import STATE
from narrowgauge.trainer.training import Config
from narrowgauge.trainer.training.config.config import fitting_sizes, next_batch_size

REFERENCE = "bf16"  # the recipe that others are compared with
_GUESS = 0.8  # of the memory in proportion; no step was found to take less of it


@dataclass(frozen=True)
class Fewest:
    """The smallest mesh that fits, and its micro-batch and memory."""

    parallel_dims: ParallelDims
    micro_batch_size: int
    memory: Memory


@dataclass(frozen=True)
class Plan:
    """The facts of a run that are known before it starts.

    Attributes:
        room: the memory available to a step.
        fewest: the smallest number of devices that a step fits on; None if there is none.
        fitting: if it does not fit, the smallest change of options with which it fits on these devices, and
            the memory with them; None if there is none.
        backend: whether the recipe is native on the device; None if the device is unknown.
        gpu: the facts of the device for which memory is counted; None if it is unknown.
        time: the time at best, and the share of it that is expected; None without a cluster.
        chosen: sentences about values that were chosen because the user set none.
    """

    config: Config
    parallel_dims: ParallelDims
    step: StepEstimate
    room: Room
    fewest: Fewest | None
    backend: Backend | None
    gpu: Device | None = None
    time: Estimate | None = None
    cluster: Cluster | None = None
    chosen: tuple[str, ...] = ()
    fitting: tuple[str, Memory] | None = None

    @property
    def copy(self) -> int:
        """Bytes of host memory for the copy of the state that an asynchronous save makes."""
        return self.room.copy(self.step.memory, self.parallel_dims)

    @property
    def reserved(self) -> int:
        """Bytes of the limited memory that no tensor takes: fragmentation, and the driver's context."""
        return self.room.reserved(self.step.memory)

    @property
    def needed(self) -> int:
        """Bytes that a step needs of the limited memory."""
        return self.room.needed(self.step.memory, self.parallel_dims)

    @property
    def fits(self) -> bool:
        """Whether a step fits into the memory."""
        return self.needed <= self.room.limit


def make_plan(
    config: Config,
    devices: int = 1,
    cluster: Cluster | None = None,
    show: Callable[[str], object] = lambda text: None,
) -> Plan:
    """Plan a configuration for a number of devices of a cluster, or of this machine (None).

    `show` is called with a few words before each part, which takes seconds. A `[parallel]` that does not fit
    the devices, and a native matmul that is required and that they lack, are a `UserError`.
    """
    config, batch_choice = _with_batch_size(config, devices)
    layout = lay_out(config, devices)
    config, parallel_dims = layout.config, layout.parallel_dims
    chosen = tuple(filter(None, (batch_choice, layout.choice)))
    room, gpu = room_of(config, cluster), None
    if cluster is not None:
        gpu = cluster.facts
    elif not config.training.memory_limit:  # which represents another machine
        gpu = device_facts(choose_device(config.training.device))
    with imagine(gpu):
        show(f"the memory of a step of {config.model.name} ...")
        step = estimate_step(config, parallel_dims)
        if room.fits(step.memory, parallel_dims) and parallel_dims.data == 1:
            fewest: Fewest | None = Fewest(parallel_dims, config.training.micro_batch_size, step.memory)
        else:
            show("the smallest number of devices that fits ...")
            fewest = fewest_devices(config, parallel_dims, step.memory, room.fits)
        change = None
        if not room.fits(step.memory, parallel_dims):
            show(f"it does not fit into {human_bytes(room.limit)}; the smallest change that fits ...")
            change = fitting(config, lambda m: room.fits(m, parallel_dims), room.has_host, parallel_dims)
    time = backend = None
    if cluster is not None:
        show("the time of a step ...")
        time = estimate(config, parallel_dims, cluster, step)
        backend = time.backend
    elif gpu is not None:
        backend = choose_backend(config.spec.recipe, gpu, config.recipe.backend)
    return Plan(
        *(config, parallel_dims, step, room, fewest, backend, gpu),
        *(time, cluster, chosen, change),
    )


def fewest_devices(
    config: Config,
    parallel_dims: ParallelDims,
    memory: Memory,
    fits: Callable[[Memory, ParallelDims], bool],
) -> Fewest | None:
    """Find the smallest number of devices that a step fits on; None if no number that divides the batch fits.

    The other axes and the batch stay the same; replicas become shards. A process has at least one sequence,
    so a batch of B sequences can be divided over at most B shards, in smaller micro-batches if necessary.
    `memory` is that of a step on this mesh. Shards whose memory, in proportion to it, is far above what fits
    are passed over without an estimate, which takes half a second.
    """
    batch, micro = config.training.batch_size, config.training.micro_batch_size
    # Replicated weights (DDP) in the stages of a pipeline cannot be estimated.
    least = 1 + (parallel_dims.pipeline > 1 and parallel_dims.context > 1)
    for shard in range(least, batch + 1):
        mesh, share = replace(parallel_dims, replicate=1, shard=shard), batch // shard
        if batch % shard or shard % parallel_dims.expert or share < parallel_dims.pipeline:
            continue
        if mesh == parallel_dims and fits(memory, mesh):
            return Fewest(mesh, micro, memory)
        most = min(micro, share // parallel_dims.pipeline)
        size = max(n for n in range(1, most + 1) if share % n == 0)
        ratios = dict.fromkeys(STATE, parallel_dims.shard / shard) | {"whole weights": 1.0}
        guess = {name: int(_GUESS * x * ratios.get(name, size / micro)) for name, x in memory.device.items()}
        if fits(replace(memory, device=guess), mesh):
            found = estimate_memory(config.with_training(micro_batch_size=size), mesh)
            if fits(found, mesh):
                return Fewest(mesh, size, found)
    return None


def room_of(config: Config, cluster: Cluster | None) -> Room:
    """The memory that a step of a configuration may take."""
    if cluster is None:
        return room_here(config, choose_device(config.training.device))
    source = cluster.device or cluster.title
    return Room.of(config, parse_bytes(cluster.memory), source, has_host=cluster.device != "CPU")


def _with_batch_size(config: Config, devices: int) -> tuple[Config, str]:
    """The configuration, with a batch that the devices can share if the user set none; and a sentence about
    it.

    A plan explores numbers of devices. `train` refuses such a batch, since the batch is part of the training.
    """
    t = config.training
    dims = resolve_dims(ParallelDims(**config.parallel.model_dump()), devices)
    sizes = fitting_sizes(t.batch_size, dims)
    if "batch_size" in t.model_fields_set or (sizes if t.fit_micro_batch else t.micro_batch_size in sizes):
        return config, ""
    batch_size = next_batch_size(t, dims)
    return config.with_training(batch_size=batch_size), (
        f"--training.batch_size {batch_size}, which was chosen: the default of {t.batch_size} does not fit "
        f"{devices} devices, and train would refuse it"
    )


def price_of(plan: Plan, asked: Price | None) -> Price | None:
    """The price of a device-hour: the requested one, else the cluster's."""
    return asked or (plan.cluster.price if plan.cluster else None)


def cost_of(plan: Plan, tokens: int, price: Price | None, share: float = 1.0) -> dict[str, float]:
    """Days, device-hours and price of a token budget, at a share of the best speed."""
    assert plan.time is not None
    days = tokens / plan.time.tokens * plan.time.seconds / share / 86400
    hours = days * 24 * plan.parallel_dims.size
    return {"days": days, "device-hours": hours, "price": hours * price.amount if price else 0.0}


def as_json(plan: Plan, tokens: int = 0, asked: Price | None = None) -> dict[str, Any]:
    """The plan as JSON-ready values."""
    room = {name: getattr(plan, name) for name in ("reserved", "needed", "fits", "copy")}
    memory = plan.step.memory.as_json() | {"limit": plan.room.limit} | room
    table: dict[str, Any] = {
        "memory": memory,
        "parameters": plan.step.memory.parameters,
        "devices": plan.parallel_dims.size,
        "fewest_devices": plan.fewest.parallel_dims.size if plan.fewest else None,
        "backend": {"name": plan.backend.name, "reason": plan.backend.reason} if plan.backend else None,
    }
    if plan.config.spec.model.experts:
        table["active_parameters"] = count_parameters(plan.config.spec.model, active=True)
    if plan.fitting is not None:
        table["fits_with"] = {"options": plan.fitting[0], "peak": plan.fitting[1].peak}
    if plan.chosen:
        table["chosen"] = list(plan.chosen)
    if plan.time is None:
        return table
    time, price = plan.time, price_of(plan, asked)
    budget = tokens or plan.config.training.steps * time.tokens
    table["step"] = time.causes._asdict()
    table["step"] |= {
        "seconds": time.seconds,
        "mfu": time.mfu,
        "tokens": time.tokens,
        "format": time.formats[0],
    }
    table["sent"] = [asdict(volume) for volume in time.volumes]
    if time.attention:
        table["attention"] = {"products": time.attention}
    currency = {"currency": price.currency, "device_hour": price.amount} if price else {}
    table["run"] = {"tokens": budget, **cost_of(plan, budget, price), **currency}
    if (e := time.expected) is not None:
        table["expect"] = {
            "share": e.share,
            "least": e.least,
            "most": e.most,
            "seconds": time.seconds_expected,
            "mfu": time.mfu * e.share,
            "runs": [run.model_dump() for run in e.runs],
            **cost_of(plan, budget, price, e.share),
        }
        if e.is_counted:
            table["expect"]["counted"] = {"seconds": time.count.seconds, "speeds": time.count.words}
    return table


@dataclass(frozen=True, slots=True)
class Breakeven:
    """A recipe's speed against its tokens.

    `share` is that of the device-hours for the loss of bf16 in those that bf16 takes: mean, low, high; None
    where the gap is not forecast.
    """

    forecast: Forecast  # of its gap
    speed: float  # its steps in the time of one step of bf16
    share: tuple[float, float, float] | None

    @property
    def word(self) -> str:
        """ "pays", "does not pay", "open" or "not forecast"."""
        if self.share is None:
            return "not forecast"
        _, low, high = self.share
        return "pays" if high < 1 else "does not pay" if low > 1 else "open"

    @property
    def line(self) -> str:
        """The decision for people."""
        name, extra = self.forecast.recipe, self.forecast.extra_tokens_percent
        speed = f"{name} is {self.speed:.2f} times as fast as {REFERENCE}"
        if self.share is None or extra is None:
            return f"{speed}; its loss is not forecast: {self.forecast.refused}"
        says = "it may pay, the forecast does not decide" if self.word == "open" else f"it {self.word}"
        more, least, most = map(_percent, (extra.mean, extra.low, extra.high))
        hours, fewest, longest = map(_times, self.share)
        return (
            f"{speed} and needs {more} more tokens for the same loss ({least} to {most}): {says}; {hours} "
            f"the device-hours of {REFERENCE} ({fewest} to {longest})"
        )

    def as_json(self) -> dict[str, Any]:
        """The decision for programs."""
        share = None
        if self.share is not None:
            named = zip(("mean", "low", "high"), self.share, strict=True)
            share = {name: x if math.isfinite(x) else None for name, x in named}
        return {"word": self.word, "speed": self.speed, "hours": share, "forecast": self.forecast.as_json()}


def breakeven(plan: Plan, tokens: int) -> Breakeven:
    """Set the speed of a plan's recipe against the tokens that buy its loss back; the plan is of a cluster.

        hours = seconds of a step x tokens for the loss of bf16

    A recipe that is s times as fast as bf16 and needs e percent more tokens for the same loss takes (1 + e /
    100) / s of the device-hours. It pays if that is below 1 over the whole interval of the forecast, does
    not if it is above 1 over all of it, and the forecast does not decide otherwise. Both speeds come from the
    plan: counted or measured where it has that, else at best.

    `tokens` is the budget at which the gap is forecast; 0 for the tokens of `training.steps`.
    """
    config, dims, cluster = plan.config, plan.parallel_dims, plan.cluster
    assert cluster is not None
    assert plan.time is not None
    wide = config.model_copy(update={"recipe": type(config.recipe)(name=REFERENCE)})
    with imagine(cluster.facts):
        step = estimate_step(wide, dims)
    speed = estimate(wide, dims, cluster, step).seconds_expected / plan.time.seconds_expected
    budget = tokens or config.training.steps * plan.time.tokens
    size = count_block_weights(config.spec.model)
    forecast = Forecaster().forecast(config.spec.recipe, size, budget, config.recipe.name)
    if (extra := forecast.extra_tokens_percent) is None:
        return Breakeven(forecast, speed, None)
    mean, low, high = ((1 + x / 100) / speed for x in (extra.mean, extra.low, extra.high))
    return Breakeven(forecast, speed, (mean, low, high))


def _percent(x: float) -> str:
    return f"{x:.0f} %" if x < 1e4 else "no number of"


def _times(x: float) -> str:
    return f"{x:.2f} times" if x < 100 else "never"
