"""The amax of a tensor, max |x|, handed from the kernel that writes the tensor to the cast that reads it.

A cast with one scale a tensor needs max |x| before it can round the first element, and would have to read all
of x once more. The kernel that wrote x had every element in registers: each of its programs raises one value
in memory to the largest magnitude that it wrote. A maximum is the same in any order, so the raises may be
atomic. Such a value begins as zero (`new_amax`). One launch makes zeros for many tensors, as it would take
longer than the work of one.

Forward, the amax is passed: a norm or an activation returns a `KnownAmax` beside its result, the model hands
it to the layer that reads the result (`call`), and the layer puts it into the cast's context
(`QuantContext.amax`). A hook may stand between the two modules, so the record names its tensor: it counts for
that tensor, or a view of all of it, as long as nothing was written in place.

Backward, autograd carries a gradient from one function to the next, and nothing else. There the amax rides on
the gradient (`send_back`), and only a linear layer reads it (`amax_of_gradient`). A sum of gradients, or what
a hook returns, is another tensor and carries none.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from narrowgauge.devices import imagined
from narrowgauge.torch_compat import base_of, version_of

_ON_GRADIENT = "_narrowgauge_amax"

_NUMBERS = 1024  # zeros of one launch; Qwen2.5-1.5B takes 230 in a micro-batch
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


class KnownAmax(NamedTuple):
    """The amax of a tensor, from the kernel that wrote it.

    Attributes:
        amax: Max |tensor|, 0-dim fp32. It is NaN if an element is.
        tensor: The tensor.
        version: The version of the tensor when it was written.
    """

    amax: Tensor
    tensor: Tensor
    version: int

    def of(self, x: Tensor) -> Tensor | None:
        """Max |x| if `x` is the tensor, or a view of all of it, and nothing was written to it since."""
        is_it = x is self.tensor or _is_full_view(x, self.tensor)
        return self.amax if is_it and version_of(x) == self.version else None


def known_amax(tensor: Tensor, amax: Tensor) -> KnownAmax | None:
    """The record of a tensor's amax; None for a tensor of `torch.inference_mode`, which has no version."""
    return None if tensor.is_inference() else KnownAmax(amax, tensor, version_of(tensor))


def call(
    layer: Callable[..., Tensor], x: Tensor, known: Sequence[KnownAmax | None], **options: Any
) -> Tensor:
    """`layer(x)`, with the record of x's amax (one or none) if the layer takes it (`takes_amax`)."""
    if any(known) and getattr(layer, "takes_amax", False):
        options["known"] = known[0]
    return layer(x, **options)


def send_back(gradient: Tensor, amax: Tensor) -> None:
    """Let the amax of a gradient (0-dim fp32) ride on it, to the backward pass that autograd calls next."""
    if not gradient.is_inference():
        setattr(gradient, _ON_GRADIENT, (amax, version_of(gradient)))


def amax_of_gradient(gradient: Tensor) -> Tensor | None:
    """The amax that rides on a gradient, or on the tensor that it is a view of; None if it has changed."""
    if torch.compiler.is_compiling() or gradient.is_inference():
        return None
    owner, base = gradient, base_of(gradient)
    if base is not None and not hasattr(gradient, _ON_GRADIENT) and _is_full_view(gradient, base):
        owner = base
    amax: Tensor | None
    amax, version = getattr(owner, _ON_GRADIENT, (None, None))
    return amax if version == version_of(gradient) else None


def amax_of(tensor: Tensor) -> Tensor:
    """Max |tensor|, 0-dim fp32, from one reading of at least one element; NaN if an element is."""
    low, high = tensor.aminmax()  # nothing as large as the tensor is written, as by `abs`
    return torch.maximum(low.abs(), high.abs()).float()


class DelayedScale(NamedTuple):
    """A scale of earlier steps (delayed scaling), and what a tensor leaves for later ones.

    Attributes:
        encode: The factor of the tensor before rounding, 0-dim fp32; None takes it from the tensor itself.
        seen: 0-dim fp32, raised to the tensor's largest magnitude if that is finite; None raises nothing.
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
