"""What a step is expected to take, worked out once a session for each kind of step.

Every run begins with a step on the meta device (`training.expected`), which takes longer than a tiny run's own
steps do. It is a function of the model, the recipe, the batch and the mesh; hundreds of runs of the tests differ in
nothing that it sees. So its results are kept in files, which all processes of a session share. Whoever asks for an
expectation itself (`narrowgauge plan`, the tests of memory) gets a fresh one: only the one a run begins with is kept.
"""

import hashlib
import importlib
import os
import pickle
from pathlib import Path
from typing import Any

import pytest

VARIABLE = "NARROWGAUGE_TESTS_EXPECTATIONS"  # the directory, for processes that the tests start


def kind_of_step(config: Any, layout: Any) -> str:
    """All that an expectation is a function of, and a little more."""
    training = config.training.model_dump(exclude={"seed", "steps"})
    recipe = config.the_recipe()
    steps = config.training.steps if recipe.rules else None  # a rule may hold from a share of the steps on
    data = config.data.model_dump(include={"sequence_length", "separate_documents"})
    seen = (config.the_model(), recipe, training, steps, data, config.optimizer, config.parallel, layout)
    return hashlib.sha256(repr(seen).encode()).hexdigest()


def keep_expectations(directory: Path, patch: pytest.MonkeyPatch) -> None:
    """Let runs of this process find what was expected before, and leave what they work out."""
    module = importlib.import_module("narrowgauge.training.expected")
    work_out = module.expected

    def expected(config: Any, *layout: Any) -> Any:
        file = directory / kind_of_step(config, layout)
        if not file.exists():
            own = file.with_suffix(f".{os.getpid()}")
            own.write_bytes(pickle.dumps(work_out(config, *layout)))
            own.rename(file)
        return pickle.loads(file.read_bytes())

    patch.setattr(module, "expected", expected)


def keep_expectations_as_told() -> None:
    """The same in a process that the tests started, for its length."""
    if directory := os.environ.get(VARIABLE):
        keep_expectations(Path(directory), pytest.MonkeyPatch())
