"""Checks before the first step that a run fits in memory, and suggests changes that make it fit."""

from contextlib import suppress
from dataclasses import replace

import torch

from narrowgauge.distributed import ParallelDims
from narrowgauge.recipes import device_facts
from narrowgauge.system.devices import imagine
from narrowgauge.system.errors import UserError
from narrowgauge.system.units import human_bytes
from narrowgauge.trainer.models import count_parameters
from narrowgauge.trainer.runs.monitor import hardware
from narrowgauge.trainer.simulate import ALONE, Memory, Room, cheaper, estimate_memory, fitting
from narrowgauge.trainer.simulate.advice import least_state
from narrowgauge.trainer.training.config.config import Config


def room_here(config: Config, device: torch.device) -> Room:
    """The memory of a device of this machine that a step may take; a limit represents a GPU of another."""
    has_host = device.type != "cpu" or bool(config.training.memory_limit)
    return Room.of(config, hardware.total_memory(device), hardware.device_name(device), has_host)


def require_memory(config: Config, device: torch.device, parallel_dims: ParallelDims = ALONE) -> Memory:
    """Estimate the memory of a run, and refuse one that cannot fit.

    Linux overcommits a CPU's memory, and silently kills a process that uses more than there is.
    """
    parameters = count_parameters(config.spec.model)
    share = parameters / (parallel_dims.size // parallel_dims.replicate)
    state = least_state(config, has_host=device.type != "cpu")
    available = hardware.total_memory(device)
    if share * min(state.values()) > available:  # so no change is tried
        raise UserError(
            f"{_too_large(config, parameters, share * state[''], device)}; choose a smaller --model"
        )
    with imagine(device_facts(device)):
        return _require_fit(config, device, parallel_dims, available)


def _require_fit(config: Config, device: torch.device, parallel_dims: ParallelDims, available: int) -> Memory:
    memory, parameters = estimate_memory(config, parallel_dims), count_parameters(config.spec.model)
    room, limit = room_here(config, device), config.training.memory_limit
    on_host = 0 if device.type != "cpu" else sum(memory.host.values())  # a CPU's device is its host
    if memory.state + on_host + room.context > available:
        whole = replace(room, limit=available, has_host=device.type != "cpu")
        advice = _advice(config, whole, parallel_dims)
        raise UserError(f"{_too_large(config, parameters, memory.state, device)}; {advice}")
    if limit and not room.fits(memory, parallel_dims):
        raise UserError(
            f"a step is expected to take {human_bytes(room.needed(memory, parallel_dims))} with "
            f"fragmentation, and training.memory_limit is {limit} ({human_bytes(room.limit)}); "
            f"{_advice(config, room, parallel_dims)}"
        )
    return memory


def _too_large(config: Config, parameters: int, state: float, device: torch.device) -> str:
    return (
        f"the model has {parameters:,} parameters, whose state under recipe {config.recipe.name!r} takes "
        f"{human_bytes(int(state))}, and this {device.type} has {human_bytes(hardware.total_memory(device))}"
    )


def _advice(config: Config, room: Room, parallel_dims: ParallelDims) -> str:
    def needed(memory: Memory) -> str:
        return human_bytes(room.needed(memory, parallel_dims))

    options = [
        f"{option} ({needed(m)})"
        for option, m in cheaper(config, room.has_host, parallel_dims)
        if room.fits(m, parallel_dims)
    ]
    if options:
        return "it fits with " + ", or ".join(options)
    if found := fitting(config, lambda m: room.fits(m, parallel_dims), room.has_host, parallel_dims):
        return f"it fits with {found[0]} ({needed(found[1])})"
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
        what += f"; a step is expected to take {human_bytes(plan.peak)} ({plan.classes()})"
        room = room_here(config, device)
        if reserved := room.reserved(plan):
            what += (
                f", and {human_bytes(reserved)} for fragmentation and the driver's context, of "
                f"{human_bytes(room.limit)}"
            )
        what += ", excluding the program itself and the data"
        if options := _cheaper_options(config, device, plan, parallel_dims):
            advice = ", ".join(f"{human_bytes(memory.peak)} with {option}" for option, memory in options)
    return f"{what}; {advice}, or choose a smaller --model, and name a new directory with --out"


def _cheaper_options(
    config: Config, device: torch.device, plan: Memory, parallel_dims: ParallelDims
) -> list[tuple[str, Memory]]:
    """Options with a lower expected peak; empty if there is not enough memory for the estimate."""
    if parallel_dims.size > 1:  # simulated process groups cannot coexist with real ones
        return []
    with suppress(MemoryError, RuntimeError), imagine(device_facts(device)):
        options = cheaper(config, has_host=device.type == "cuda")
        return sorted((o for o in options if o[1].peak < plan.peak), key=lambda o: o[1].peak)
    return []
