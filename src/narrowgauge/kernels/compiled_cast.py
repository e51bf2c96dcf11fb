"""A cast as one operator of a graph that torch compiles for a CPU.

Traced into the graph of a model, a cast is some sixty operations, six times in every layer, and torch's
compiler takes minutes for them. As an operator it is one node, which calls what runs without a compiler: the
passes in C (`quantization.passes`). So a compiled model has the casts of one that is not, bit for bit.

Traced as before are the casts of tensors that several processes hold together, those that keep channels in
another cast, and all where there is no C. A GPU's compiler fuses the operations.
"""

import os

import torch

from narrowgauge.formats import RandomStream
from narrowgauge.quantization import Cast, QuantContext
from narrowgauge.quantization import emulate as emulate_in_torch
from narrowgauge.quantization.passes.c_call import c_library

_casts: dict[str, Cast] = {}  # those that graphs of this process name


def is_operator(x: torch.Tensor, cast: Cast, context: QuantContext) -> bool:
    """Whether a cast is traced as an operator."""
    is_drawn = isinstance(context.random, RandomStream) or not cast.is_random
    is_alone = context.shard is None and context.limits is None and not cast.keep_channels
    is_traced = torch.compiler.is_compiling() and x.device.type == "cpu"
    return is_traced and is_alone and is_drawn and cast.is_scaled and _has_c()


def emulate(
    x: torch.Tensor, cast: Cast, axis: int, dtype: torch.dtype, context: QuantContext
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`quantization.emulate` as an operator of the graph that is traced."""
    key = offset = None
    if cast.is_random and isinstance(context.random, RandomStream):
        key, offset = context.random.key, context.random.offset
        offset = offset if isinstance(offset, torch.Tensor) else torch.tensor(offset)
    name = _name_of(cast)
    values, scale = _operator(x, name, axis, dtype, key, offset, context.signs, context.scale, context.held)
    return values, scale if scale.ndim == 0 else None


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _has_c() -> bool:
    return os.environ.get("NARROWGAUGE_KERNELS") != "0" and c_library() is not None


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _name_of(cast: Cast) -> str:
    """All that a cast is, so that a graph from the compiler's cache on disk means the same cast."""
    name = repr(cast)
    _casts[name] = cast
    return name


@torch.library.custom_op("narrowgauge::emulate", mutates_args=())
def _operator(
    x: torch.Tensor,
    cast: str,
    axis: int,
    dtype: torch.dtype,
    key: torch.Tensor | None,
    offset: torch.Tensor | None,
    signs: torch.Tensor | None,
    scale: torch.Tensor | None,
    held: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The operand and its scale; one of shape (0,) stands for None."""
    random = None if key is None or offset is None else RandomStream(key, offset)
    context = QuantContext(random, signs, scale, held=held)
    with torch.no_grad():
        values, of_tensor = emulate_in_torch(x, _casts[cast], axis, dtype, context)
    assert (of_tensor is not None) == _casts[cast].scales_result, cast
    return values.contiguous(), torch.zeros(0) if of_tensor is None else of_tensor


@_operator.register_fake
def _(
    x: torch.Tensor, cast: str, axis: int, dtype: torch.dtype, *_: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    c, shape = _casts[cast], list(x.shape)
    if c.hadamard:
        shape[axis] = (shape[axis] + c.hadamard - 1) // c.hadamard * c.hadamard
    operand = x.new_empty(shape, dtype=torch.float32 if c.has_wide_operand else dtype)
    return operand, x.new_empty(() if c.scales_result else (0,), dtype=torch.float32)
