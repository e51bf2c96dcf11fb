"""A cast as one operator of a compiled graph, compiled by itself once for all layers.

Traced into the graph of a model, each cast is some sixty operations, six times in every layer, and torch's
compiler takes minutes for them. As an operator it is one node. What is compiled is the cast: once for each
cast, axis and dtype, for any shape, so that all layers and both passes share it. The numbers are those of
`quantization.emulate`, bit for bit.

Some casts stay as they are, run by torch's own operations: those whose blocks have several rows (the
compiler's code for them is slower), and those that clamp outliers, take a mean away or correct scales. A
Hadamard transform is a product, and stays one.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import count
from types import FunctionType

import torch

from narrowgauge.formats import RandomStream
from narrowgauge.quantization import Cast, QuantContext
from narrowgauge.quantization import emulate as emulate_in_torch
from narrowgauge.quantization.hadamard import transformed

Emulated = tuple[torch.Tensor, torch.Tensor | None]

_is_on: list[bool] = []
_casts: dict[str, Cast] = {}  # those that graphs of this process name


def compile_casts(on: bool) -> None:
    """Make casts on a CPU operators of the graphs compiled from here on, or trace them into these."""
    _is_on[:] = [True] if on else []


def is_operator(x: torch.Tensor, cast: Cast, context: QuantContext) -> bool:
    """Whether a cast is traced as an operator: on a CPU, of a matrix that this process holds alone."""
    is_drawn = isinstance(context.random, RandomStream) or not cast.is_random
    is_alone = context.shard is None and x.device.type == "cpu" and x.ndim == 2
    is_whole = cast.is_scaled and not cast.keep_channels  # channels are kept apart outside of a cast
    return torch.compiler.is_compiling() and is_alone and is_drawn and is_whole and _is_chosen()


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _is_chosen() -> bool:
    return bool(_is_on)


def emulate(x: torch.Tensor, cast: Cast, axis: int, dtype: torch.dtype, context: QuantContext) -> Emulated:
    """`quantization.emulate` as an operator of the graph that is traced."""
    key = offset = None
    if cast.is_random and isinstance(context.random, RandomStream):
        key, offset = context.random.key, context.random.offset
        offset = offset if isinstance(offset, torch.Tensor) else torch.tensor(offset)
    values, scale = _operator(
        x, _name_of(cast), axis, dtype, key, offset, context.signs, context.scale, context.held
    )
    return values, scale if scale.ndim == 0 else None


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
    c = _casts[cast]
    with torch.no_grad():
        if not _is_compiled(c):
            random = None if key is None or offset is None else RandomStream(key, offset)
            context = QuantContext(random, signs, scale, held=held)
            values, tensor_scale = emulate_in_torch(x, c, axis, dtype, context)
        else:
            x = transformed(x, c, axis, QuantContext(signs=signs))
            run = _compiled(replace(c, hadamard=0, signs=()), axis, dtype)
            values, tensor_scale = run(x, key, offset, scale, held)
    assert (values.dtype, tensor_scale is not None) == _form(c, dtype), cast
    return values, x.new_zeros(0, dtype=torch.float32) if tensor_scale is None else tensor_scale


@_operator.register_fake
def _(
    x: torch.Tensor, cast: str, axis: int, dtype: torch.dtype, *_: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    wide, has_scale = _form(_casts[cast], dtype)
    return x.new_empty(x.shape, dtype=wide), x.new_empty(() if has_scale else (0,), dtype=torch.float32)


def _form(cast: Cast, dtype: torch.dtype) -> tuple[torch.dtype, bool]:
    """What `emulate` gives: the dtype of the operand, and whether there is a scale."""
    adds = cast.compensate or cast.is_scaled_by_row or bool(cast.center)
    if cast.block is None and not adds:
        return dtype, True
    is_exact = cast.is_exact_in_bf16 and not adds
    return dtype if is_exact else torch.float32, cast.tensor_scale == "tensor" and not adds


def _is_compiled(cast: Cast) -> bool:
    has_rows = cast.block is not None and cast.block[0] != 1
    return not (has_rows or cast.outliers or cast.center or cast.correct)


@cache
def _compiled(cast: Cast, axis: int, dtype: torch.dtype) -> Callable[..., Emulated]:
    """A compiled cast. Torch counts the variants of a function by its code, so each has a code of its own."""
    cast_only = cast_function(cast, axis, dtype)
    code = cast_only.__code__.replace(co_name=f"cast_{next(_numbers)}")
    own = FunctionType(code, cast_only.__globals__, closure=cast_only.__closure__)
    run: Callable[..., Emulated] = torch.compile(own, dynamic=True, fullgraph=True)
    return run


_numbers = count()


def cast_function(cast: Cast, axis: int, dtype: torch.dtype) -> FunctionType:
    """The function of tensors that is compiled: (x, key, offset, scale, held) to what `emulate` gives."""

    def cast_only(
        x: torch.Tensor,
        key: torch.Tensor | None,
        offset: torch.Tensor | None,
        scale: torch.Tensor | None,
        held: torch.Tensor | None,
    ) -> Emulated:
        random = None if key is None or offset is None else RandomStream(key, offset)
        return emulate_in_torch(x, cast, axis, dtype, QuantContext(random, scale=scale, held=held))

    assert isinstance(cast_only, FunctionType)
    return cast_only
