"""A dry run times few micro-batches; all runs have one number of threads, on which last digits depend."""

import pytest

from narrowgauge.trainer.experiment.design import make_experiment
from narrowgauge.trainer.experiment.run import shortened, with_equal_threads
from narrowgauge.trainer.models import flops_per_token
from narrowgauge.trainer.runs.monitor import machine
from narrowgauge.trainer.runs.run_directory import RunDirectory
from narrowgauge.trainer.training import make_config


def config_of(model, batch_size, micro_batch_size, length=1024):
    sizes = {"batch_size": batch_size, "micro_batch_size": micro_batch_size, "device": "cpu", "threads": 1}
    return make_config({"model": {"name": model}, "training": sizes, "data": {"sequence_length": length}})


def flop(config):
    """The floating-point operations of one step."""
    length = config.data.sequence_length
    return config.training.batch_size * length * flops_per_token(config.spec.model, length)


def test_a_step_of_a_large_model_is_cut_to_a_few_whole_micro_batches():
    for model, size in [("gpt3-345m", 1), ("gpt2-124m", 2)]:
        short = shortened(config_of(model, 512, 4))
        assert (short.training.batch_size, short.training.micro_batch_size) == (size, size)
        assert short.spec.batch_size == size
        assert flop(short) < 4e12
    short = shortened(config_of("debug", 4096, 8, length=256))
    assert short.training.micro_batch_size == 8
    assert 1 < short.training.batch_size // 8 < 512
    assert 1e12 < flop(short) <= 2e12
    small = config_of("debug", 16, 8, length=256)
    assert shortened(small) == small


@pytest.fixture
def _cores(monkeypatch):
    """Eight cores, of which another program uses three."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(machine, "threads_of_torch", lambda: 8)
    monkeypatch.setattr(machine, "cores_of_others", lambda: 3.0)


def comparison(**training):
    variants = [(name, {"recipe.name": name}) for name in ("bf16", "fp8")]
    return make_experiment({"training": {"device": "cpu", **training}}, variants)


def numbers(experiment, out):
    return [run.config.training.threads for run in with_equal_threads(experiment, out).runs]


def begun(path, config, recorded):
    run = RunDirectory(path)
    run.claim(config)
    run.record({"event": "start", "step": 0, "threads": recorded})


@pytest.mark.usefixtures("_cores")
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
