"""What a run is expected to take is worked out once a session for each kind of step.

A run begins with a step on the meta device (`simulate.memory_estimate`), which takes longer than the
steps of a tiny run. It is a function of the model, the recipe, the batch and the mesh, and hundreds of runs
of the tests differ in nothing of these. So its results lie in files that all processes of a session share.
Who asks for an estimate itself (`narrowgauge plan`, the tests of memory) gets a fresh one: only that of a
run's beginning is kept.
"""

import hashlib
import os
import pickle
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from narrowgauge.runs.monitor import memory_check

VARIABLE = "NARROWGAUGE_TESTS_ESTIMATES"  # the directory, for processes that the tests start


def kind_of_step(config: Any, parallel_dims: tuple[Any, ...]) -> str:
    """All that an estimate is a function of, and a little more."""
    training = config.training.model_dump(exclude={"seed", "steps"})
    # A rule may hold from a share of the steps on.
    steps = config.training.steps if config.spec.recipe.rules else None
    data = config.data.model_dump(include={"sequence_length", "separate_documents"})
    spec = replace(config.spec, seed=0)
    recipe = [getattr(spec.recipe, f.name) for f in fields(spec.recipe)]  # a recipe's own repr is short
    seen = (spec, recipe, training, steps, data, config.optimizer, config.parallel, parallel_dims)
    return hashlib.sha256(repr(seen).encode()).hexdigest()


def keep_estimates(directory: Path, patch: pytest.MonkeyPatch) -> None:
    """Let runs of this process find what was worked out before, and leave what they work out."""
    work_out = memory_check.estimate_memory

    def estimate_memory(config: Any, *parallel_dims: Any) -> Any:
        file = directory / kind_of_step(config, parallel_dims)
        if not file.exists():
            own = file.with_suffix(f".{os.getpid()}")
            own.write_bytes(pickle.dumps(work_out(config, *parallel_dims)))
            own.rename(file)
        return pickle.loads(file.read_bytes())

    patch.setattr(memory_check, "estimate_memory", estimate_memory)


def keep_estimates_as_told() -> None:
    """The same in a process that the tests started, for its length."""
    if directory := os.environ.get(VARIABLE):
        keep_estimates(Path(directory), pytest.MonkeyPatch())
