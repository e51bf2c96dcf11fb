"""What converted layers and functions refuse on a CPU: second derivatives, and transforms of `torch.func`."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad, functional

import narrowgauge as ng
from narrowgauge.kernels.cross_entropy import cross_entropy
from narrowgauge.system.errors import UserError
from nn.own_loop import is_on_page


def _dual(f, x):
    with forward_ad.dual_level():
        f(forward_ad.make_dual(x, torch.ones_like(x)))


def _dual_gradient(f, x):
    y = f(x.clone().requires_grad_())
    with forward_ad.dual_level():
        y.backward(forward_ad.make_dual(torch.ones_like(y), torch.ones_like(y)))


def _penalty(f, x):
    x = x.clone().requires_grad_()
    torch.autograd.grad(f(x), x, create_graph=True)[0].square().sum().backward()


#: Of a function of x with a scalar result.
SECOND = {"a gradient penalty": _penalty, "functional.hessian": functional.hessian}
TRANSFORMS = {
    "func.grad": lambda f, x: torch.func.grad(f)(x),
    "forward mode": _dual,
    "forward mode over backward": _dual_gradient,
    "batched gradients": lambda f, x: functional.jacobian(lambda x: f(x)[None], x, vectorize=True),
}
WAYS = SECOND | TRANSFORMS
SENTENCE = dict.fromkeys(SECOND, "narrowgauge's layers have no second derivative")
SENTENCE |= dict.fromkeys(TRANSFORMS, r"torch\.func .* do not pass through narrowgauge's layers")


#: Layers by each of their autograd functions; and what is between layers.
SUBJECTS = ("bf16", "nvfp4", "bf16-sr", "msamp-o2", "quartet", "cross entropy")


def subject_of(name):
    if name == "cross entropy":
        return lambda x: cross_entropy(x, torch.tensor([0, 3, 5, 1]))
    torch.manual_seed(0)
    m = ng.convert(nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4)), name, keep=[])
    return lambda x: m(x).square().sum()


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # by torch's own forward mode
@pytest.mark.parametrize(
    ("name", "way"),
    [*(("nvfp4", way) for way in WAYS), *((n, "a gradient penalty") for n in SUBJECTS if n != "nvfp4")],
)
def test_what_is_more_than_a_first_derivative_is_refused(name, way):
    subject, x = subject_of(name), torch.linspace(-1, 1, 32).view(4, 8)
    with pytest.raises(UserError, match=SENTENCE[way]) as raised:
        WAYS[way](subject, x)
    assert way not in SECOND or is_on_page(raised.value)
    x.requires_grad_()
    subject(x).backward()  # what was refused leaves nothing behind
    assert x.grad.isfinite().all()


def test_every_autograd_function_of_the_package_refuses_but_that_of_round_to():
    text = "\n".join(path.read_text() for path in Path(ng.__file__).parent.rglob("*.py"))
    own = set(re.findall(r"^ *class (\w+)\(torch\.autograd\.Function\)", text, re.MULTILINE))
    assert own == {"FirstOrderFunction", "StraightThrough"}, "others derive from FirstOrderFunction"
    x = torch.linspace(-1, 1, 4)  # the gradient of `round_to` is linear: it has every derivative
    hessian = torch.autograd.functional.hessian(lambda x: ng.round_to(x, "e2m1").pow(3).sum(), x)
    assert torch.equal(hessian, torch.diag(6 * ng.round_to(x, "e2m1")))
