"""The largest magnitude of a tensor, handed on by the kernel that wrote it.

A product in FP8 needs max |x| of its operand before it can round it, and would have to read all of it once
more. Who wrote the operand had every number in its registers: it keeps the largest of each part that it
wrote, a few thousand numbers in all, and *tells* them; who needs the largest *is told* it, and only then are
the parts reduced to one number. Nobody waits for a device.

It hangs on the tensor together with the tensor's version: after any write in place it holds no longer. A view
of the whole tensor (`x.flatten(0, 1)`) is told what the tensor was.
"""

import torch
from torch import Tensor

from narrowgauge.torch_compat import base_of, version_of

_TOLD = "_largest_magnitude"


def attach_amax(tensor: Tensor, amax: Tensor) -> None:
    """Say that max |tensor| = max(amax), as fp32: 0-dim, or the largest of each part in any shape.

    A NaN among `amax` says that there is one in the tensor. On a tensor that counts no versions (of
    `torch.inference_mode`) nothing is said.
    """
    if not tensor.is_inference():
        setattr(tensor, _TOLD, (amax, version_of(tensor)))


def cached_amax(tensor: Tensor) -> Tensor | None:
    """Max |tensor|, 0-dim fp32, if it was told and the tensor has not been written to since; else None."""
    if tensor.is_inference():
        return None
    owner, base = tensor, base_of(tensor)
    if base is not None and not hasattr(tensor, _TOLD) and _is_the_whole_of(tensor, base):
        owner = base
    amax, version = getattr(owner, _TOLD, (None, None))
    if amax is None or version != version_of(tensor):
        return None
    if amax.ndim:
        with torch.no_grad():
            amax = amax.amax()
        attach_amax(owner, amax)
    return amax


def _is_the_whole_of(view: Tensor, base: Tensor) -> bool:
    """Whether a view has the elements of its base, each once."""
    return (
        view.dtype == base.dtype
        and view.numel() == base.numel()
        and view.is_contiguous()
        and base.is_contiguous()
    )
