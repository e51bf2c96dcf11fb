"""The objects of a run that stay the same from its first step to its last; and its origin: when, where, with
which version and command line.
"""

import platform
import shlex
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from narrowgauge.nn import DTYPES
from narrowgauge.trainer.data import Dataset
from narrowgauge.trainer.distributed import Coordinator
from narrowgauge.trainer.models import count_parameters, flops_per_token
from narrowgauge.trainer.runs.loop.checkpointing import Checkpointer
from narrowgauge.trainer.runs.loop.resolve import Run
from narrowgauge.trainer.runs.monitor import hardware, yardstick
from narrowgauge.trainer.runs.monitor.arithmetic import NO_CHOICE, Arithmetic
from narrowgauge.trainer.runs.monitor.profiler import Profile
from narrowgauge.trainer.runs.monitor.progress import Display
from narrowgauge.trainer.runs.run_directory import RunWriter


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


def now() -> str:
    """The time in UTC to the second, such as 2026-11-22T07:30:00+00:00."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def command_line() -> str:
    """The command line of this process as one would type it, or that of a script with a custom loop."""
    program, *words = sys.argv or [""]
    name = "narrowgauge" if Path(program).name in ("__main__.py", "-m") else Path(program).name
    return shlex.join([name, *words])


def provenance() -> dict[str, str]:
    """The facts about a run's origin in its start and resume events."""
    try:
        installed = version("narrowgauge")
    except PackageNotFoundError:  # imported from source without being installed
        installed = "from source"
    return {"time": now(), "host": platform.node(), "version": installed, "command": command_line()}
