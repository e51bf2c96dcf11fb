"""The objects of a run that stay the same from the first step to the last."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from narrowgauge.nn import DTYPES
from narrowgauge.trainer.data import Dataset
from narrowgauge.trainer.distributed import Coordinator
from narrowgauge.trainer.models import count_parameters, flops_per_token
from narrowgauge.trainer.runs.loop.checkpointing import Checkpointer
from narrowgauge.trainer.runs.loop.resolve import Run
from narrowgauge.trainer.runs.loop.run_writer import RunWriter
from narrowgauge.trainer.runs.monitor import hardware, yardstick
from narrowgauge.trainer.runs.monitor.arithmetic import NO_CHOICE, Arithmetic
from narrowgauge.trainer.runs.monitor.profiler import Profile
from narrowgauge.trainer.runs.monitor.progress import Display


@dataclass(frozen=True)
class RunContext:
    """The objects that every function around a step needs, in addition to the `Trainer`."""

    run: Run
    dataset: Dataset
    directory: RunWriter
    display: Display
    coordinator: Coordinator
    checkpointer: Checkpointer
    run_id: str  # the id that a checkpoint must have to be resumed
    profile: Profile | None  # the profile of some steps, if requested
    arithmetic: Arithmetic = NO_CHOICE  # of a CPU

    @cached_property
    def facts(self) -> dict[str, Any]:
        """The facts about the run that its start and resume events record."""
        run, config = self.run, self.run.config
        peak = yardstick.Yardstick(None, "")
        if self.coordinator.rank == 0:  # it records for all; simultaneous measurements would slow each other
            peak = yardstick.yardstick(run.device, DTYPES[config.spec.recipe.compute])
        return {
            "recipe": config.spec.recipe.name,
            "backend": run.backend.name,
            "backend_reason": run.backend.reason,
            "placement": run.placement,
            "device": hardware.device_name(run.device),
            **self.arithmetic.facts,
            "threads": torch.get_num_threads(),
            "processes": self.coordinator.size,
            "torch": torch.__version__,
            "parameters": count_parameters(config.spec.model),
            "flops_per_token": flops_per_token(config.spec.model, config.data.sequence_length),
            "peak_flops": peak.flops,
            "peak_source": peak.source,
            "corpus": self.dataset.digest,
        }
