"""What the tests of a layer share: recipes, a layer under one, and the products of a step.

`PLAIN` are the recipes whose weights and gradients are ordinary fp32 parameters (others:
`test_weight_state.py`), and whose rules wait for no step, which a layer by itself does not know
(`tests/recipes/test_rules.py`). Those that also narrow attention need a model that has some.
"""

import pytest
import torch

from narrowgauge.nn import Linear, convert, set_step
from narrowgauge.recipes import recipe, recipe_names
from narrowgauge.trainer.models import Transformer, initialize, model_config
from support.covering import representatives


def _is_plain(name: str) -> bool:
    state = recipe(name).state
    is_wide = state["weight"].name == state["grad"].name == "fp32"
    waits = any(rule.is_timed for rule in recipe(name).rules)
    return is_wide and not waits and not recipe(name).narrows_attention


PLAIN = [name for name in recipe_names() if _is_plain(name)]
#: Among them, those with every pair of properties, and the pairs of gather, saved and moments.
COVER = [n for n in PLAIN if n in representatives() | {"bf16", "fp8", "fp8-row-hp", "mxfp8", "nvfp4", "coat"}]


def every_recipe(test):
    """A test of each plain recipe, in the nightly tier but for those that cover the others."""
    nightly = pytest.mark.tier("nightly", keep=COVER)
    return nightly(pytest.mark.parametrize("name", PLAIN)(test))


def make(under, k=96, n=64, bias=True):
    """A layer under a recipe or its name; outside a model there is nothing to keep wide."""
    torch.manual_seed(0)
    r = recipe(under).for_layer([("up", None)], 0) if isinstance(under, str) else under
    return Linear(torch.nn.Linear(k, n, bias=bias), r, 0)


def transformer(under, dtype=torch.bfloat16, name="debug", **sizes):
    """A new model under a recipe, of which `sizes` are other than the named one's."""
    model = Transformer(model_config(name, **sizes), dtype)
    initialize(model, 0)
    return convert(model, under)


def batch(*shape, k=96, n=64):
    g = torch.Generator().manual_seed(1)
    return torch.randn(*(shape or (2, 64)), k, generator=g), torch.randn(*(shape or (2, 64)), n, generator=g)


def steps(layer, x, dy, call=None, numbers=(1, 2)):
    """Results and gradients of some steps: a history has to see one before its scales mean something.

    A number of None says no step, as a loop that only converts its model.
    """
    found = []
    for number in numbers:
        if number is not None:
            set_step(layer, 0, number, 0)
        layer.zero_grad()
        x.grad = None
        y = (call or layer)(x)
        y.backward(dy)
        gradients = [None if t.grad is None else t.grad.clone() for t in (x, *layer.parameters())]
        found += [y.detach(), *gradients]
    return found


def same(found, expected):
    """Whether two lists of tensors are equal bit for bit."""
    return all(map(torch.equal, found, expected)) and len(found) == len(expected)


def decibels(found, exact):
    """Signal to noise."""
    return (20 * torch.log10(exact.norm() / (exact - found.double()).norm())).item()
