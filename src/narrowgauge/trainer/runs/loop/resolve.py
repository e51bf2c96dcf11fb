"""Resolves a configuration into a `Run`: makes every decision before the expensive work starts.

The device, the processes, the micro-batch, native or emulated, whether it fits in memory: each is decided
once, here, and only read afterwards.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from narrowgauge.distributed import ParallelDims
from narrowgauge.nn.self_test import verified_backend
from narrowgauge.recipes import Backend
from narrowgauge.system.errors import UserError
from narrowgauge.system.units import parse_bytes
from narrowgauge.trainer.distributed import World, world_from
from narrowgauge.trainer.runs.loop.check_data import check_vocabulary
from narrowgauge.trainer.runs.loop.default_out import default_out
from narrowgauge.trainer.runs.loop.parallel_dims import lay_out
from narrowgauge.trainer.runs.monitor import hardware
from narrowgauge.trainer.runs.monitor.loggers import require_sinks
from narrowgauge.trainer.runs.monitor.memory_check import require_memory
from narrowgauge.trainer.simulate.memory import Memory
from narrowgauge.trainer.training.config.config import Config, make_config
from narrowgauge.trainer.training.outline import placement
from narrowgauge.trainer.training.step.graph_choice import require_gpu_for_graph


@dataclass(frozen=True)
class Run:
    """A run before its first step; the same on all ranks except for rank and device.

    Attributes:
        config: The configuration, with the micro-batch in use. The run directory stores it.
        path: The run directory.
        world: The processes.
        device: The device of this process.
        parallel_dims: The number of processes along each axis.
        backend: Whether low-precision GEMMs run natively, and why.
        memory: The expected memory of a step, in bytes.
        memory_limit: Bytes that a step may use; 0 for all of the device's memory.
        choice: A sentence about the micro-batch; "" if it is the default or was set.
        placement: A sentence for each layer or block that the recipe treats differently.
        held_out: The number of sequences of a validation.
        prompt: The prompt of the sample at the end; "" for held-out tokens.
    """

    config: Config
    path: Path
    world: World
    device: torch.device
    parallel_dims: ParallelDims
    backend: Backend
    memory: Memory | None
    memory_limit: int
    choice: str
    placement: list[str]
    held_out: int
    prompt: str


def resolve(
    config: Config | Mapping[str, Mapping[str, Any]] | None = None,
    out: Path | str | None = None,
    allow_change: Sequence[str] = (),
) -> Run:
    """Resolve a configuration for this machine and process, and set up the device.

    Args:
        config: A configuration, or nested values for one; None for the embedded default.
        out: The run directory; None for `default_out`.
        allow_change: The keys in which an existing run may differ.

    Raises:
        UserError: The configuration is invalid, or this machine cannot run it.
    """
    config = config if isinstance(config, Config) else make_config(config or {})
    path = Path(out) if out is not None else default_out(config, allow_change)
    device = hardware.choose_device(config.training.device)
    world = world_from(os.environ, torch.cuda.device_count() if device.type == "cuda" else 0)
    if device.type == "cuda" and world.size > 1:
        device = torch.device("cuda", world.device)
    if device.type == "cuda" and config.guard.replay_every and not config.training.deterministic:
        raise UserError(
            "guard.replay_every compares every bit of a step computed twice, and a GPU's attention adds in "
            "another order each time; add --training.deterministic true, or leave it out"
        )
    hardware.use_device(device, config.training.deterministic)
    layout = lay_out(config, world.size, path)
    config, spec = layout.config, layout.config.spec
    require_gpu_for_graph(config, device)
    backend = verified_backend(spec.recipe, device, spec.backend)
    require_sinks(config.log.sinks)
    check_vocabulary(config)
    memory = require_memory(config, device, layout.parallel_dims)
    memory_limit = parse_bytes(config.training.memory_limit)
    hardware.limit_memory(device, memory_limit)
    tokens = config.training.micro_batch_size * config.data.sequence_length
    is_source_text = config.data.source == "stdlib"
    return Run(
        config=config,
        path=path,
        world=world,
        device=device,
        parallel_dims=layout.parallel_dims,
        backend=backend,
        memory=memory,
        memory_limit=memory_limit,
        choice=layout.choice,
        placement=placement(spec.model, spec.recipe, tokens),
        held_out=layout.held_out,
        prompt=config.log.prompt or ("def __init__(self" if is_source_text else ""),
    )
