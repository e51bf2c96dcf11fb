"""All runs of a comparison have one number of threads, since the last digits of losses follow from it."""

import pytest

from narrowgauge.trainer.experiment.design import make_experiment
from narrowgauge.trainer.experiment.grid import recipe_variants
from narrowgauge.trainer.experiment.run import with_equal_threads
from narrowgauge.trainer.runs.monitor import arithmetic
from narrowgauge.trainer.runs.run_directory import RunDirectory


@pytest.fixture(autouse=True)
def _cores(monkeypatch):
    """Eight cores, of which another program uses three."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(arithmetic, "threads_of_torch", lambda: 8)
    monkeypatch.setattr(arithmetic, "cores_of_others", lambda: 3.0)


def comparison(**training):
    return make_experiment({"training": {"device": "cpu", **training}}, recipe_variants(["bf16", "fp8"]))


def numbers(experiment, out):
    return [run.config.training.threads for run in with_equal_threads(experiment, out).runs]


def begun(path, config, recorded):
    run = RunDirectory(path)
    run.claim(config)
    run.record({"event": "start", "step": 0, "threads": recorded})


@pytest.mark.parametrize(
    ("keys", "recorded", "found"),
    [({}, None, [5, 5]), ({"threads": 3}, None, [3, 3]), ({"threads": 6}, 6, [6, 6]), ({}, 6, [0, 6])],
    ids=["the free cores", "a number", "runs that come later", "a run of before, whose metrics say it"],
)
def test_all_runs_have_the_number_of_those_that_are_there(tmp_path, keys, recorded, found):
    if recorded:
        begun(tmp_path / "bf16", comparison(**keys).runs[0].config, recorded)
        keys = {}
    assert numbers(comparison(**keys), tmp_path) == found
