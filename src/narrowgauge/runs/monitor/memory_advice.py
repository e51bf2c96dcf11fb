"""Checks before the first step that a run fits in memory, and names the changes that make it fit."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from narrowgauge.devices import imagine
from narrowgauge.distributed import ParallelDims
from narrowgauge.errors import UserError
from narrowgauge.models import count_parameters
from narrowgauge.recipes import device_facts
from narrowgauge.runs.monitor import hardware
from narrowgauge.runs.monitor.memory import Memory
from narrowgauge.runs.monitor.memory_estimate import ALONE, estimate_memory
from narrowgauge.training.config.config import Config, make_config
from narrowgauge.units import human_bytes, parse_bytes


def require_memory(config: Config, device: torch.device, parallel_dims: ParallelDims = ALONE) -> Memory:
    """Estimate the memory of a run, and refuse one that cannot fit.

    Linux overcommits a CPU's memory, and kills a process that uses more than there is without a message.

    Raises:
        UserError: the state alone is larger than the device's memory, or the step than `memory_limit`.
    """
    available, parameters = hardware.total_memory(device), count_parameters(config.spec.model)
    least = parameters * _least_bytes(config) / (parallel_dims.size // parallel_dims.replicate)
    if least > available:  # too large even for the estimate
        raise UserError(f"{_too_large(config, parameters, least, device)}; choose a smaller --model")
    with imagine(device_facts(device)):
        return _require_fit(config, device, parallel_dims, available)


def _require_fit(config: Config, device: torch.device, parallel_dims: ParallelDims, available: int) -> Memory:
    memory, parameters = estimate_memory(config, parallel_dims), count_parameters(config.spec.model)
    on_host = 0 if device.type != "cpu" else sum(memory.host.values())  # a CPU's device is its host
    if memory.state + on_host > available:
        advice = _advice(config, available, device.type != "cpu", parallel_dims)
        raise UserError(f"{_too_large(config, parameters, memory.state, device)}; {advice}")
    limit = parse_bytes(config.training.memory_limit)
    if limit and memory.peak > limit:
        raise UserError(
            f"a step is expected to take {human_bytes(memory.peak)}, and training.memory_limit is "
            f"{config.training.memory_limit} ({human_bytes(limit)}); "
            f"{_advice(config, limit, True, parallel_dims)}"
        )
    return memory


def _least_bytes(config: Config) -> float:
    """Lower bound of the device's bytes of state per parameter."""
    recipe = config.spec.recipe
    kept = (c for place, c in recipe.state.items() if c is not None and place not in recipe.offload)
    return sum(c.element.bits / 8 for c in kept)


def _too_large(config: Config, parameters: int, state: float, device: torch.device) -> str:
    return (
        f"the model has {parameters:,} parameters, whose state under recipe {config.recipe.name!r} takes "
        f"{human_bytes(int(state))}, and this {device.type} has {human_bytes(hardware.total_memory(device))}"
    )


def _advice(config: Config, limit: int, has_host: bool, parallel_dims: ParallelDims) -> str:
    options = [
        f"{option} ({human_bytes(m.peak)})"
        for option, m in cheaper(config, has_host, parallel_dims)
        if m.peak <= limit
    ]
    if options:
        return "it fits with " + ", or ".join(options)
    if found := fitting(config, lambda memory: memory.peak <= limit, has_host, parallel_dims):
        return f"it fits with {found[0]} ({human_bytes(found[1].peak)})"
    return "no setting and no recipe of narrower state makes it fit: choose a smaller --model"


def out_of_memory_message(
    config: Config, device: torch.device, plan: Memory | None, parallel_dims: ParallelDims
) -> str:
    """The expected memory of a step, and the changes that lower it, the largest gain first."""
    what = f"out of memory on {hardware.device_name(device)}"
    advice = (
        f"lower training.micro_batch_size = {config.training.micro_batch_size}, set --training.recompute true"
    )
    if plan is not None:
        what += (
            f"; a step is expected to take {human_bytes(plan.peak)} ({plan.classes()}), beside the program "
            "itself and the data"
        )
        if options := _cheaper_options(config, device, plan, parallel_dims):
            advice = ", ".join(f"{human_bytes(memory.peak)} with {option}" for option, memory in options)
    return f"{what}; {advice}, or choose a smaller --model, and name a new directory with --out"


def _cheaper_options(
    config: Config, device: torch.device, plan: Memory, parallel_dims: ParallelDims
) -> list[tuple[str, Memory]]:
    """Options with a lower expected peak; empty if memory does not suffice for the estimate."""
    if parallel_dims.size > 1:  # simulated process groups cannot coexist with real ones
        return []
    with suppress(MemoryError, RuntimeError), imagine(device_facts(device)):
        options = cheaper(config, has_host=device.type == "cuda")
        return sorted((o for o in options if o[1].peak < plan.peak), key=lambda o: o[1].peak)
    return []


@dataclass
class _Change:
    options: str  # of the command line
    values: dict[str, dict[str, Any]] = field(default_factory=dict)
    parallel_dims: ParallelDims | None = None


def cheaper(
    config: Config, has_host: bool = True, parallel_dims: ParallelDims = ALONE, wider: bool = False
) -> list[tuple[str, Memory]]:
    """Changes that lower the peak: each alone, then all together.

    Args:
        config: the configuration to change.
        has_host: whether the host's memory is separate from the device's.
        parallel_dims: the mesh of the run.
        wider: also try other meshes and recipes.

    Returns:
        Pairs of command line options and the memory that is expected with them.
    """
    changes = _settings(config, has_host)
    if len(changes) > 1:
        together = _Change(" ".join(c.options for c in changes))
        for change in changes:
            for section, values in change.values.items():
                together.values[section] = together.values.get(section, {}) | values
        changes.append(together)
    if not config.training.recompute:
        changes.append(_Change("--training.recompute selective", {"training": {"recompute": "selective"}}))
    if wider:
        changes += _wider(config, parallel_dims)
    return [
        (c.options, estimate_memory(_changed(config, c.values), c.parallel_dims or parallel_dims))
        for c in changes
    ]


def fitting(
    config: Config,
    fits: Callable[[Memory], bool],
    has_host: bool = True,
    parallel_dims: ParallelDims = ALONE,
) -> tuple[str, Memory] | None:
    """The least change with which a step fits: settings before recipes, those that cost less time first.

    Settings are added until it fits, and those that it then fits without are left out. Only where all of them
    together do not suffice, the recipe is another one, of narrower state.

    Args:
        config: the configuration to change.
        fits: whether a step's memory fits.
        has_host: whether the host's memory is separate from the device's.
        parallel_dims: the mesh of the run.

    Returns:
        Command line options and the memory that is expected with them; None if nothing makes it fit.
    """

    def tried(changes: Sequence[_Change]) -> tuple[str, Memory]:
        values: dict[str, dict[str, Any]] = {}
        for change in changes:
            for section, of_section in change.values.items():
                values[section] = values.get(section, {}) | of_section
        memory = estimate_memory(_changed(config, values), parallel_dims)
        return " ".join(change.options for change in changes), memory

    settings = _settings(config, has_host)
    for recipe in [[], *([change] for change in _narrower_recipes(config))]:
        if not fits(tried([*settings, *recipe])[1]):
            continue
        needed = list(settings)
        for change in reversed(settings):  # the dearest first
            fewer = [c for c in needed if c is not change]
            if fits(tried([*fewer, *recipe])[1]):
                needed = fewer
        return tried([*recipe, *needed])
    return None


def _settings(config: Config, has_host: bool) -> list[_Change]:
    """The settings that lower the peak, the one that costs least time first."""
    changes = []
    if not config.training.chunked_loss:
        changes.append(_Change("--training.chunked_loss true", {"training": {"chunked_loss": True}}))
    if config.training.micro_batch_size > 1:
        changes.append(_Change("--training.micro_batch_size 1", {"training": {"micro_batch_size": 1}}))
    if config.training.recompute is not True:
        changes.append(_Change("--training.recompute true", {"training": {"recompute": True}}))
    if has_host and not config.spec.recipe.offload:
        options = "--recipe.offload master,grad,m,v"
        changes.append(_Change(options, {"recipe": {"offload": "master,grad,m,v"}}))
    return changes


def _narrower_recipes(config: Config) -> list[_Change]:
    """Recipes of narrower state, the widest first; none where the user changed places of the recipe."""
    own = config.spec.recipe.state
    if own["m"] is None or config.recipe.places:
        return []
    if any(c.element.bits < 32 for c in own.values() if c is not None):
        return []
    return [_Change(f"--recipe {name}", {"recipe": {"name": name}}) for name in ("msamp-o2", "msamp-o3")]


def _wider(config: Config, parallel_dims: ParallelDims) -> list[_Change]:
    """Other meshes of the same processes, twice as many processes, narrower state."""
    changes = []
    if parallel_dims.shard > 1 and parallel_dims.zero < 3:
        changes.append(_Change("--parallel.zero 3", parallel_dims=replace(parallel_dims, zero=3)))
    if parallel_dims.replicate > 1:
        options = f"--parallel.replicate 1 --parallel.shard {parallel_dims.data}"
        changes.append(
            _Change(options, parallel_dims=replace(parallel_dims, replicate=1, shard=parallel_dims.data))
        )
    twice = replace(parallel_dims, shard=2 * parallel_dims.shard)
    if config.training.batch_size % (twice.data * config.training.micro_batch_size) == 0:
        options = f"--devices {twice.size} --parallel.shard {twice.shard}"
        changes.append(_Change(options, parallel_dims=twice))
    return changes + _narrower_recipes(config)[-1:]  # the narrowest


def _changed(config: Config, values: dict[str, dict[str, Any]]) -> Config:
    tables = config.model_dump()
    tables["recipe"] |= tables["recipe"].pop("places")
    for section, changes in values.items():
        tables[section] |= changes
    return make_config(tables)
