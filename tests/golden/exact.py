"""Arithmetic that is the same on every CPU, and the digests of casts and of layers in it.

A CPU's instructions and libraries decide the order of a sum, whether a product is rounded before it is added,
and the last bit of an exponential. In float64 these move a result by some 2^-52 of it, which no longer shows
after it is rounded to the dtype that was asked for; what is a single IEEE operation needs no such care.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import reduce
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from golden.arithmetic import digest, numbers
from narrowgauge.formats import random_stream
from narrowgauge.nn import Linear, set_step
from narrowgauge.quantization import cast, emulate, quantize
from narrowgauge.recipes import recipe

NARROW = (torch.float32, torch.bfloat16, torch.float16)
#: What is computed in float64, by name; `pow` is also `pow_`, which writes its argument.
_NAMES = """
    matmul __matmul__ __rmatmul__ mm bmm addmm baddbmm linear einsum scaled_dot_product_attention
    sum mean norm linalg_vector_norm _foreach_norm var cumsum layer_norm rms_norm
    exp exp2 log log2 pow __pow__ __rpow__ sin cos tanh erf sigmoid silu gelu rsqrt normal
    softmax log_softmax logsumexp cross_entropy
    add sub addcmul addcdiv lerp _fused_adamw _foreach_add _foreach_lerp
"""
NAMES = frozenset(_NAMES.split())


class InFloat64(TorchFunctionMode):
    """Calls each function of `NAMES` with float64 in place of narrower tensors, and rounds its result."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = args, dict(kwargs or {})
        name = getattr(func, "__name__", "")
        writes = name.endswith("_") and not name.endswith("__")
        dtypes = {x.dtype for x in tree_leaves(given) if isinstance(x, torch.Tensor)}
        is_named = name.removesuffix("_" if writes else "") in NAMES
        if not is_named or torch.float64 in dtypes or dtypes.isdisjoint(NARROW):
            return func(*given[0], **given[1])
        narrow = [x for x in tree_leaves(given) if _is_narrow(x)]
        out, asked = given[1].pop("out", None), given[1].pop("dtype", None)
        asked = given[1].pop("out_dtype", None) or asked
        wide = tree_map(lambda x: x.double() if _is_narrow(x) else x, given)
        result = func(*wide[0], **wide[1])
        if writes:
            for to, x in zip(tree_leaves(given), tree_leaves(wide), strict=True):
                if _is_narrow(to) and x._version:
                    (to.detach() if to.is_leaf else to).copy_(x)
            return narrow[0]
        wider = [x.dtype for x in narrow if x.ndim] or [narrow[0].dtype]
        dtype = asked or reduce(torch.promote_types, wider)
        result = tree_map(lambda x: x.to(dtype) if getattr(x, "dtype", 0) == torch.float64 else x, result)
        return result if out is None else out.copy_(result)


def _is_narrow(x: object) -> bool:
    return isinstance(x, torch.Tensor) and x.dtype in NARROW


@contextmanager
def in_float64() -> Iterator[None]:
    """`InFloat64`, in the backward passes of autograd functions as well, which no mode reaches."""
    apply = BackwardCFunction.apply

    def backward(ctx: Any, *gradients: Any) -> Any:
        with InFloat64():
            return apply(ctx, *gradients)

    BackwardCFunction.apply = backward
    try:
        with InFloat64():
            yield
    finally:
        BackwardCFunction.apply = apply


def of_cast(name: str) -> dict[str, str]:
    """The digests of a cast along each axis: codes and scales as stored, and the operand of a product."""
    x, c, found = numbers(48, 160), cast(name), {}
    for axis in (-1, 0):
        parts = {"operand": [emulate(x, c, axis, torch.bfloat16 if c.is_scaled else torch.float32)[0]]}
        if c.is_scaled:
            q = quantize(x, c, axis)
            drawn = quantize(x, c, axis, rounding="stochastic", generator=random_stream(7, 3, 1))
            parts |= {"codes": [q.codes], "scales": [q.scales, q.tensor_scale], "drawn": [drawn.codes]}
        found[f"axis {axis}"] = _line(parts)
    return found


def of_layer(name: str) -> dict[str, str]:
    """The digests of a layer's products and of its bias gradient under a recipe, in two steps."""
    plain = torch.nn.Linear(160, 96)
    with torch.no_grad():
        plain.weight.copy_(numbers(96, 160, odd=40503) / 16)
        plain.bias.copy_(numbers(96))
    layer, found = Linear(plain, recipe(name), 5), {}
    for step in (1, 2):
        x = (numbers(48, 160, odd=7919) * step).bfloat16().requires_grad_()
        set_step(layer, 7, step, 0, 4, 3)
        with in_float64():
            y = layer(x)
            y.backward(numbers(48, 96, odd=104729).bfloat16() / 512)
        parts = {"y": [y], "dx": [x.grad], "dw": [layer.weight.grad], "dbias": [layer.bias.grad]}
        found[f"step {step}"] = _line(parts)
        layer.weight.grad = layer.bias.grad = None
    return found


def _line(parts: Mapping[str, list[Any]]) -> str:
    return " ".join(f"{what}={digest(*tensors)}" for what, tensors in parts.items())
