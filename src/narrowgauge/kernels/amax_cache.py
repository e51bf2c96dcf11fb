"""The largest magnitude of a tensor, handed on by the kernel that wrote it.

A product in FP8 needs max |x| of its operand before it can round it, and would have to read all of it once
more. The kernel that wrote the operand had every number in its registers: it keeps the largest of each tile
that it wrote, a few thousand numbers in all, and attaches them to the tensor. They are reduced to one number
only when somebody asks for it, without waiting for a device.

The amax is kept together with the tensor's version, and is no longer valid after any write in place. A view
of the full tensor (`x.flatten(0, 1)`) finds what is attached to the tensor.
"""

import torch
from torch import Tensor

from narrowgauge.torch_compat import base_of, version_of

_ATTRIBUTE = "_largest_magnitude"


def attach_amax(tensor: Tensor, amax: Tensor) -> None:
    """Attach the largest magnitude of a tensor to it.

    Nothing is attached to a tensor that counts no versions (one made in `torch.inference_mode`).

    Args:
        tensor: The tensor.
        amax: fp32 with max |tensor| = max(amax): 0-dim, or the largest of each tile in any shape. A NaN says
            that the tensor has one.
    """
    if not tensor.is_inference():
        setattr(tensor, _ATTRIBUTE, (amax, version_of(tensor)))


def cached_amax(tensor: Tensor) -> Tensor | None:
    """Max |tensor|, 0-dim fp32, if it is attached and the tensor was not written to since; else None."""
    if tensor.is_inference():
        return None
    owner, base = tensor, base_of(tensor)
    if base is not None and not hasattr(tensor, _ATTRIBUTE) and _is_full_view(tensor, base):
        owner = base
    amax, version = getattr(owner, _ATTRIBUTE, (None, None))
    if amax is None or version != version_of(tensor):
        return None
    if amax.ndim:
        with torch.no_grad():
            amax = amax.amax()
        attach_amax(owner, amax)
    return amax


def amax_of(tensor: Tensor) -> Tensor:
    """Max |tensor|, 0-dim fp32: the attached one, else from one reading; NaN if an element is.

    The tensor has an element.
    """
    amax = None if torch.compiler.is_compiling() else cached_amax(tensor)
    if amax is None:
        low, high = tensor.aminmax()  # nothing as large as the tensor is written, as by `abs`
        amax = torch.maximum(low.abs(), high.abs()).float()
    return amax


def _is_full_view(view: Tensor, base: Tensor) -> bool:
    """Whether a view has all elements of its base, each once."""
    return (
        view.dtype == base.dtype
        and view.numel() == base.numel()
        and view.is_contiguous()
        and base.is_contiguous()
    )
