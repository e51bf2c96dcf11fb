"""The largest magnitude of a tensor, handed on by the kernel that wrote it.

A product in FP8 needs max |x| of its operand before it can round it, and would have to read all of it once
more. The kernel that wrote the operand had every number in its registers: each of its programs raises one
number in memory to the largest that it wrote, and that number is attached to the tensor. A maximum is the
same in any order, so the raises may be atomic.

Such a number begins as zero (`new_amax`). One launch makes zeros for many tensors, as it would take longer
than the work of one.

The amax is kept together with the tensor's version, and is no longer valid after any write in place. A view
of the full tensor (`x.flatten(0, 1)`) finds what is attached to the tensor.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from narrowgauge.devices import imagined
from narrowgauge.torch_compat import base_of, version_of

_ATTRIBUTE = "_largest_magnitude"

_NUMBERS = 1024  # that one launch makes; Qwen2.5-1.5B takes 230 in a micro-batch
_APART = 4  # each begins at a multiple of 16 bytes: Triton compiles other code for other addresses

_zeros: dict[Any, Iterator[Tensor]] = {}  # those that nobody has taken yet, by device and stream


def new_amax(device: torch.device) -> Tensor:
    """Zero, 0-dim fp32, which the programs of a kernel raise to the largest magnitude that they write.

    Its bits as int32 have the order of magnitudes, with NaN above infinity. A CUDA graph makes each of
    its zeros itself: one that was made before is zero in the first replay only.
    """
    if _is_recorded(device):
        return torch.zeros((), dtype=torch.float32, device=device)
    stream = torch.cuda.current_stream(device).stream_id if device.type == "cuda" else 0
    key = device, imagined(device), stream
    amax = next(_zeros.get(key, iter(())), None)
    if amax is None:
        with torch.inference_mode(False):  # so that any graph may hold it
            zeros = torch.zeros(_NUMBERS * _APART, dtype=torch.float32, device=device)
        numbers = map(zeros.__getitem__, range(0, len(zeros), _APART))
        amax = next(numbers)
        if type(zeros) is Tensor:  # those of a compiler belong to its context
            _zeros[key] = numbers
    return amax


def begin_amaxes() -> None:
    """Take the numbers of `new_amax` from new memory: every micro-batch then launches the same."""
    _zeros.clear()


def _is_recorded(device: torch.device) -> bool:
    """Whether a CUDA graph records what is launched on a device."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def attach_amax(tensor: Tensor, amax: Tensor) -> None:
    """Attach the largest magnitude of a tensor to it.

    Nothing is attached to a tensor that counts no versions (one made in `torch.inference_mode`).

    Args:
        tensor: The tensor.
        amax: Max |tensor|, 0-dim fp32. A NaN says that the tensor has one.
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
    amax: Tensor | None
    amax, version = getattr(owner, _ATTRIBUTE, (None, None))
    return amax if version == version_of(tensor) else None


def amax_of(tensor: Tensor) -> Tensor:
    """Max |tensor|, 0-dim fp32: the attached one, else from one reading; NaN if an element is.

    The tensor has an element.
    """
    amax = None if torch.compiler.is_compiling() else cached_amax(tensor)
    if amax is None:
        low, high = tensor.aminmax()  # nothing as large as the tensor is written, as by `abs`
        amax = torch.maximum(low.abs(), high.abs()).float()
    return amax


class DelayedScale(NamedTuple):
    """A scale of earlier steps (delayed scaling), and what a tensor tells later ones.

    Attributes:
        encode: The factor of the tensor before rounding, 0-dim fp32; None takes it from the tensor itself.
        seen: 0-dim fp32, raised to the tensor's largest magnitude if that is finite; None raises nothing.
    """

    encode: Tensor | None
    seen: Tensor | None


def raise_amax(seen: Tensor, tensor: Tensor) -> None:
    """Raise `seen`, 0-dim fp32, to max |tensor|, if that is finite and the tensor has an element."""
    if tensor.numel():
        amax = amax_of(tensor)
        torch.maximum(seen, torch.where(amax.isfinite(), amax, 0.0), out=seen)


def _is_full_view(view: Tensor, base: Tensor) -> bool:
    """Whether a view has all elements of its base, each once."""
    return (
        view.dtype == base.dtype
        and view.numel() == base.numel()
        and view.is_contiguous()
        and base.is_contiguous()
    )
