"""A step from recorded launches is the step that launches one by one, bit for bit (`micro_batch_graph`).

Triton's interpreter and torch's CPU repeat the recorded launches (`support.recorded`), with the arguments
that they had when they were recorded. What a CUDA graph would get wrong goes wrong here.
"""

import pytest
import torch

from narrowgauge.bench.worker import random_batches
from narrowgauge.optim.gauges import make_gauges
from narrowgauge.training import make_config
from narrowgauge.training.step.trainer import Trainer
from support.recorded import Recordings

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*encountered in:RuntimeWarning"
)  # numpy's, of the interpreter
SMALL = {"dim": 32, "layers": 1, "heads": 2, "kv_heads": 1, "ffn_dim": 32, "vocab_size": 32}


def trainer_of(recipe, device, recorder=None, micro_batches=3, model=(), **training):
    config = make_config(
        {
            "model": {"name": "debug"} | SMALL | dict(model),
            "data": {"sequence_length": 8},
            "training": {"batch_size": micro_batches, "micro_batch_size": 1, "steps": 9} | training,
            "optimizer": {"lr": 1e-2},
            "recipe": {"name": recipe},
        }
    )
    trainer = Trainer.begin(config.plan, device)
    if recorder is not None:
        trainer.engine.record_graphs(recorder)
    return trainer, random_batches(config, device)


def steps(trainer, batches, count):
    found = []
    for _ in range(count):
        found.append(trainer.train_step(iter(batches)))
        batches = batches[1:] + batches[:1]  # other tokens at the same address are other tokens
    return found, {n: p.detach().clone() for n, p in trainer.model.named_parameters()}


def assert_same(recipe, device, monkeypatch, count=3, **options):
    usual = steps(*trainer_of(recipe, device, **options), count)
    recorder = Recordings(monkeypatch)
    recorded = steps(*trainer_of(recipe, device, recorder, **options), count)
    assert recorded[0] == usual[0]
    for name, weight in usual[1].items():
        assert torch.equal(weight, recorded[1][name]), name
    return recorder


@pytest.mark.tier("nightly", keep=("fp8-delayed",))
@pytest.mark.tier("thorough")  # gpu_budget/test_graph.py shows the launches
@pytest.mark.parametrize("recipe", ["bf16", "fp8", "fp8-delayed", "mxfp8", "nvfp4"])
def test_replays_have_the_digits_of_launches_one_by_one(recipe, device, monkeypatch):
    recorder = assert_same(recipe, device, monkeypatch)
    assert len(recorder.recordings) == 2
    assert recorder.releases == 0


@pytest.mark.tier("nightly", keep=("recomputed",))
@pytest.mark.tier("thorough")
@pytest.mark.parametrize(
    "options",
    [
        {"micro_batches": 1},
        {"recompute": True, "chunked_loss": True, "z_loss": 1e-3},
        {"model": {"qk_norm": True, "tied_head": True}, "recompute": "selective"},
    ],
    ids=["one micro-batch", "recomputed", "tied"],
)
def test_replays_under_other_options(options, device, monkeypatch):
    assert_same("fp8", device, monkeypatch, **options)


@pytest.mark.tier("nightly")
def test_what_is_read_or_validated_runs_launch_by_launch_and_the_next_step_is_recorded_again(
    device, monkeypatch
):
    """Gauges and a validation: graphs are given back, digits stay."""
    found = []
    for recorder in (None, Recordings(monkeypatch)):
        trainer, batches = trainer_of("nvfp4", device, recorder, micro_batches=2)
        own = []
        for step in range(6):
            names = {p: name for name, p in trainer.model.named_parameters()}
            gauges = make_gauges(trainer.model, trainer.optimizer, names) if step == 3 else None
            own.append(trainer.train_step(iter(batches), gauges=gauges))
            if step == 4:
                own.append(trainer.engine.evaluate(batches[0]).item())
        found.append(own)
    assert found[0] == found[1]
    assert recorder.releases == 2
