"""Automatic pre-scaling of gradients (FP8-LM, arXiv 2310.18313, equation 3).

A gradient's scale leaves room for its largest element and no more: what is added up afterwards, over
devices, may overflow, and a scale that always leaves more room loses small elements instead. So the scale is
multiplied by a factor mu that learns how much room is needed:

    more than 0.001 % of the elements overflowed      mu is halved for the next step
    otherwise                                         mu grows, doubling over 1000 steps

What is applied is mu cut to its power of two, so that products with it are exact.
"""

import torch

from narrowgauge.quantization import scales
from narrowgauge.quantization.cast import Cast
from narrowgauge.quantization.part import Part, largest_of

LIMIT = 1e-5  # share of elements that may overflow
STEPS_TO_DOUBLE = 1000
UNUSED = -1.0  # in place of the share of elements that overflowed, in a step that had none to look at


def next_mu(mu: torch.Tensor, overflowed: torch.Tensor) -> torch.Tensor:
    """The factor for the next step from this one's and the share of elements that overflowed with it."""
    return torch.where(overflowed > LIMIT, mu / 2, mu * 2 ** (1 / STEPS_TO_DOUBLE))


def applied(mu: torch.Tensor) -> torch.Tensor:
    """The power of two that a scale is multiplied by."""
    return (mu.view(torch.int32) & 0x7F800000).view(torch.float32)


class PreScale:
    """The factor of one gradient, and the share of its elements that overflowed in this step.

    Of a gradient at rest, where the sum over micro-batches needs room, or of one on the wire, where that over
    devices does.

    Attributes:
        tensors: "mu" and "overflowed", 0-dim float32, the same objects for its whole life but for `move`.
    """

    def __init__(self, device: torch.device | str = "cpu", mu: float = 1.0) -> None:
        """A factor of `mu`; of 0 where it is not known yet what it begins with (`begin`)."""
        overflowed = torch.full((), UNUSED, device=device)
        self.tensors = {"mu": torch.full((), float(mu), device=device), "overflowed": overflowed}
        self._before: dict[str, torch.Tensor] = {}  # this step

    def scale_of(self, x: torch.Tensor, cast: Cast, is_first: bool, part: Part | None = None) -> torch.Tensor:
        """The encoding scale (0-dim float32) of a gradient, or of a `part` of one; `is_first` in its step."""
        mu, overflowed = self.tensors["mu"], self.tensors["overflowed"]
        if is_first:
            self._before = {name: tensor.clone() for name, tensor in self.tensors.items()}
            self.end_step()
        magnitudes = x.abs()
        amax = magnitudes.max() if x.numel() else x.new_zeros(())
        if part is not None:
            amax = largest_of(amax, part.groups)
        own, _ = scales.fp32_scale(torch.where(amax.isfinite(), amax, 0.0), cast.element, cast.power_of_two)
        scale = (own * applied(mu)).clamp(max=scales.FLOAT_MAX)
        beyond = magnitudes * scale > cast.element.max
        share = beyond.float().mean() if part is None else part.share_of(beyond)
        overflowed.copy_(torch.maximum(overflowed, share))
        return scale

    def begin(self, devices: int) -> None:
        """Begin with 1 / sqrt(devices), MS-AMP's constant, where the sum is one over so many devices."""
        mu = self.tensors["mu"]
        mu.copy_(torch.where(mu == 0, devices**-0.5, mu))

    def end_step(self) -> None:
        """Learn from the share of the step that is over, if it was used in that."""
        mu, overflowed = self.tensors["mu"], self.tensors["overflowed"]
        mu.copy_(torch.where(overflowed < 0, mu, next_mu(mu, overflowed)))
        overflowed.fill_(UNUSED)

    def forget_step(self) -> None:
        """Be as before this step."""
        self.tensors["overflowed"].fill_(UNUSED)
        for name, tensor in self._before.items():
            self.tensors[name].copy_(tensor)

    def move(self, device: torch.device) -> None:
        """Go to another device."""
        self.tensors = {name: t.to(device) for name, t in self.tensors.items()}
