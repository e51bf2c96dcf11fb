"""Delayed scaling: a tensor's scale comes from the largest magnitudes it had in the last steps.

The tensor can then be quantized in one pass, without waiting for its own maximum. As in TransformerEngine
(recipe DelayedScaling): after a step with largest magnitude a, the history of `length` entries is shifted by
one and a put in, and

    scale = (max * 2^-margin) / amax      amax: the largest of the history, or its newest entry

The scale stays as it was where that amax is 0. Before the first step it is 1. Several forward passes within a
step (accumulation, recomputation) count as one, by their largest magnitude. A magnitude that is not finite is
left out: its tensor is NaN anyway (`quantize`), and the guard skips the step.

A `HeldAmax` keeps less (`refresh` = n): the largest magnitude that the tensor had in a step, which its tensor
scale comes from in the n - 1 steps after it. In the step itself, and before any, each tensor has its own.

These are the only state of operands that moves the trajectory: `tensors` is what a checkpoint has to hold.
"""

from collections.abc import Callable

import torch

from narrowgauge.formats import Format
from narrowgauge.kernels.amax_cache import amax_of
from narrowgauge.quantization import Cast

FLOAT_MAX = torch.finfo(torch.float32).max


class AmaxHistory(torch.nn.Module):
    """The history of one tensor, in buffers that are no part of a state dict."""

    amax: torch.Tensor
    entries: torch.Tensor
    scale: torch.Tensor

    def __init__(self, cast: Cast) -> None:
        super().__init__()
        self.cast = cast
        self.reset("cpu")

    def reset(self, device: torch.device | str) -> None:
        """Go back to the state before the first step, on a device."""
        self.register_buffer("amax", torch.zeros((), device=device), persistent=False)
        self.register_buffer("entries", torch.zeros(self.cast.history, device=device), persistent=False)
        self.register_buffer("scale", torch.ones((), device=device), persistent=False)

    def tensors(self) -> dict[str, torch.Tensor]:
        """The state by name; the tensors themselves, no copies."""
        return {"amax": self.amax, "entries": self.entries, "scale": self.scale}

    @torch.no_grad()
    def update(self, x: torch.Tensor) -> None:
        """Include a tensor in the largest magnitude of the current step."""
        if x.numel():
            amax = amax_of(x)
            torch.maximum(self.amax, torch.where(amax.isfinite(), amax, 0.0), out=self.amax)

    def discard_step(self) -> None:
        """Forget what was seen in this step: its end then changes nothing."""
        self.amax.zero_()

    @torch.no_grad()
    def end_step(self) -> None:
        """Put the step's largest magnitude into the history, and renew the scale.

        No branch depends on a tensor's value: no compiled graph could hold it, and a GPU would wait for it.
        """
        has_amax = self.amax > 0  # else there was no tensor, or only zeros
        entries = torch.cat((self.entries[1:], self.amax[None]))
        self.entries.copy_(torch.where(has_amax, entries, self.entries))
        self.amax.zero_()
        amax = self.entries.max() if self.cast.history_algorithm == "max" else self.entries[-1]
        self.scale.copy_(torch.where(has_amax, _scale(amax, self.cast.element, self.cast.margin), self.scale))

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "AmaxHistory":
        """Move to another device, but stay float32 when the model's dtype changes."""
        originals = self.tensors()
        super()._apply(fn, recurse)
        for name, tensor in self.tensors().items():
            if tensor.dtype != torch.float32:
                setattr(self, name, originals[name].to(tensor.device))
        return self


class HeldAmax(AmaxHistory):
    """The largest magnitude of one tensor, taken once in `refresh` steps and held in between."""

    held: torch.Tensor
    age: torch.Tensor

    def reset(self, device: torch.device | str) -> None:
        """Go back to the state before the first step, on a device."""
        for name in ("amax", "held", "age"):
            self.register_buffer(name, torch.zeros((), device=device), persistent=False)

    def tensors(self) -> dict[str, torch.Tensor]:
        """The state by name: the magnitude, and the number of steps since it was taken."""
        return {"amax": self.amax, "held": self.held, "age": self.age}

    def current(self) -> torch.Tensor:
        """The magnitude that is held in this step; 0 if each tensor has its own."""
        return torch.where(self.age == 0, 0.0, self.held)

    @torch.no_grad()
    def end_step(self) -> None:
        """Hold the step's largest magnitude, if it is the step to take it; no branch depends on a value."""
        has_amax = self.amax > 0  # else there was no tensor, or only zeros
        self.held.copy_(torch.where(has_amax & (self.age == 0), self.amax, self.held))
        self.age.copy_(torch.where(has_amax, (self.age + 1) % self.cast.refresh, self.age))
        self.amax.zero_()


def history_of(cast: Cast) -> AmaxHistory | None:
    """The history that a cast needs, in its first state; None if it needs none."""
    if cast.refresh:
        return HeldAmax(cast)
    return AmaxHistory(cast) if cast.history else None


def _scale(amax: torch.Tensor, element: Format, margin: int) -> torch.Tensor:
    """fl(max * 2^-margin / amax), at most the largest float, for a positive amax."""
    return (torch.full_like(amax, element.max * 2.0**-margin) / amax).clamp(max=FLOAT_MAX)
