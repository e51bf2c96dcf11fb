"""A gradient that is stored in a cast: summed over micro-batches in float32, rounded after each of them.

Autograd sums what one backward pass brings to a parameter. The first sum of a step reaches a hook, which
rounds it into one of these states (`nn.weight`) and leaves a `NarrowGradient` in its place, to which autograd
itself adds the sums that follow. Code that reads `parameter.grad`, such as `torch.nn.utils.clip_grad_norm_`,
sees the gradient decoded to float32, and it remains float32 until it is dropped: such code misses no
gradient, at the memory of a wide one.

**Automatic pre-scaling** (`prescale`; FP8-LM, arXiv 2310.18313, equation 3). A gradient's scale has room for
its largest element only, so a later sum over devices may overflow. A scale with more room would lose small
elements. So the scale is multiplied by a factor mu that adapts to the room needed:

    more than 0.001 % of the elements overflowed      mu is halved for the next step
    otherwise                                         mu grows, doubling over 1000 steps

The applied factor is mu rounded down to a power of two, so that multiplication is exact.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, partial
from typing import Any

import torch

from narrowgauge.formats import RandomStream
from narrowgauge.quantization import scales
from narrowgauge.quantization.cast import Cast
from narrowgauge.quantization.sharding.shard import all_reduce_amaxes, all_reduce_shares
from narrowgauge.quantization.state.proxy import Opened, Proxy
from narrowgauge.quantization.state.quantized_state import QuantizedState
from narrowgauge.system.torch_compat import operation_name, wrapper_subclass

LIMIT = 1e-5  # share of elements that may overflow
STEPS_TO_DOUBLE = 1000
UNUSED = -1.0  # replaces the overflow share in a step without gradients


def next_mu(mu: torch.Tensor, overflowed: torch.Tensor) -> torch.Tensor:
    """The factor for the next step, from the current one and the share of elements that overflowed."""
    return torch.where(overflowed > LIMIT, mu / 2, mu * 2 ** (1 / STEPS_TO_DOUBLE))


def applied(mu: torch.Tensor) -> torch.Tensor:
    """The power of two that a scale is multiplied by."""
    return (mu.view(torch.int32) & 0x7F800000).view(torch.float32)


class PreScale:
    """The factor of one gradient, and the share of its elements that overflowed in this step.

    It applies to a stored gradient, where the sum over micro-batches needs room, or to one that is sent,
    where the sum over devices does.

    Attributes:
        mu: The initial factor.
        tensors: "mu" and "overflowed", 0-dim float32, the same objects for its lifetime except after `move`.
    """

    def __init__(self, device: torch.device | str = "cpu", mu: float = 1.0) -> None:
        """A factor of `mu`; 0 if the initial value is not known yet (`begin`)."""
        self.mu = mu
        full = partial(torch.full, (), dtype=torch.float32, device=device)
        self.tensors = {"mu": full(mu), "overflowed": full(UNUSED)}
        self._before: dict[str, torch.Tensor] = {}  # this step

    def begin_step(self) -> None:
        """Update the factor from the last step; `discard_step` returns to the state before."""
        self._before = {name: tensor.clone() for name, tensor in self.tensors.items()}
        self.end_step()

    def scale_for(self, amax: torch.Tensor, cast: Cast) -> torch.Tensor:
        """The encoding scale of a gradient with this amax; both 0-dim float32."""
        amax = torch.where(amax.isfinite(), amax, 0.0)
        encode, _ = scales.fp32_scale(amax, cast.element, cast.power_of_two)
        return (encode * applied(self.tensors["mu"])).clamp(max=scales.FLOAT_MAX)

    def record_overflow(self, share: torch.Tensor) -> None:
        """Record the share of a gradient's elements that overflowed, 0-dim float32."""
        overflowed = self.tensors["overflowed"]
        overflowed.copy_(torch.maximum(overflowed, share))

    def begin(self, devices: int) -> None:
        """Begin with 1 / sqrt(devices), MS-AMP's constant for a sum over devices."""
        mu = self.tensors["mu"]
        mu.copy_(torch.where(mu == 0, devices**-0.5, mu))

    def end_step(self) -> None:
        """Update the factor from the share of the last step, if the factor was used in it."""
        mu, overflowed = self.tensors["mu"], self.tensors["overflowed"]
        mu.copy_(torch.where(overflowed < 0, mu, next_mu(mu, overflowed)))
        overflowed.fill_(UNUSED)

    def discard_step(self) -> None:
        """Return to the state before this step."""
        self.tensors["overflowed"].fill_(UNUSED)
        for name, tensor in self._before.items():
            self.tensors[name].copy_(tensor)

    def move(self, device: torch.device) -> None:
        """Move to another device; from the meta device, start again."""
        if self.tensors["mu"].is_meta and torch.device(device).type != "meta":
            self.tensors = PreScale(device, self.mu).tensors
        self.tensors = {name: t.to(device) for name, t in self.tensors.items()}


class GradientState(QuantizedState):
    """A gradient that is stored in a cast."""

    is_empty: bool = True  # whether nothing has been added since it was dropped
    waits: bool = False  # whether no optimizer has used what was added
    sums: int = 0  # the number of additions since it was dropped
    #: The gradient in float32, in place of the stored codes, once `parameter.grad` has been read
    wide: torch.Tensor | None = None
    #: Whether autograd holds it, as a `NarrowGradient`; anything else there has replaced it
    is_held: bool = False
    #: The random bits of the next addition, from the layer's pass; None rounds to nearest
    stream: RandomStream | None = None

    @cached_property
    def prescale(self) -> PreScale | None:
        """The automatic pre-scaling factor, where the cast has one."""
        return PreScale(self.device) if self.cast.prescale else None

    def add(self, x: torch.Tensor, stream: RandomStream | None) -> None:
        """Add float32 values and round the sum once; with random bits, small values survive on average."""
        add_all([self], [x], [stream])

    def fetch(self) -> None:
        """Start copying from host memory what the next `read` needs: nothing once the gradient is wide."""
        if self.wide is None:
            super().fetch()

    def count_sum(self) -> None:
        """Count an addition."""
        self.sums = 1 if self.is_empty else self.sums + 1
        self.is_empty, self.waits = False, True

    def read(self) -> torch.Tensor:
        """The gradient as new float32 values."""
        return super().read() if self.wide is None else self.wide.to(torch.float32, copy=True)

    def scale_by(self, factor: torch.Tensor) -> None:
        """Multiply by a factor, exactly where it is a power of two."""
        if self.wide is None:
            super().scale_by(factor)
        else:
            self.wide.mul_(factor)

    def widen(self) -> torch.Tensor | None:
        """The gradient in float32, which it remains until dropped; None if it is empty."""
        if self.wide is None and not self.is_empty:
            self.wide = super().read()
        return self.wide

    def replace(self, wide: torch.Tensor | None) -> None:
        """Replace the gradient by another, or drop it."""
        self.wide, self.is_empty, self.is_held, self.waits = wide, wide is None, False, wide is not None
        self.sums = 0 if wide is None else 1

    def discard_step(self) -> None:
        """Undo the changes of this step to the pre-scaling factor."""
        if self.prescale is not None and not self.is_empty:
            self.prescale.discard_step()

    def move(self, device: torch.device) -> None:
        """Move to another device, with the pre-scaling factor."""
        super().move(device)
        if self.wide is not None:
            self.wide = self.wide.to(device)
        if self.prescale is not None:
            self.prescale.move(device)


def add_all(
    gradients: Sequence[GradientState],
    tensors: Iterable[torch.Tensor],
    streams: Iterable[RandomStream | None],
) -> None:
    """Add a float32 tensor to each gradient, as `GradientState.add` does.

    Processes that share gradients agree on all of them in two collectives: one for amaxes, and one for counts
    of elements that overflow under a factor, which are recorded in it.
    """
    sums: list[tuple[GradientState, torch.Tensor, RandomStream | None]] = []
    for g, x, stream in zip(gradients, tensors, streams, strict=True):
        if g.wide is None:
            sums.append((g, x if g.is_empty else g.read() + x, stream))
        else:
            g.wide = g.wide + x
            g.count_sum()
    known = [(g, x) for g, x, _ in sums if g.prescale is not None or g.shares_scale]
    found = all_reduce_amaxes([x for _, x in known], [g.shard for g, _ in known])
    amaxes = {g: amax for (g, _), amax in zip(known, found, strict=True)}
    factors = [(g, x, g.prescale) for g, x in known if g.prescale is not None]
    for g, _, prescale in factors:
        if g.is_empty:
            prescale.begin_step()
    scales = {g: prescale.scale_for(amaxes[g], g.cast) for g, _, prescale in factors}
    overflow = (x.abs() * scales[g] > g.cast.element.max for g, x, _ in factors)
    shares = all_reduce_shares(overflow, [g.shard for g, _, _ in factors])
    for (_, _, prescale), share in zip(factors, shares, strict=True):
        prescale.record_overflow(share)
    for g, x, stream in sums:
        g.write(x, stream, encode_scale=scales.get(g), amax=amaxes.get(g))
        g.count_sum()


AddSum = Callable[[GradientState, torch.Tensor, RandomStream | None], None]


class NarrowGradient(Proxy):
    """A gradient that is stored in a cast, as autograd holds it: float32, of the parameter's shape.

    Autograd adds to it; each sum is rounded once, with the random bits of the layer's last pass. Any other
    operation reads its values. One that writes to it, as that of DistributedDataParallel does with the mean
    over processes, makes it float32 until it is dropped.
    """

    state: GradientState
    add_sum: AddSum

    @staticmethod
    def __new__(cls, like: torch.Tensor, state: GradientState, add_sum: AddSum) -> "NarrowGradient":
        """Make the gradient of a parameter; `add_sum` adds to its state."""
        self = wrapper_subclass(cls, like.shape, like.stride(), torch.float32, like.device)
        self.state, self.add_sum = state, add_sum
        return self

    def values(self) -> torch.Tensor:
        """The gradient as new float32 values."""
        return self.state.read()

    def _open(self, operation: str, opened: Opened) -> torch.Tensor | None:
        return self.state.widen()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Add what autograd brings, or run an operation on the values."""
        first = args[0]
        if isinstance(first, NarrowGradient) and operation_name(func) in ("add_", "add") and len(args) == 2:
            first.add_sum(first.state, args[1], first.state.stream)
            return first
        return super().__torch_dispatch__(func, types, args, kwargs)
