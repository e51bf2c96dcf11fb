"""A bad step names its first bad tensor, and is as if it had never been."""

import math
from functools import partial

import pytest
import torch

from narrowgauge.trainer.training import make_config
from narrowgauge.trainer.training.step.step_faults import COMPILED, NOTHING, FirstBad, earliest
from narrowgauge.trainer.training.step.trainer import Trainer
from support.in_process import bits

CPU = torch.device("cpu")
LATER = pytest.mark.tier("thorough")
WIDE = {"model.dim": 64, "model.ffn_dim": 96}  # large enough for narrow moments


@pytest.fixture
def begin(begin):
    """A trainer after two good steps, and its batches."""

    def do(name="fp8", **changes):
        trainer, batches = begin(WIDE | {"recipe.name": name, "training.steps": 20} | changes)
        for _ in range(2):
            trainer.train_step(batches)
        return trainer, batches

    return do


def spoil_input(trainer, layer, value=math.inf):
    """From now on one element that comes to a layer is bad."""

    def hook(module, inputs):
        x = inputs[0].clone()
        x.view(-1)[7] = value
        return (x,)

    return trainer.model.get_submodule(layer).register_forward_pre_hook(hook)


def spoil_what_comes_back(trainer, layer, second_only=False):
    """From now on one element of the gradient of a layer's output is bad."""
    calls = []

    def hook(module, inputs, output):
        def backward(g):
            calls.append(g)
            g = g.clone()
            if not second_only or len(calls) % 2 == 0:
                g.view(-1)[7] = math.nan
            return g

        if output.requires_grad:
            output.register_hook(backward)

    return trainer.model.get_submodule(layer).register_forward_hook(hook)


def fill_weight(trainer, name, value=math.nan, column=None):
    """From now on a weight is bad, or one column of it."""
    with torch.no_grad():
        weight = trainer.model.get_parameter(name)
        (weight if column is None else weight[:, column]).fill_(value)


def spoil_output(trainer, name):
    """From now on one column of what a module puts out is bad."""

    def hook(module, inputs, output):
        if isinstance(output, tuple):  # a norm in a block passes on the stream with its own output
            return output[0], hook(module, inputs, output[1])
        return output * torch.where(torch.arange(output.shape[-1]) == 3, math.nan, 1.0)

    trainer.model.get_submodule(name).register_forward_hook(hook)


def overflow_norm(trainer, name):
    """From now on the elements of a gradient are finite, and their norm is not."""
    trainer.model.get_parameter(name).register_hook(lambda g: torch.full_like(g, 1e38))


def overflow_product(trainer, name):
    """Two numbers of 1e25 are finite, and their product is not."""
    fill_weight(trainer, f"{name}.weight", 1e25, column=7)
    spoil_input(trainer, name, 1e25)


def second_micro_batch(trainer, name):
    spoil_what_comes_back(trainer, name, second_only=True)


#: (recipe, what is bad, of which module or parameter, the layer and place that are found, words, micro-batch)
BAD = [
    ("fp8", spoil_input, "head", "head", "fprop.x", "as it came", 0),
    ("fp8", spoil_what_comes_back, "head", "head", "dgrad.dy", "", 0),
    ("mxfp8", second_micro_batch, "blocks.1.down", "blocks.1.down", "dgrad.dy", "", 1),
    # 1e5 is a number, and no number of fp16
    (
        *("fp16", partial(fill_weight, value=1e5, column=4), "blocks.1.gate_up.weight", "blocks.1.gate_up"),
        *("fprop.w", "finite before it became fp16", 0),
    ),
    ("fp32", overflow_product, "blocks.0.down", "blocks.0.down", "fprop.y", "", 0),
    ("fp8", fill_weight, "norm.weight", "norm", "weight", "from before the step", None),
    *(("fp8", spoil_output, n, n, "output", "", 0) for n in ("embedding", "blocks.1.mlp_norm")),
    ("fp32", overflow_norm, *["blocks.1.down.weight"] * 2, "grad", "whose norm is not", 1),
]


@pytest.mark.parametrize(("recipe", "spoil", "name", "layer", "place", "words", "micro_batch"), BAD)
@pytest.mark.parametrize("recompute", [False, pytest.param(True, marks=LATER)])
def test_the_first_bad_tensor_is_named(
    begin, recipe, spoil, name, layer, place, words, micro_batch, recompute
):
    trainer, batches = begin(recipe, **{"training.recompute": recompute})
    spoil(trainer, name)
    trainer.train_step(batches)
    assert not trainer.verdict.is_finite
    first = trainer.first_bad
    assert (first.layer, first.place, first.micro_batch, first.rank) == (layer, place, micro_batch, 0)
    assert words in first.what
    assert f"{layer} {place}" in str(first)


def test_a_fault_that_does_not_come_again(begin):
    trainer, batches = begin()
    calls = []

    def hook(g):
        calls.append(g)
        return g * math.nan if len(calls) == 1 else g

    trainer.model.blocks[1].down.weight.register_hook(hook)
    trainer.train_step(batches)
    assert trainer.first_bad == NOTHING
    assert "memory or hardware" in str(NOTHING)


@pytest.mark.tier("thorough")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # what torch.compile imports
def test_compiled_code_cannot_be_looked_into(tiny):
    changes = {"training.compile": True, "gauges.every": 0}
    trainer = Trainer.begin(make_config(tiny(changes)), CPU)
    assert trainer._find_first_bad([]) is COMPILED
    assert "training.compile" in str(COMPILED)


@pytest.mark.tier("nightly", keep=((True, "fp8-delayed"), (False, "msamp-o3"), (False, "bf16-sr")))
@pytest.mark.tier("thorough")
@pytest.mark.parametrize("name", ["fp8-delayed", "nvfp4", "msamp-o3", "bf16-sr"])
@pytest.mark.parametrize("recompute", [False, True])
def test_a_bad_step_is_as_if_it_had_never_been(begin, name, recompute):
    """The run that met a bad step goes on with every bit of the one that only passed over its data."""
    (bad, bad_batches), (other, other_batches) = (
        begin(name, **{"training.recompute": recompute}) for _ in range(2)
    )
    before, random = bits(bad), torch.get_rng_state()
    handles = [spoil_input(bad, "blocks.0.down"), spoil_what_comes_back(bad, "blocks.1.down")]
    bad.train_step(bad_batches)
    assert bad.first_bad.place == "fprop.x"
    assert torch.get_rng_state().equal(random)
    moved = {name for name, tensor in bits(bad).items() if tensor != before[name]}
    assert all(".amax" in name or ".entries" in name or ".scale" in name for name in moved), moved
    for handle in handles:
        handle.remove()
    next(other_batches), next(other_batches)
    other.step, other.guard.samples = 3, 6
    for _ in range(3):
        assert bad.train_step(bad_batches) == other.train_step(other_batches)
    assert bits(bad) == bits(other)


def test_of_several_ranks_the_tensor_that_came_to_be_first():
    late, early = FirstBad("head", "fprop.x", "", 0, 40, 0), FirstBad("blocks.0.qkv", "fprop.x", "", 0, 3, 1)
    assert earliest([late, NOTHING, early]) is early
    assert earliest([NOTHING, NOTHING]) is NOTHING
