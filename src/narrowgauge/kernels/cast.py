"""Quantization and emulation in one pass over a matrix, on a GPU with Triton.

The references are `quantization.quantize_in_context` and `quantization.emulate`, which give the same codes,
scales and values; only a Hadamard transform may differ in its last bit, because its sums have no fixed order.
Bytes per element of a bf16 tensor, read and written (the reference makes a dozen passes in float32):

    blocks (MX, FP8 1x128, 16x16 ...)       2 + 1 for codes, 2 + 2 for values (4 where their scale is fp32)
    NVFP4                                   2 more: its tensor scale needs the amax first
    a scale per row, 128 x 128, or tensor   2 more for that; none if the context has the amax (`kernels.amax`)
    codes along both axes, from one read    1 more for the second

The reference computes casts without a kernel (`quantization.passes.implementations`), and casts of sharded
tensors, of tensors that are not 2-D, with random bits that are not a `RandomStream`, and in code under
torch.compile, which fuses these passes on a GPU.

In a graph that torch compiles for a CPU a cast is one operator, which runs the C passes: a compiled model has
the same casts as an eager one, bit for bit. A traced cast is some 60 operations, six times per layer, and
takes minutes to compile. Casts of sharded tensors and casts with kept channels are still traced, as are all
casts where there is no C compiler.
"""

import os
from collections.abc import Sequence
from dataclasses import replace

import torch

from narrowgauge.formats import RandomStream
from narrowgauge.kernels.amax import ATTACHED, raise_amax
from narrowgauge.kernels.dispatch import use_kernels
from narrowgauge.quantization import DEFAULT_CONTEXT, Cast, QTensor, QuantContext
from narrowgauge.quantization.keys import Consumer
from narrowgauge.quantization.passes.implementations import kernel_gap, rows_gap
from narrowgauge.quantization.passes.in_c import c_library
from narrowgauge.quantization.quantize import emulate_in_context, operand_dtype, quantize_in_context
from narrowgauge.quantization.transforms import quantile_ranks
from narrowgauge.system.collectives import local_amax
from narrowgauge.system.torch_compat import base_of, version_of


def attached_amax(x: torch.Tensor) -> torch.Tensor | None:
    """The amax attached to `x`, or to the tensor of which it is a full view; None if that was modified."""
    if torch.compiler.is_compiling() or x.is_inference():
        return None
    owner = x if hasattr(x, ATTACHED) else base_of(x)
    known: tuple[torch.Tensor, int] | None = getattr(owner, ATTACHED, None)
    if owner is None or known is None or known[1] != version_of(x):
        return None
    return known[0] if owner is x or _is_full_view(x, owner) else None


def quantize(
    x: torch.Tensor, cast: Cast, axis: int = -1, context: QuantContext = DEFAULT_CONTEXT, both: bool = False
) -> tuple[QTensor, torch.Tensor | None]:
    """`quantization.quantize_in_context` of a matrix; `axis` is -1 or 0.

    Returns:
        The quantized tensor and, with `both`, the same codes contiguous along the other axis, if a kernel
        writes both (else None; only casts whose values do not depend on the axis have them).
    """
    has_kernel = _has_kernel(x, cast, context)
    context = _record_amax(x, cast, context, has_kernel)
    if has_kernel:
        from narrowgauge.kernels.triton.cast_launch import quantized

        return quantized(x, cast, axis, context, both)
    return quantize_in_context(x, cast, axis, _with_limits(x, cast, context)), None


def quantize_in_tiles(
    x: torch.Tensor, cast: Cast, axis: int = -1, context: QuantContext = DEFAULT_CONTEXT
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """`quantize` of a matrix whose `axis` is contracted, laid out for the hardware by the kernel that casts.

    Returns:
        As (rows, contraction): packed codes, uint8, rows and columns padded with zeros to what units read;
        the codes of scales, uint8, one row in tiles (`nn.gemm.tiled`); the tensor's scale, 0-dim float32.
        None where no kernel does it: elsewhere `nn.gemm.arguments` lays codes and scales out.
    """
    in_blocks = cast.block is not None and cast.block[1] > 0 and cast.block[0] < 128
    has_tiles = in_blocks and cast.scale in ("e8m0", "e4m3") and cast.element.bits in (4, 8)
    if not has_tiles or cast.has_rounded_scales or not _has_kernel(x, cast, context):
        return None
    from narrowgauge.kernels.triton.cast_launch import in_tiles

    return in_tiles(x, cast, axis, _record_amax(x, cast, context, has_kernel=True))


def amaxes_of(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Max |x| of each of n tensors on one device, (n,) fp32; NaN if an element is NaN, 0 if it is empty.

    A kernel reads each tensor once, in one launch.
    """
    if any(map(use_kernels, tensors)):
        from narrowgauge.kernels.triton.cast_launch import launch_amaxes

        return launch_amaxes(tensors)
    return torch.stack([local_amax(x) for x in tensors]).float()


def codes_under(x: torch.Tensor, cast: Cast, encode: torch.Tensor) -> torch.Tensor:
    """The uint8 codes of a matrix under one known scale, 0-dim fp32, of finite values: reads it once."""
    return quantize(x, cast, -1, QuantContext(scale=encode, amax=encode))[0].codes


def emulate(
    x: torch.Tensor, cast: Cast, axis: int, dtype: torch.dtype, context: QuantContext = DEFAULT_CONTEXT
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`quantization.emulate` of a matrix; `axis` is -1 or 0."""
    has_kernel = _has_kernel(x, cast, context)
    context = _record_amax(x, cast, context, has_kernel)
    if has_kernel:
        from narrowgauge.kernels.triton.cast_launch import emulated

        return emulated(x, cast, axis, dtype, context)
    if _is_operator(x, cast, context):
        return _emulate_as_operator(x, cast, axis, dtype, context)
    return emulate_in_context(x, cast, axis, dtype, _with_limits(x, cast, context))


@torch.no_grad()
def emulate_rows(
    x: torch.Tensor, cast: Cast, context: QuantContext = DEFAULT_CONTEXT
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None] | None:
    """`emulate` of a matrix along its rows, in parts: x ~ values * scale + rest.

    Every operand of the GEMM is then in bf16; `emulate` would widen it to float32. The rest, which was
    clamped off, is exact up to twice the limit; beyond that it is rounded to bf16, as x once was.

    Returns:
        Values in bf16, scales in float32, one per row, and the rest in bf16 (None if nothing is added back);
        None where no kernel computes them.
    """
    if not use_kernels(x) or rows_gap(cast):
        return None
    is_own = context.shard is None and context.scale is None and context.held is None
    has_rows = x.ndim == 2 and x.stride(1) == 1 and (x.dtype == torch.bfloat16 or not cast.outliers)
    if not (is_own and has_rows):
        return None
    from narrowgauge.kernels.triton.fp4_rows import launch_rows

    limits = _limits(x, cast.outliers) if cast.outliers else None
    return launch_rows(x, cast, limits, bool(cast.outliers) and cast.compensate)


def random_signs(key: torch.Tensor, size: int) -> torch.Tensor:
    """The signs of a Hadamard transform of `size`, +1 or -1, from the key of a stream (int32, two words)."""
    if use_kernels(key):
        from narrowgauge.kernels.triton.rounding import launch_signs

        return launch_signs(key, size)
    return 1 - 2 * (RandomStream(key).bits((size,)) & 1)


def _with_limits(x: torch.Tensor, cast: Cast, context: QuantContext) -> QuantContext:
    """The context with the quantiles of `x` that its outliers are clamped to, where the kernel computes them.

    Torch selects among all elements of a tensor in one thread block, which takes tens of milliseconds.
    """
    is_whole = context.shard is None and not cast.hadamard
    if not (cast.outliers and is_whole and x.dtype == torch.bfloat16 and use_kernels(x)):
        return context
    return replace(context, limits=_limits(x.detach(), cast.outliers))


def _limits(x: torch.Tensor, quantile: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The quantiles 1 - `quantile` and `quantile` of a bf16 matrix, by a kernel."""
    from narrowgauge.kernels.triton.fp4_rows import launch_ranked

    flat = x if x.is_contiguous() else x.T.contiguous()  # the order of elements does not matter
    return launch_ranked(flat, *quantile_ranks(x.numel(), quantile))


def _has_kernel(x: torch.Tensor, cast: Cast, context: QuantContext) -> bool:
    """Whether a Triton kernel computes the cast of this tensor in this context."""
    if not cast.is_scaled or x.ndim != 2 or not use_kernels(x) or kernel_gap(cast):
        return False
    is_drawn = isinstance(context.random, RandomStream) or cast.rounding != "stochastic"
    return is_drawn and context.shard is None and context.held is None


def _record_amax(x: torch.Tensor, cast: Cast, context: QuantContext, has_kernel: bool) -> QuantContext:
    """The context without `amax_out`, after raising it; unchanged if the cast's kernel raises it."""
    if context.amax_out is None or (has_kernel and context.scale is not None and not cast.hadamard):
        return context
    raise_amax(context.amax_out, x, context.amax)
    return replace(context, amax_out=None)


_casts: dict[str, Cast] = {}  # the casts that this process's graphs refer to by name


def _is_operator(x: torch.Tensor, cast: Cast, context: QuantContext) -> bool:
    """Whether a cast is traced as an operator."""
    if not torch.compiler.is_compiling() or x.device.type != "cpu":
        return False
    is_drawn = isinstance(context.random, RandomStream) or not cast.is_random
    is_alone = context.shard is None and context.limits is None and not cast.unsupported[Consumer.OPERATOR]
    return is_alone and is_drawn and cast.is_scaled and _has_c()


def _emulate_as_operator(
    x: torch.Tensor, cast: Cast, axis: int, dtype: torch.dtype, context: QuantContext
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`quantization.emulate` as an operator of the graph that is traced."""
    key = offset = None
    if cast.is_random and isinstance(context.random, RandomStream):
        key, offset = context.random.key, context.random.offset
        offset = offset if isinstance(offset, torch.Tensor) else torch.tensor(offset, device="cpu")
    name = _name_of(cast)
    values, scale = _operator(x, name, axis, dtype, key, offset, context.signs, context.scale, context.held)
    return values, scale if scale.ndim == 0 else None


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _has_c() -> bool:
    return os.environ.get("NARROWGAUGE_KERNELS") != "0" and c_library() is not None


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _name_of(cast: Cast) -> str:
    """A full description of a cast, so that a graph from the compiler's disk cache means the same cast."""
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
        values, of_tensor = emulate_in_context(x, _casts[cast], axis, dtype, context)
    assert (of_tensor is not None) == _casts[cast].scales_result, cast
    return values.contiguous(), values.new_zeros(0, dtype=torch.float32) if of_tensor is None else of_tensor


@_operator.register_fake
def _(
    x: torch.Tensor, cast: str, axis: int, dtype: torch.dtype, *_: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    c, shape = _casts[cast], list(x.shape)
    if c.hadamard:
        shape[axis] = (shape[axis] + c.hadamard - 1) // c.hadamard * c.hadamard
    operand = x.new_empty(shape, dtype=operand_dtype(c, dtype))
    return operand, x.new_empty(() if c.scales_result else (0,), dtype=torch.float32)


def _is_full_view(view: torch.Tensor, base: torch.Tensor) -> bool:
    """Whether a view has all elements of its base, each once."""
    return (
        view.dtype == base.dtype
        and view.numel() == base.numel()
        and view.storage_offset() == base.storage_offset()
        and view.is_contiguous()
        and base.is_contiguous()
    )
