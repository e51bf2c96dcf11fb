"""A model that recomputes its MLPs trains to the same digits under every recipe that ships."""

import pytest
import torch

from narrowgauge.models import Transformer, initialize, model_config
from narrowgauge.nn import convert, set_step
from narrowgauge.quantization import gradient_of
from narrowgauge.recipes import recipe, recipe_names

SIZES = {"dim": 32, "layers": 2, "heads": 2, "ffn_dim": 48, "vocab_size": 64, "max_sequence_length": 16}


def digits(name, selective, **changes):
    """Losses and gradients of two micro-batches of the first step."""
    model = Transformer(model_config("debug", **(SIZES | changes)), torch.bfloat16)
    initialize(model, 0)
    convert(model, recipe(name))
    model.recompute, model.selective = int(selective), selective
    losses = []
    for i in range(2):
        set_step(model, 1, 1, 2 * i, steps=4, decay=2)
        loss = model.loss(*torch.randint(64, (2, 2, 8), generator=torch.Generator().manual_seed(i)))
        loss.backward()
        losses.append(loss.detach())
    return [*losses, *(g.clone() for p in model.parameters() if (g := gradient_of(p)) is not None)]


def assert_same(name, **changes):
    pairs = zip(digits(name, False, **changes), digits(name, True, **changes), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.tier("thorough", keep=("bf16", "fp8-delayed", "nvfp4", "msamp-o3", "coat", "fp8-attention"))
@pytest.mark.parametrize("name", recipe_names())
def test_losses_and_gradients_are_those_without_it(name):
    assert_same(name)


@pytest.mark.parametrize("changes", [{"experts": 4}, {"mlp": "gelu", "bias": True}], ids=["experts", "gelu"])
def test_whatever_the_mlp_is(changes):
    assert_same("nvfp4", **changes)
