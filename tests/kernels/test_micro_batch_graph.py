"""A step from recorded launches is the step that launches one by one, bit for bit (`micro_batch_graph`).

Triton's interpreter and torch's CPU repeat the recorded launches (`support.recorded`), with the arguments
that they had when they were recorded. What a CUDA graph would get wrong goes wrong here.
"""

import pytest
import torch

from narrowgauge.nn import Gauges
from narrowgauge.recipes import recipe_names
from narrowgauge.trainer.bench.worker import random_batches
from narrowgauge.trainer.distributed.parallel.micro_batch_graph import graph_gap
from narrowgauge.trainer.training.step.trainer import Trainer
from support.runs import config_of

SMALL = {"dim": 32, "layers": 1, "heads": 2, "kv_heads": 1, "ffn_dim": 32, "vocab_size": 32}
#: Recipe, micro-batches, keys of the model and of the training.
CASES = {
    "many options": (
        "fp8-delayed",
        3,
        {"qk_norm": True, "tied_head": True},
        {"recompute": "selective", "chunked_loss": True, "z_loss": 1e-3},
    ),
    "recomputed": ("fp8", 3, {}, {"recompute": True}),
    "one micro-batch": ("fp8", 1, {}, {}),
    "mxfp8": ("mxfp8", 3, {}, {}),
    "nvfp4": ("nvfp4", 3, {}, {}),
}


def trainer_of(recipe, micro_batches, model, training, device, recorder=None):
    training = {"batch_size": micro_batches, "micro_batch_size": 1, "steps": 9} | training
    config = config_of(recipe, SMALL | model, 8, **training)
    trainer = Trainer.begin(config, device)
    if recorder is not None:
        trainer.engine.record_graphs(recorder)
    return trainer, random_batches(config, device)


@pytest.mark.tier("thorough", nightly=("many options",))
@pytest.mark.parametrize("case", CASES)
def test_replays_have_the_digits_of_launches_one_by_one(case, device, monkeypatch):
    from support.recorded import Recordings  # which needs Triton

    found = []
    for recorder in (None, Recordings(monkeypatch)):
        trainer, batches = trainer_of(*CASES[case], device, recorder)
        own = []
        for _ in range(3):
            own.append(trainer.train_step(iter(batches)))
            batches = batches[1:] + batches[:1]  # other tokens at the same address are other tokens
        found.append((own, {n: p.detach() for n, p in trainer.model.named_parameters()}))
    (usual, weights), (recorded, of_recorded) = found
    assert recorded == usual
    for name, weight in weights.items():
        assert torch.equal(weight, of_recorded[name]), name
    assert len(recorder.recordings) == min(2, CASES[case][1]), "the first micro-batch and the others"
    assert recorder.releases == 0


@pytest.mark.tier("nightly")
def test_what_is_read_or_validated_runs_launch_by_launch_and_is_recorded_again(device, monkeypatch):
    """Gauges and a validation: graphs are given back, digits stay."""
    from support.recorded import Recordings  # which needs Triton

    found = []
    for recorder in (None, Recordings(monkeypatch)):
        trainer, batches = trainer_of("nvfp4", 2, {}, {}, device, recorder)
        own = []
        for step in range(6):
            names = {p: name for name, p in trainer.model.named_parameters()}
            gauges = Gauges.of(trainer.model, trainer.optimizer, names) if step == 3 else None
            own.append(trainer.train_step(iter(batches), gauges=gauges))
            if step == 4:
                own.append(trainer.engine.evaluate(batches[0]).item())
        found.append(own)
    assert found[0] == found[1]
    assert recorder.releases == 2


NOT_HELD = {"fp16", "bf16-sr", "eco", "msamp-o1", "msamp-o2", "msamp-o3", "fp8-attention"}


def model_of(recipe, **model):
    return Trainer.begin(config_of(recipe, {"layers": 2} | model, 64), torch.device("meta")).model


def test_recipes_that_graphs_hold_are_listed():
    for name in recipe_names():
        assert bool(graph_gap(model_of(name), True, False)) == (name in NOT_HELD), name


def test_what_a_graph_cannot_hold_is_named():
    for recipe, model, words in (
        ("fp16", {}, "the loss scale of fp16 follows what the host has read"),
        ("msamp-o2", {}, "blocks.0.qkv is stored in a cast, and the host tracks its state"),
        ("fp8-attention", {}, "blocks.0.attention is NarrowAttention, whose launches may depend on values"),
        ("fp8", {"experts": 4}, "blocks.0.experts is Experts, whose launches may depend on values"),
    ):
        assert words in graph_gap(model_of(recipe, **model), True, False)
    model = model_of("fp8")
    assert "several processes" in graph_gap(model, False, False)
    assert "compiled code" in graph_gap(model, True, True)
    model.blocks[0].register_forward_hook(print)
    assert graph_gap(model, True, False) == "a hook of blocks.0 may read values"
