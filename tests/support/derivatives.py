"""Ways to ask torch for more than one backward pass of a batch; each is refused in a sentence."""

import torch
from torch.autograd import forward_ad, functional


def _dual(f, x):
    with forward_ad.dual_level():
        f(forward_ad.make_dual(x, torch.ones_like(x)))


def _dual_gradient(f, x):
    y = f(x.clone().requires_grad_())
    with forward_ad.dual_level():
        y.backward(forward_ad.make_dual(torch.ones_like(y), torch.ones_like(y)))


def _slope(f, x):
    x = x.clone().requires_grad_()
    return x, torch.autograd.grad(f(x), x, create_graph=True)[0]


def _penalty(f, x):
    _slope(f, x)[1].square().sum().backward()


def _allow_unused(f, x):
    x, slope = _slope(f, x)
    torch.autograd.grad(slope.sum(), x, allow_unused=True)


#: Of a function of x with a scalar result.
SECOND = {
    "a gradient penalty": _penalty,
    "grad with allow_unused": _allow_unused,
    "functional.hessian": functional.hessian,
    "functional.hvp": lambda f, x: functional.hvp(f, x, torch.ones_like(x)),
    "functional.vhp": lambda f, x: functional.vhp(f, x, torch.ones_like(x)),
    "functional.jvp": lambda f, x: functional.jvp(f, x, torch.ones_like(x)),
}
TRANSFORMS = {
    "func.grad": lambda f, x: torch.func.grad(f)(x),
    "func.vmap": lambda f, x: torch.func.vmap(f)(x[None]),
    "func.jvp": lambda f, x: torch.func.jvp(f, (x,), (torch.ones_like(x),)),
    "func.hessian": lambda f, x: torch.func.hessian(f)(x),
    "forward mode": _dual,
    "forward mode over backward": _dual_gradient,
    "batched gradients": lambda f, x: functional.jacobian(lambda x: f(x)[None], x, vectorize=True),
}
WAYS = SECOND | TRANSFORMS
SENTENCE = dict.fromkeys(SECOND, "narrowgauge's layers have no second derivative")
SENTENCE |= dict.fromkeys(TRANSFORMS, r"torch\.func .* do not pass through narrowgauge's layers")
