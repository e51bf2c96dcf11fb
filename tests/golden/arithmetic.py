"""The fingerprint of a machine's arithmetic: a digest of each kind of computation that a step is made of.

Two machines with equal fingerprints give equal digits. The numbers that go in are made of whole numbers, and
so are the same everywhere.
"""

import hashlib
import math
from collections.abc import Callable

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


def _products(dtype: torch.dtype) -> str:
    a, b = numbers(130, 257).to(dtype), numbers(257, 129, odd=40503).to(dtype)
    return digest(a @ b, a @ a.T, torch.bmm(a.view(2, 65, 257), b.expand(2, -1, -1)))


def _reductions() -> str:
    x = numbers(67, 515)
    sums = x.sum(), x.sum(0), x.sum(1), x.mean(-1), x.square().mean(-1), x.double().sum()
    return digest(
        *sums, torch.linalg.vector_norm(x), x.norm(dim=1), torch.cumsum(x, 1), nnf.layer_norm(x, (515,))
    )


def _transcendentals() -> str:
    x = numbers(4099)
    p = x.abs() + 0.001
    of_x = x.exp(), x.exp2(), x.sin(), x.cos(), x.tanh(), x.erf(), x.sigmoid(), nnf.silu(x), nnf.gelu(x)
    of_p = p.log(), p.log2(), p.sqrt(), p.rsqrt(), p.reciprocal(), p**0.3, p.double() ** 0.3
    return digest(*of_x, *of_p)


def _softmax() -> str:
    x, to = numbers(33, 257), torch.arange(33)
    losses = nnf.cross_entropy(x, to), nnf.cross_entropy(x.bfloat16(), to)
    return digest(x.softmax(-1), x.log_softmax(-1), *losses)


def _attention(dtype: torch.dtype) -> str:
    q, k, v = (numbers(2, 2, 65, 32, odd=odd).to(dtype).requires_grad_() for odd in (40503, 7919, 104729))
    y = nnf.scaled_dot_product_attention(q, k, v, is_causal=True)
    y.sum().backward()
    return digest(y, *(x.grad for x in (q, k, v) if x.grad is not None))


def _random() -> str:
    torch.manual_seed(7)
    x = torch.empty(1003)
    return digest(torch.randn(1003), torch.rand(1003), torch.randint(2**31, (1003,)), x.normal_(0, 0.02))


def _of_python() -> str:
    values = [f(0.1 * i) for f in (math.cos, math.exp, math.sqrt) for i in range(100)]
    return digest(torch.tensor([*values, *(0.95**i for i in range(100))], dtype=torch.float64))


KINDS: dict[str, Callable[[], str]] = {
    "fp32 products": lambda: _products(torch.float32),
    "bf16 products": lambda: _products(torch.bfloat16),
    "reductions": _reductions,
    "transcendentals": _transcendentals,
    "softmax": _softmax,
    "fp32 attention": lambda: _attention(torch.float32),
    "bf16 attention": lambda: _attention(torch.bfloat16),
    "random numbers": _random,
    "python": _of_python,
}


def fingerprint() -> dict[str, str]:
    """The version of torch, and the digest of each kind of arithmetic as it is in this process."""
    version = torch.__version__.partition("+")[0]  # of 2.13.0+cpu: what it was built for is in the digests
    return {"torch": version} | {kind: measure() for kind, measure in KINDS.items()}
