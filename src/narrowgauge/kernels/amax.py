"""The amax of a tensor, max |x|, passed from the kernel that writes the tensor to the cast that reads it.

A cast with one scale per tensor needs max |x| before it can round the first element, and would have to read
all of x an extra time. The kernel that wrote x had every element in registers: each of its programs raises
one value in memory to the largest magnitude that it wrote. A maximum does not depend on order, so the raises
may be atomic. The value starts as zero (`new_amax`). One launch produces the zeros for many tensors, since it
would take longer than the work for one.

The amax is attached to the tensor by its writer (`attach_amax`), and read by the layer that casts it
(`cast.attached_amax`): in the forward pass by a linear layer after a norm or an activation, in the backward
pass, where autograd carries only a gradient from one function to the next, by one before them. It is valid
for that tensor, or a view of all of it, until the tensor is written in place. What a hook returns, and a sum
of gradients, is another tensor and has none attached.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from narrowgauge.system.collectives import local_amax
from narrowgauge.system.devices import imagined
from narrowgauge.system.torch_compat import version_of

ATTACHED = "_narrowgauge_amax"

_ZEROS_PER_LAUNCH = 1024  # Qwen2.5-1.5B uses 230 per micro-batch
_STRIDE = 4  # each starts at a multiple of 16 bytes: Triton specializes code by alignment

_zeros: dict[Any, Iterator[Tensor]] = {}  # unused zeros, by device and stream


def new_amax(device: torch.device) -> Tensor:
    """Zero, 0-dim fp32, which a kernel's programs raise to the largest magnitude that they write.

    Its bits as int32 are ordered as magnitudes, with NaN above infinity. A CUDA graph creates its zeros
    itself: one created before it would be zero only in the first replay.
    """
    if _is_recorded(device) and not _own_graph:
        return torch.zeros((), dtype=torch.float32, device=device)
    stream = torch.cuda.current_stream(device).stream_id if device.type == "cuda" else 0
    key = device, imagined(device), stream
    amax = next(_zeros.get(key, iter(())), None)
    if amax is None:
        with torch.inference_mode(False):  # so that any graph may use it
            zeros = torch.zeros(_ZEROS_PER_LAUNCH * _STRIDE, dtype=torch.float32, device=device)
        slots = map(zeros.__getitem__, range(0, len(zeros), _STRIDE))
        amax = next(slots)
        if type(zeros) is Tensor:  # a compiler's zeros belong to its context
            _zeros[key] = slots
    return amax


def begin_amaxes() -> None:
    """Take the zeros of `new_amax` from new memory, so that every micro-batch has the same launches."""
    _zeros.clear()


_own_graph: list[bool] = []  # not empty: all zeros belong to the graph that is being recorded


@contextmanager
def amaxes_of_graph() -> Iterator[None]:
    """Record a graph, whose zeros are then made many at a time and given to nothing outside it."""
    begin_amaxes()
    _own_graph.append(True)
    try:
        yield
    finally:
        _own_graph.pop()
        begin_amaxes()


def _is_recorded(device: torch.device) -> bool:
    """Whether a CUDA graph is recording launches on a device."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def attach_amax(tensor: Tensor, amax: Tensor) -> None:
    """Attach max |tensor|, 0-dim fp32 (NaN if an element is NaN), to a tensor that was just written.

    Tensors of `torch.inference_mode` count no writes, so they get none.
    """
    if not tensor.is_inference():
        setattr(tensor, ATTACHED, (amax, version_of(tensor)))


def raise_amax(out: Tensor, tensor: Tensor, amax: Tensor | None = None) -> None:
    """Raise `out`, 0-dim fp32, to max |tensor| if that is finite; `amax` is that maximum, if known."""
    if tensor.numel():
        amax = local_amax(tensor).float() if amax is None else amax
        torch.maximum(out, torch.where(amax.isfinite(), amax, 0.0), out=out)
