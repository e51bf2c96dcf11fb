"""The objects of a run that stay the same from the first step to the last."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from narrowgauge.data import Dataset
from narrowgauge.distributed import Coordinator
from narrowgauge.models import count_parameters, flops_per_token
from narrowgauge.nn import DTYPES
from narrowgauge.nn.self_test import verified_backend
from narrowgauge.runs.loop.checkpointing import Checkpointer
from narrowgauge.runs.loop.run_writer import RunWriter
from narrowgauge.runs.monitor import hardware, yardstick
from narrowgauge.runs.monitor.placement import placement
from narrowgauge.runs.monitor.profiler import Profile
from narrowgauge.runs.monitor.progress import Display
from narrowgauge.simulate.memory import Memory
from narrowgauge.training.config.config import Config


@dataclass(frozen=True)
class RunContext:
    """The objects that every function around a step needs, besides the `Trainer`."""

    config: Config
    device: torch.device
    dataset: Dataset
    directory: RunWriter
    display: Display
    plan: Memory | None  # the expected memory of one process
    coordinator: Coordinator
    checkpointer: Checkpointer
    run_id: str  # the id that a checkpoint must have to be resumed
    profile: Profile | None  # the profile of some steps, if requested
    products: str = ""  # in which precision a CPU multiplies: "bf16" or "fp32"; "" on a GPU

    @cached_property
    def facts(self) -> dict[str, Any]:
        """The facts about the run that its start and resume events record."""
        config, recipe, model = self.config, self.config.spec.recipe, self.config.spec.model
        backend = verified_backend(recipe, self.device, config.spec.backend)
        peak = yardstick.Yardstick(None, "")
        if self.coordinator.rank == 0:  # it records for all, and two that measure at once slow each other
            peak = yardstick.yardstick(self.device, DTYPES[recipe.compute])
        return {
            "recipe": recipe.name,
            "backend": backend.name,
            "backend_reason": backend.reason,
            "placement": placement(config),
            "device": hardware.device_name(self.device),
            **({"products": self.products} if self.products else {}),
            "threads": torch.get_num_threads(),
            "processes": self.coordinator.size,
            "torch": torch.__version__,
            "parameters": count_parameters(model),
            "flops_per_token": flops_per_token(model, config.data.sequence_length),
            "peak_flops": peak.flops,
            "peak_source": peak.source,
            "corpus": self.dataset.digest,
        }
