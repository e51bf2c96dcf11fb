"""The fingerprint of a machine's arithmetic: a digest of each kind of computation that a step is made of.

Two machines with equal fingerprints give equal digits. The numbers that go in are made of whole numbers, and
so are the same everywhere.
"""

import hashlib
import math

import torch
from torch.nn import functional as nnf


def numbers(*shape: int, odd: int = 2654435761) -> torch.Tensor:
    """Numbers between -4 and 4 that look random, by integer arithmetic alone."""
    codes = torch.arange(1, math.prod(shape) + 1) * odd % 2**24
    return (codes.float() / 2**21 - 4).reshape(shape)


def digest(*tensors: torch.Tensor) -> str:
    """The first digits of a sha256 over all bytes."""
    sha = hashlib.sha256()
    for x in tensors:
        sha.update(x.detach().reshape(-1).view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()[:16]


def _products(*dtypes: torch.dtype) -> str:
    found = []
    for dtype in dtypes:
        a, b = numbers(130, 257).to(dtype), numbers(257, 129, odd=40503).to(dtype)
        found += [a @ b, a @ a.T, torch.bmm(a.view(2, 65, 257), b.expand(2, -1, -1))]
    return digest(*found)


def _reductions() -> str:
    x = numbers(67, 515)
    sums = x.sum(), x.sum(0), x.sum(1), x.mean(-1), x.square().mean(-1), x.double().sum()
    norms = torch.linalg.vector_norm(x), x.norm(dim=1), nnf.layer_norm(x, (515,))
    return digest(*sums, *norms, torch.cumsum(x, 1))


def _transcendentals() -> str:
    """What a training asks for: others come from a library that takes other paths on other CPUs."""
    x, angles = numbers(33, 257), torch.outer(torch.arange(64.0), 1e4 ** (-torch.arange(16.0) / 16))
    p, to = x.abs() + 0.001, torch.arange(33)
    activations = x.sigmoid(), nnf.silu(x), nnf.gelu(x, approximate="tanh"), angles.cos(), angles.sin()
    powers = p.sqrt(), p.rsqrt(), p.reciprocal(), p**0.3, p.double() ** 0.3
    losses = nnf.cross_entropy(x, to), nnf.cross_entropy(x.bfloat16(), to)
    python = [f(0.1 * i) for f in (math.cos, math.exp, math.sqrt, (0.95).__pow__) for i in range(100)]
    own = torch.tensor(python, dtype=torch.float64)
    return digest(*activations, *powers, x.softmax(-1), x.log_softmax(-1), *losses, own)


def _attention(*dtypes: torch.dtype) -> str:
    found = []
    for dtype in dtypes:
        q, k, v = (numbers(2, 2, 65, 32, odd=odd).to(dtype).requires_grad_() for odd in (40503, 7919, 104729))
        y = nnf.scaled_dot_product_attention(q, k, v, is_causal=True)
        found += [y, *torch.autograd.grad(y.sum(), (q, k, v))]
    return digest(*found)


def _random() -> str:
    torch.manual_seed(7)
    x = torch.empty(1003)
    return digest(torch.randn(1003), torch.rand(1003), torch.randint(2**31, (1003,)), x.normal_(0, 0.02))


def fingerprint() -> dict[str, str]:
    """The version of torch, and the digest of each kind of arithmetic as it is in this process."""
    return {
        "torch": torch.__version__.partition("+")[
            0
        ],  # of 2.13.0+cpu: what it was built for is in the digests
        "products": _products(torch.float32, torch.bfloat16),
        "reductions": _reductions(),
        "transcendentals": _transcendentals(),
        "attention": _attention(torch.float32, torch.bfloat16),
        "random numbers": _random(),
    }
