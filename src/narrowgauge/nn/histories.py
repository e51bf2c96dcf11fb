"""The state of operands from earlier steps: amax values, and the channels that a layer keeps apart.

**Delayed scaling**: a tensor's scale comes from its amax in earlier steps, so that the tensor is quantized in
one pass, without waiting for its current amax. As in TransformerEngine (recipe DelayedScaling): after a step
with amax a, the history of `length` entries is shifted by one, a is inserted, and

    scale = (max * 2^-margin) / amax      amax: the largest of the history, or its newest entry

If that amax is 0, the scale does not change. Before the first step it is 1. Several forward passes within a
step (accumulation, recomputation) count as one, by their largest amax. A non-finite amax is skipped: its
tensor is NaN anyway (`quantize`), and the guard skips the step.

**Held amax**: `HeldAmax` measures the amax once every `refresh` steps and reuses it for the steps in between.
In a measuring step the tensor's own amax is used.

**Kept channels** (`keep_channels`, TetraJet-v2): a `ChannelChoice` sums the squares of each channel of a
layer's input over `keep_steps` steps, over all tokens of all processes. After each of these steps it chooses
the channels with the largest sums, for every operand of the layer that keeps any. The choice then stands for
good, or until `keep_every` steps have passed since the sums began. Before the end of the first step, nothing
is kept. Passes that are computed twice count twice, for all channels alike.

No other state of operands affects the trajectory: a checkpoint must hold `tensors`.
"""

from collections.abc import Callable, Iterable

import torch

from narrowgauge.quantization import Cast, PreScale, TensorShard, largest_channels, squared_norms
from narrowgauge.recipes.places import CHOOSES
from narrowgauge.system.collectives import Group, all_reduce_flat, all_reduce_max_
from narrowgauge.system.torch_compat import copy_each

_DTYPES = {"squares": torch.float64, "sums": torch.float64, "chosen": torch.bool}  # others are float32


class History(torch.nn.Module):
    """The history of one tensor, in buffers outside the state dict."""

    def __init__(self, cast: Cast, **shapes: tuple[int, ...]) -> None:
        """Start without a step; of the tensors with these shapes the first holds what a step records."""
        super().__init__()
        self.cast, self.names = cast, tuple(shapes)
        for name, shape in shapes.items():
            tensor = torch.empty(shape, dtype=_DTYPES.get(name, torch.float32), device="cpu")
            self.register_buffer(name, tensor, persistent=False)
        self.renew()

    def renew(self) -> None:
        """Return to the state before the first step, in the same tensors."""
        for name, tensor in self.tensors().items():
            tensor.fill_(name == "scale")

    def tensors(self) -> dict[str, torch.Tensor]:
        """The state by name; the tensors themselves, not copies."""
        return {name: getattr(self, name) for name in self.names}

    def discard_step(self) -> None:
        """Forget what was recorded in this step, so that its end changes nothing."""
        next(iter(self.tensors().values())).zero_()

    def end_step(self) -> None:
        """Incorporate what was recorded in this step."""
        raise NotImplementedError

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "History":
        """Move to another device, and from the meta device start again; no dtype changes with the model's."""
        originals = self.tensors()
        super()._apply(fn, recurse)
        for name, tensor in self.tensors().items():
            if tensor.dtype != originals[name].dtype:
                setattr(self, name, originals[name].to(tensor.device))
        if any(original.is_meta for original in originals.values()):
            self.renew()
        return self


class AmaxHistory(History):
    """The amaxes of one tensor."""

    amax: torch.Tensor
    entries: torch.Tensor
    scale: torch.Tensor

    def __init__(self, cast: Cast) -> None:
        super().__init__(cast, amax=(), entries=(cast.history,), scale=())

    @torch.no_grad()
    def end_step(self) -> None:
        """Put the step's amax into the history, and update the scale."""
        end_steps([self])


class HeldAmax(AmaxHistory):
    """The amax of one tensor, measured once every `refresh` steps and held in between."""

    held: torch.Tensor
    age: torch.Tensor  # the number of steps since it was measured

    def __init__(self, cast: Cast) -> None:
        History.__init__(self, cast, amax=(), held=(), age=())

    def current(self) -> torch.Tensor:
        """The amax that is held in this step; 0 if each tensor uses its own."""
        return torch.where(self.age == 0, 0.0, self.held)

    @torch.no_grad()
    def end_step(self) -> None:
        """Hold the step's amax if this is the measuring step; no branch depends on a value."""
        has_amax = self.amax > 0  # 0: the step had no such tensor, or one of zeros
        self.held.copy_(torch.where(has_amax & (self.age == 0), self.amax, self.held))
        self.age.copy_(torch.where(has_amax, (self.age + 1) % self.cast.refresh, self.age))
        self.amax.zero_()


class ChannelChoice(History):
    """The channels that a layer keeps in another cast: the channels of its input with the largest norms."""

    squares: torch.Tensor  # of this step
    sums: torch.Tensor  # of the squares over steps
    chosen: torch.Tensor
    age: torch.Tensor  # in steps

    def __init__(self, cast: Cast, channels: int) -> None:
        """Start without a choice; `channels` counts the full layer's channels, even if it is sharded."""
        super().__init__(cast, squares=(channels,), sums=(channels,), chosen=(channels,), age=())

    @torch.no_grad()
    def update(self, x: torch.Tensor, shard: TensorShard | None) -> None:
        """Add part of the layer's input to the squares of the current step."""
        if x.numel():
            self.squares.add_(squared_norms(x, shard))

    @torch.no_grad()
    def end_step(self) -> None:
        """Choose, if this is one of the choosing steps; no branch depends on a value."""
        steps, every = self.cast.keep_steps, self.cast.keep_every
        has_input = (self.squares > 0).any()  # else there was no step, or only zeros
        counts = has_input & (self.age < steps)
        sums = torch.where(self.age == 0, 0.0, self.sums) + self.squares
        self.sums.copy_(torch.where(counts, sums, self.sums))
        chosen = largest_channels(self.sums, self.cast.keep_channels)
        self.chosen.copy_(torch.where(counts, chosen, self.chosen))
        older = (self.age + 1) % every if every else (self.age + 1).clamp(max=steps)
        self.age.copy_(torch.where(has_input, older, self.age))
        self.squares.zero_()


@torch.no_grad()
def end_steps(memories: Iterable[History | PreScale]) -> None:
    """Call `end_step` on all; histories of one kind together, because each operation is a GPU launch.

    No branch depends on a tensor's value: a compiled graph could not contain it, and a GPU would sync.
    """
    alike: dict[tuple[object, ...], list[AmaxHistory]] = {}
    for memory in memories:
        if type(memory) is AmaxHistory:
            kind = (memory.amax.device, memory.cast)
            alike.setdefault(kind, []).append(memory)
        else:
            memory.end_step()
    for group in alike.values():
        entries, scales, amaxes = ([getattr(h, name) for h in group] for name in ("entries", "scale", "amax"))
        cast, amax_N, entries_NL, scale_N = group[0].cast, *map(torch.stack, (amaxes, entries, scales))
        has_amax_N = amax_N > 0  # 0: the step had no such tensor, or one of zeros
        shifted_NL = torch.cat((entries_NL[:, 1:], amax_N[:, None]), 1)
        entries_NL = torch.where(has_amax_N[:, None], shifted_NL, entries_NL)
        largest_N = entries_NL.amax(1) if cast.history_algorithm == "max" else entries_NL[:, -1]
        new_N = torch.full_like(largest_N, cast.element.max * 2.0**-cast.margin) / largest_N
        scale_N = torch.where(has_amax_N, new_N.clamp(max=torch.finfo(torch.float32).max), scale_N)
        copy_each(entries, list(entries_NL))
        copy_each([*scales, *amaxes], [*scale_N, *torch.zeros_like(amax_N)])


def reduce_histories(modules: Iterable[torch.nn.Module], group: Group) -> None:
    """Reduce what the histories among some modules have recorded in this step over a group."""
    histories = [m for m in modules if isinstance(m, History)]
    all_reduce_max_([h.amax for h in histories if isinstance(h, AmaxHistory)], group)
    all_reduce_flat([h.squares for h in histories if isinstance(h, ChannelChoice)], group)


def history_of(place: str, cast: Cast, channels: int) -> History | None:
    """The history that the cast of a place needs, in its initial state; None if it needs none.

    Of the places that keep some of the full layer's `channels`, CHOOSES chooses for all.
    """
    if cast.keep_channels:
        return ChannelChoice(cast, channels) if place == CHOOSES else None
    if cast.refresh:
        return HeldAmax(cast)
    return AmaxHistory(cast) if cast.history else None
