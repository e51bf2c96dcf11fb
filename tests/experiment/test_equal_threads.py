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


def test_the_free_cores_are_counted_once(tmp_path):
    assert numbers(comparison(), tmp_path) == [5, 5]
    assert numbers(comparison(threads=3), tmp_path) == [3, 3]


def test_runs_that_come_later_have_the_number_of_those_that_are_there(tmp_path, monkeypatch):
    first, _ = with_equal_threads(comparison(), tmp_path).runs
    begun(tmp_path / "bf16", first.config, recorded=5)
    monkeypatch.setattr(arithmetic, "cores_of_others", lambda: 0.0)  # the other program has ended
    assert numbers(comparison(), tmp_path) == [5, 5]


def test_a_run_of_before_goes_on_as_it_began(tmp_path):
    """Its configuration does not say the number, its metrics do."""
    begun(tmp_path / "bf16", comparison().runs[0].config, recorded=6)
    assert numbers(comparison(), tmp_path) == [0, 6]
