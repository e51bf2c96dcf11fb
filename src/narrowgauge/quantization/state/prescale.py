"""Automatic pre-scaling of gradients (FP8-LM, arXiv 2310.18313, equation 3).

A gradient's scale has room for its largest element only, so a later sum over devices may overflow. A scale
with more room would lose small elements. So the scale is multiplied by a factor mu that adapts to the room
needed:

    more than 0.001 % of the elements overflowed      mu is halved for the next step
    otherwise                                         mu grows, doubling over 1000 steps

The applied factor is mu rounded down to a power of two, so that multiplication is exact.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from narrowgauge.quantization import scales
from narrowgauge.quantization.cast import Cast
from narrowgauge.quantization.sharding.amax import all_reduce_amaxes, all_reduce_shares
from narrowgauge.quantization.sharding.shard import TensorShard

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
        initial = {"mu": float(mu), "overflowed": UNUSED}
        self.tensors = {
            name: torch.full((), x, dtype=torch.float32, device=device) for name, x in initial.items()
        }
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

    def see(self, share: torch.Tensor) -> None:
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


class Prescaled(NamedTuple):
    """A gradient, or a `shard` of one, that is about to be stored under a factor; float32."""

    prescale: PreScale
    x: torch.Tensor
    cast: Cast
    shard: TensorShard | None = None

    def beyond(self, scale: torch.Tensor) -> torch.Tensor:
        """A mask of the elements that overflow."""
        return self.x.abs() * scale > self.cast.element.max


def prescaled(gradients: Sequence[Prescaled]) -> list[torch.Tensor]:
    """The encoding scale of each gradient, 0-dim float32; records the share that overflows in its factor.

    Processes with shards agree on all gradients in two collectives: one for amaxes, one for counts of
    elements that overflow.
    """
    shards = [g.shard for g in gradients]
    amaxes = all_reduce_amaxes([g.x for g in gradients], shards)
    encode_scales = [g.prescale.scale_for(amax, g.cast) for g, amax in zip(gradients, amaxes, strict=True)]
    overflow = (g.beyond(scale) for g, scale in zip(gradients, encode_scales, strict=True))
    for g, share in zip(gradients, all_reduce_shares(overflow, shards), strict=True):
        g.prescale.see(share)
    return encode_scales
