"""Which models a CUDA graph of a micro-batch can hold; tests/kernels/test_micro_batch_graph.py replays it."""

import torch

from narrowgauge.recipes import recipe_names
from narrowgauge.trainer.distributed.parallel.micro_batch_graph import graph_gap
from narrowgauge.trainer.training import make_config
from narrowgauge.trainer.training.step.trainer import Trainer

NOT_HELD = {"fp16", "bf16-sr", "eco", "msamp-o1", "msamp-o2", "msamp-o3", "fp8-attention"}


def model_of(recipe, **model):
    sizes = {"model": {"name": "debug", "layers": 2} | model, "data": {"sequence_length": 64}}
    batches = {"training": {"batch_size": 8, "micro_batch_size": 2}, "recipe": {"name": recipe}}
    return Trainer.begin(make_config(sizes | batches), torch.device("meta")).model


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
