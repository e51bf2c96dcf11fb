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
    total, has_host = hardware.total_memory(device), device.type != "cpu"  # a CPU's device is its host
    parameters = count_parameters(config.spec.model)

    def too_large(state: float) -> str:
        return (
            f"the model has {parameters:,} parameters, whose state under recipe {config.recipe.name!r} takes "
            f"{human_bytes(int(state))}, and this {device.type} has {human_bytes(total)}"
        )

    share, least = parameters / (parallel_dims.size // parallel_dims.replicate), least_state(config, has_host)
    if share * min(least.values()) > total:  # so no change is tried
        raise UserError(f"{too_large(share * least[''])}; choose a smaller --model")
    with imagine(device_facts(device)):
        memory, room = estimate_memory(config, parallel_dims), room_here(config, device)
        on_host = 0 if has_host else sum(memory.host.values())
        if memory.state + on_host + room.context > total:
            whole = replace(room, limit=total, has_host=has_host)
            raise UserError(f"{too_large(memory.state)}; {_advice(config, whole, parallel_dims)}")
        if (limit := config.training.memory_limit) and not room.fits(memory, parallel_dims):
            raise UserError(
                f"a step is expected to take {human_bytes(room.needed(memory, parallel_dims))} with "
                f"fragmentation, and training.memory_limit is {limit} ({human_bytes(room.limit)}); "
                f"{_advice(config, room, parallel_dims)}"
            )
    return memory


def _advice(config: Config, room: Room, parallel_dims: ParallelDims) -> str:
    options = cheaper(config, room.has_host, parallel_dims)
    options = [(option, m) for option, m in options if room.fits(m, parallel_dims)]
    if not options:
        found = fitting(config, lambda m: room.fits(m, parallel_dims), room.has_host, parallel_dims)
        options = [found] if found else []
    if not options:
        return "no setting and no recipe of narrower state makes it fit: choose a smaller --model"
    needed = [f"{option} ({human_bytes(room.needed(m, parallel_dims))})" for option, m in options]
    return f"it fits with {', or '.join(needed)}"


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
        if parallel_dims.size == 1:  # simulated process groups cannot coexist with real ones
            with suppress(MemoryError, RuntimeError), imagine(device_facts(device)):  # too little to estimate
                lower = [
                    one for one in cheaper(config, has_host=device.type == "cuda") if one[1].peak < plan.peak
                ]
                lower.sort(key=lambda one: one[1].peak)
                advice = ", ".join(f"{human_bytes(m.peak)} with {option}" for option, m in lower) or advice
    return f"{what}; {advice}, or choose a smaller --model, and name a new directory with --out"
