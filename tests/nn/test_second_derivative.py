"""What converted layers and functions refuse on a CPU: second derivatives, and transforms of `torch.func`."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import narrowgauge as ng
from narrowgauge.errors import UserError
from narrowgauge.kernels.attention import Attention
from narrowgauge.kernels.attention.in_order import attend_in_order
from narrowgauge.kernels.cross_entropy import cross_entropy
from narrowgauge.kernels.head_loss import head_loss
from narrowgauge.kernels.residual import Residual
from support.derivatives import SENTENCE, WAYS

SOURCE = Path(ng.__file__).parent
LABELS = torch.tensor([0, 3, 5, 1])


class Place(nn.Module):
    """A module with one place that a recipe narrows, and a layer that nothing calls."""

    def __init__(self, place, call):
        super().__init__()
        self.place, self.layer, self.call = place, nn.Linear(8, 8), call

    def forward(self, x):
        return self.call(self.place, x)


def layers(name):
    torch.manual_seed(0)
    m = ng.convert(nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4)), name, keep=[])
    return lambda x: m(x).square().sum()


def attention(heads):
    """Causal attention of heads in one place."""
    return lambda place, x: place(*(x.view(1, 2, 4, 4) * n for n in (1, 2, 3))).sum()


def added_twice(place, x_TD):
    """The residual stream after one point."""
    return place(x_TD[None], x_TD[None]).sum()


def wide(x):
    """One head of 32 numbers a token, for which the C code of attention is."""
    return x.repeat(1, 4).bfloat16()[None, None]


def place(module, call, places):
    recipe = ng.recipe("bf16").with_places(places)
    return ng.convert(Place(module, call), recipe)


SUBJECTS = {
    name: lambda name=name: layers(name)
    for name in ("bf16", "fp8", "mxfp8", "nvfp4", "bf16-sr", "msamp-o2", "quartet", "fp8-delayed")
} | {
    "attention": lambda: place(Attention(), attention(2), {"attention": "e4m3"}),
    "residual": lambda: place(
        Residual(), lambda place, x: place(x[None], x[None]).sum(), {"stream": "mxfp8"}
    ),
    "attention in order": lambda: lambda x: attend_in_order(*[wide(x)] * 3).sum(),
    "cross entropy": lambda: lambda x: cross_entropy(x, LABELS),
    "head loss": lambda: lambda x: head_loss(x, torch.eye(8), LABELS),
}


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # by torch's own forward mode
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", SUBJECTS)
def test_what_is_more_than_a_first_derivative_is_refused(name, way):
    subject, x = SUBJECTS[name](), torch.linspace(-1, 1, 32).view(4, 8)
    with pytest.raises(UserError, match=SENTENCE[way]):
        WAYS[way](subject, x)
    x.requires_grad_()
    subject(x).backward()  # what was refused leaves nothing behind
    assert x.grad.isfinite().all()


def test_every_autograd_function_of_the_package_refuses():
    text = "\n".join(path.read_text() for path in SOURCE.rglob("*.py"))
    own = set(re.findall(r"^ *class (\w+)\(torch\.autograd\.Function\)", text, re.MULTILINE))
    # `StraightThrough`, the gradient of `round_to`, is linear: it has every derivative (next test).
    assert own == {"FirstOrderFunction", "StraightThrough"}, "others derive from FirstOrderFunction"


def test_the_second_derivative_of_round_to_is_that_of_what_follows():
    x = torch.linspace(-1, 1, 4)
    hessian = torch.autograd.functional.hessian(lambda x: ng.round_to(x, "e2m1").pow(3).sum(), x)
    assert torch.equal(hessian, torch.diag(6 * ng.round_to(x, "e2m1")))
