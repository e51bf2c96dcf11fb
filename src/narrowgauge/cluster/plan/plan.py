"""Plans a run before it starts: memory by class, traffic, time and cost.

The memory estimate is the one of `train` (`training/monitor/memory_estimate.py`), so a plan and the run have
the same classes. The time is a lower bound (`estimate.py`) for a cluster that a file describes
(`cluster_spec.py`).
"""

from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from narrowgauge.cluster.plan.cluster_spec import Cluster
from narrowgauge.cluster.plan.estimate import Estimate, cost, estimate
from narrowgauge.distributed import ParallelDims, resolve_dims
from narrowgauge.errors import UserError
from narrowgauge.training import (
    Config,
    Memory,
    StepEstimate,
    cheaper,
    choose_device,
    estimate_step,
    lay_out,
)
from narrowgauge.training.config.micro_batch import fitting_sizes, next_batch_size
from narrowgauge.training.monitor.hardware import device_name, total_memory
from narrowgauge.units import human_bytes, parse_bytes


@dataclass(frozen=True)
class Plan:
    """The facts of a run that are known before it starts.

    Attributes:
        limit: bytes of memory per device.
        limit_source: the device or setting that the limit comes from.
        has_host: whether the host's memory is separate from the device's.
        copy: bytes in the host's memory of the state that an asynchronous save copies.
        time: the time estimate; None without a cluster.
        chosen: sentences about values that were chosen where the user gave none.
    """

    config: Config
    parallel_dims: ParallelDims
    step: StepEstimate
    limit: int
    limit_source: str
    has_host: bool
    copy: int
    time: Estimate | None
    cluster: Cluster | None
    chosen: tuple[str, ...] = ()

    @property
    def needed(self) -> int:
        """Bytes that a step needs of the limited memory."""
        return on_device(self.step.memory, self.has_host) + (0 if self.has_host else self.copy)

    @property
    def fits(self) -> bool:
        """Whether a step fits into the memory."""
        return self.needed <= self.limit


def on_device(memory: Memory, has_host: bool) -> int:
    """Peak bytes of the device; without a separate host this includes the host's state."""
    return memory.peak + (0 if has_host else sum(memory.host.values()))


def make_plan(config: Config, devices: int = 1, cluster: Cluster | None = None) -> Plan:
    """Plan a configuration on a number of devices.

    Raises:
        UserError: `[parallel]` does not fit the number of devices.
    """
    config, batch_choice = _with_batch_size(config, devices)
    layout = lay_out(config, devices)
    config, parallel_dims = layout.config, layout.parallel_dims
    t = config.training
    step = estimate_step(config, parallel_dims)
    if cluster is not None:
        limit, limit_source = cluster.memory_bytes, cluster.device or cluster.title
        has_host = cluster.device != "CPU"
    else:
        device = choose_device(t.device)
        limit, limit_source = total_memory(device), device_name(device)
        has_host = device.type != "cpu" or bool(t.memory_limit)  # a limit stands for a GPU of another machine
    if t.memory_limit:
        limit, limit_source = parse_bytes(t.memory_limit), f"training.memory_limit {t.memory_limit}"
    time = None if cluster is None else estimate(config, parallel_dims, cluster, step)
    copy = copy_of_save(step.memory, parallel_dims) if config.checkpoint.asynchronous else 0
    chosen = tuple(filter(None, (batch_choice, layout.choice)))
    return Plan(config, parallel_dims, step, limit, limit_source, has_host, copy, time, cluster, chosen)


def _with_batch_size(config: Config, devices: int) -> tuple[Config, str]:
    """The configuration with a batch that the devices can share, where the user gave none; and a sentence.

    A plan asks what a number of devices would do. `train` refuses such a batch: it is part of the training.
    """
    t = config.training
    dims = resolve_dims(ParallelDims(**config.parallel.model_dump()), devices)
    sizes = fitting_sizes(t.batch_size, dims)
    if "batch_size" in t.model_fields_set or (sizes if t.fit_micro_batch else t.micro_batch_size in sizes):
        return config, ""
    batch_size = next_batch_size(t, dims)
    training = t.model_copy(update={"batch_size": batch_size})
    return config.model_copy(update={"training": training}), (
        f"--training.batch_size {batch_size}, which was chosen: the default of {t.batch_size} does not fit "
        f"{devices} devices, and train would refuse it"
    )


def copy_of_save(memory: Memory, parallel_dims: ParallelDims) -> int:
    """Bytes that a process copies for an asynchronous save; replicas divide the state among them."""
    kept = sum(memory.device[name] for name in ("weights", "master", "m", "v"))
    kept += sum(size for name, size in memory.host.items() if name != "gradients")
    copies = 1 if parallel_dims.is_sharded else parallel_dims.shard * parallel_dims.context
    return kept // (parallel_dims.replicate * copies)


def tokens_of(text: str) -> int:
    """Parse a token budget such as 300B, 1T or 1.5e12.

    Raises:
        UserError: the text is not a number of at least 1.
    """
    units = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
    digits, unit = (text[:-1], units[text[-1].upper()]) if text[-1:].upper() in units else (text, 1.0)
    try:
        number = float(digits) * unit
    except ValueError:
        number = 0.0
    if not 1 <= number < 1e18:
        raise UserError(f"--tokens {text!r}: it must be a number such as 300B, 1T or 1.5e12")
    return int(number)


def print_plan(plan: Plan, console: Console, tokens: int = 0, price: float | None = None) -> None:
    """Print a plan, and the options that lower its memory."""
    _print_memory(plan, console)
    if plan.time is not None and plan.cluster is not None:
        _print_time(plan, plan.time, console)
        budget = tokens or plan.config.training.steps * plan.time.tokens
        total = cost(
            plan.time, plan.parallel_dims.size, budget, plan.cluster.price if price is None else price
        )
        line = f"{budget:.4g} tokens: {total['days']:,.1f} days, {total['device-hours']:,.0f} device-hours"
        line += f", price {total['price']:,.0f}" if total["price"] else ""
        console.print(line, highlight=False)


def _print_memory(plan: Plan, console: Console) -> None:
    memory, t = plan.step.memory, plan.config.training
    table = Table(box=None, header_style="bold")
    table.add_column("class")
    for column in ("bytes a parameter", "device", "host"):
        table.add_column(column, justify="right")
    for name, size in memory.device.items():
        on_host = memory.host.get(name, 0)
        share = (size + on_host) / memory.parameters
        table.add_row(name, f"{share:.2f}", human_bytes(size), human_bytes(on_host) if on_host else "")
    if plan.copy:
        table.add_row("copy of a save", "", "", human_bytes(plan.copy))
    total = sum(memory.host.values()) + plan.copy
    table.add_row("together", "", human_bytes(memory.peak), human_bytes(total) if total else "", style="bold")
    devices = plan.parallel_dims.size
    several = f" on {devices} devices ({plan.parallel_dims.text})" if devices > 1 else ""
    console.print(
        f"{plan.config.model.name}, {memory.parameters:,} parameters, recipe {plan.config.recipe.name}: "
        f"micro-batches of {t.micro_batch_size} x {plan.config.data.sequence_length} tokens{several}",
        highlight=False,
        soft_wrap=True,
    )
    for sentence in plan.chosen:
        console.print(sentence, highlight=False, soft_wrap=True)
    console.print(table)
    fits = "fits" if plan.fits else "does not fit"
    console.print(
        f"{fits}: {human_bytes(plan.needed)} of {human_bytes(plan.limit)} ({plan.limit_source})",
        highlight=False,
    )
    options = cheaper(plan.config, plan.has_host, plan.parallel_dims, wider=not plan.fits)
    for option, other in sorted(options, key=lambda item: item[1].peak):
        if other.peak > 0.99 * memory.peak:  # it would not be noticed
            continue
        note = "" if other.peak <= plan.limit else ", which does not fit either"
        console.print(
            f"with {option}: {human_bytes(other.peak)}{note}", highlight=False, markup=False, soft_wrap=True
        )


def _print_time(plan: Plan, time: Estimate, console: Console) -> None:
    assert plan.cluster is not None
    table = Table(box=None, header_style="bold")
    table.add_column("sent by a device, a step")
    for column in ("ranks", "inside a node", "between nodes", "seconds"):
        table.add_column(column, justify="right")
    for v in time.volumes:
        sizes = [human_bytes(size) if size else "" for size in (v.inside, v.between)]
        table.add_row(v.purpose, str(v.ranks), *sizes, f"{v.seconds:.3g}")
    if time.volumes:
        console.print(table)
    parts = {
        f"products ({time.format})": time.products,
        "passes over memory": time.passes,
        "update": time.update,
        "waiting for links": time.waiting,
        "pipeline": time.bubble,
    }
    causes = " + ".join(f"{name} {size:.3g}" for name, size in parts.items() if size)
    speed, devices = time.tokens / time.seconds, plan.parallel_dims.size
    console.print(
        f"a step of {time.tokens:,} tokens: {time.seconds:.3g} s at best ({causes}), {speed:,.0f} tokens/s, "
        f"{speed / devices:,.0f} for each of {devices}, MFU {100 * time.mfu:.1f} %",
        highlight=False,
        soft_wrap=True,
    )


def as_json(plan: Plan, tokens: int = 0, price: float | None = None) -> dict[str, Any]:
    """The plan as JSON-ready values."""
    table: dict[str, Any] = {
        "memory": plan.step.memory.as_json() | {"limit": plan.limit, "fits": plan.fits, "copy": plan.copy},
        "parameters": plan.step.memory.parameters,
        "devices": plan.parallel_dims.size,
    }
    if plan.chosen:
        table["chosen"] = list(plan.chosen)
    if plan.time is not None and plan.cluster is not None:
        time = plan.time
        device_price = plan.cluster.price if price is None else price
        budget = tokens or plan.config.training.steps * time.tokens
        parts = ("products", "passes", "update", "waiting", "bubble", "seconds", "mfu", "tokens", "format")
        table["step"] = {name: getattr(time, name) for name in parts}
        table["sent"] = [
            {key: getattr(v, key) for key in ("purpose", "ranks", "inside", "between", "seconds")}
            for v in time.volumes
        ]
        table["run"] = {"tokens": budget, **cost(time, plan.parallel_dims.size, budget, device_price)}
    return table
