"""The amax of a tensor, max |x|, passed from the kernel that writes the tensor to the cast that reads it.

A cast with one scale per tensor needs max |x| before it can round the first element, and would have to read
all of x an extra time. The kernel that wrote x had every element in registers: each of its programs raises
one value in memory to the largest magnitude that it wrote. A maximum does not depend on order, so the raises
may be atomic. The value starts as zero (`new_amax`). One launch produces the zeros for many tensors, since it
would take longer than the work for one.

In the forward pass, the amax is passed explicitly: a norm or an activation returns a `KnownAmax` with its
result, the model hands it to the layer that reads the result (`call`), and the layer puts it into the cast's
context (`QuantContext.amax`). A hook may run between the two modules, so the record refers to its tensor: it
is valid for that tensor, or a view of all of it, until the tensor is written in place.

In the backward pass, autograd carries only a gradient from one function to the next. There the amax is
attached to the gradient (`send_back`), and only a linear layer reads it (`amax_of_gradient`). A sum of
gradients, or the result of a hook, is another tensor and has none attached.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from narrowgauge.devices import imagined
from narrowgauge.torch_compat import base_of, version_of

_ON_GRADIENT = "_narrowgauge_amax"

_NUMBERS = 1024  # zeros per launch; Qwen2.5-1.5B uses 230 per micro-batch
_APART = 4  # each starts at a multiple of 16 bytes: Triton specializes code by alignment

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
            zeros = torch.zeros(_NUMBERS * _APART, dtype=torch.float32, device=device)
        numbers = map(zeros.__getitem__, range(0, len(zeros), _APART))
        amax = next(numbers)
        if type(zeros) is Tensor:  # a compiler's zeros belong to its context
            _zeros[key] = numbers
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


class KnownAmax(NamedTuple):
    """The amax of a tensor, from the kernel that wrote it.

    Attributes:
        amax: Max |tensor|, 0-dim fp32; NaN if an element is NaN.
        tensor: The tensor.
        version: The version of the tensor when it was written.
    """

    amax: Tensor
    tensor: Tensor
    version: int

    def of(self, x: Tensor) -> Tensor | None:
        """Max |x| if `x` is the tensor, or a view of all of it, and was not written to since."""
        is_it = x is self.tensor or _is_full_view(x, self.tensor)
        return self.amax if is_it and version_of(x) == self.version else None


def known_amax(tensor: Tensor, amax: Tensor) -> KnownAmax | None:
    """The record of a tensor's amax; None in `torch.inference_mode`, where tensors have no version."""
    return None if tensor.is_inference() else KnownAmax(amax, tensor, version_of(tensor))


def call(
    layer: Callable[..., Tensor], x: Tensor, known: Sequence[KnownAmax | None], **options: Any
) -> Tensor:
    """`layer(x)`, passing the record of x's amax (one or none) if the layer accepts it (`takes_amax`)."""
    if any(known) and getattr(layer, "takes_amax", False):
        options["known"] = known[0]
    return layer(x, **options)


def send_back(gradient: Tensor, amax: Tensor) -> None:
    """Attach the amax of a gradient (0-dim fp32) to it, for the backward pass that autograd calls next."""
    if not gradient.is_inference():
        setattr(gradient, _ON_GRADIENT, (amax, version_of(gradient)))


def amax_of_gradient(gradient: Tensor) -> Tensor | None:
    """The amax attached to a gradient, or to the tensor that it is a view of; None if it was modified."""
    if torch.compiler.is_compiling() or gradient.is_inference():
        return None
    owner, base = gradient, base_of(gradient)
    if base is not None and not hasattr(gradient, _ON_GRADIENT) and _is_full_view(gradient, base):
        owner = base
    amax: Tensor | None
    amax, version = getattr(owner, _ON_GRADIENT, (None, None))
    return amax if version == version_of(gradient) else None


def amax_of(tensor: Tensor) -> Tensor:
    """Max |tensor|, 0-dim fp32, from one read of at least one element; NaN if an element is NaN."""
    low, high = tensor.aminmax()  # unlike `abs`, writes nothing as large as the tensor
    return torch.maximum(low.abs(), high.abs()).float()


class DelayedScale(NamedTuple):
    """A scale from earlier steps (delayed scaling), and the amax recorded for later ones.

    Attributes:
        encode: The factor of the tensor before rounding, 0-dim fp32; None computes it from the tensor itself.
        seen: 0-dim fp32, raised to the tensor's amax if that is finite; None records nothing.
    """

    encode: Tensor | None
    seen: Tensor | None


def raise_amax(seen: Tensor, tensor: Tensor, amax: Tensor | None = None) -> None:
    """Raise `seen`, 0-dim fp32, to max |tensor| if that is finite; `amax` is that maximum, if known."""
    if tensor.numel():
        amax = amax_of(tensor) if amax is None else amax
        torch.maximum(seen, torch.where(amax.isfinite(), amax, 0.0), out=seen)


def _is_full_view(view: Tensor, base: Tensor) -> bool:
    """Whether a view has all elements of a tensor, each once."""
    return (
        base_of(view) is (base if base_of(base) is None else base_of(base))
        and view.dtype == base.dtype
        and view.numel() == base.numel()
        and view.storage_offset() == base.storage_offset()
        and view.is_contiguous()
        and base.is_contiguous()
    )
