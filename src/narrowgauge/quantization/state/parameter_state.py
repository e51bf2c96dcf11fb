"""The record of a parameter: everything that belongs to it and that torch has no place for.

A parameter carries one attribute of this package, `parameter.narrowgauge`, a `ParamState`. `state_of` reads
it, `ensure_state` attaches one. The optimizer, checkpoints, gauges and the account of memory find there what
layers and sharding have put there:

    nn.weight                weight, master, gradient
    distributed.parallel     shard, holders
    training                 index

A parameter keeps its record as long as it is the same object: through `.to(...)`, `.half()` and
`parameter.data = ...`. A narrow weight is a `NarrowTensor`, which shares the record with its views and copies
it with itself. Torch makes new objects without a record in three places:

    copy.deepcopy of a wide parameter, load_state_dict(assign=True)    `nn.Linear` attaches its record again
    fully_shard (FSDP2)                                                `distributed.fsdp` attaches that of the
                                                                       shard, which its local tensor shares
    the parameter that FSDP2 gathers for a forward pass                has none: the record is the shard's
"""

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Protocol

import torch
from torch.distributed.tensor import DTensor

from narrowgauge.formats import torch_dtype
from narrowgauge.quantization.cast import Cast
from narrowgauge.quantization.sharding.shard import TensorShard
from narrowgauge.quantization.state.gradient_state import GradientState, NarrowGradient
from narrowgauge.quantization.state.quantized_state import QuantizedState
from narrowgauge.system.collectives import all_reduce_max
from narrowgauge.system.torch_compat import FSDPExtension

SMALLEST_NARROW = 4096  # elements of the smallest matrix with low-precision moments
_ATTRIBUTE = "narrowgauge"  # the only attribute that a parameter carries
_PLAIN: Any = torch.Tensor.grad  # the descriptor, which subclasses may hide


class Gathering(FSDPExtension, Protocol):
    """FSDP2's methods of a shard, for the parameter that it belongs to."""

    @property
    def has_gradient(self) -> bool:
        """Whether a gradient of the parameter waits for an optimizer."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class ParamState:
    """The record of one parameter: all that is stored for it except plain values and `parameter.grad`.

    Attributes:
        index: The parameter's position in the full model, on which the random bits of its
            state depend; -1 if it has none.
        shard: The shard of the full model's parameter in this process; None for all of it.
        holders: The number of copies over the processes of a pipeline stage: 2 for an embedding that is tied
            to the head, in another stage; 1 / n for an expert, where n processes have different ones.
        gathering: How FSDP2 sends the shard of a narrow weight (`nn.weight`); None if it does not.
        gradient: The sum over micro-batches in a cast; None: it is `parameter.grad`.
        weight: The weight in a cast; None: the parameter itself holds the weight.
        master: A wider copy that the optimizer updates; None: it updates the weight.
        reads: The number of operations outside the layer that read a narrow weight for a gradient.
        is_traced: Whether its tensors are a tracer's, which knows neither master nor random bits.
    """

    index: int = -1
    shard: TensorShard | None = None
    holders: Fraction = Fraction(1)
    gathering: Gathering | None = None
    gradient: GradientState | None = None
    weight: QuantizedState | None = None
    master: QuantizedState | None = None
    reads: int = 0
    is_traced: bool = False

    @property
    def has_gradient(self) -> bool:
        """Whether a gradient in a cast, or that of a shard, waits for an optimizer."""
        if self.gradient is None:
            return self.gathering is not None and self.gathering.has_gradient
        return self.gradient.waits

    def require_weight(self) -> QuantizedState:
        """The weight of a parameter that is stored in a cast."""
        assert self.weight is not None, "the parameter holds its values itself"
        return self.weight

    def by_place(self) -> dict[str, QuantizedState]:
        """The tensors that are kept in casts, under the names that recipes give their places."""
        places = {"weight": self.weight, "master": self.master, "grad": self.gradient}
        return {place: state for place, state in places.items() if state is not None}

    def stored_values(self) -> torch.Tensor:
        """What a GEMM multiplies with: the stored tensor, or new float32 values if it has scales."""
        weight = self.require_weight()
        return weight.read() if weight.cast.is_scaled else _first_tensor(weight)

    def widest(self) -> torch.Tensor:
        """The widest values that exist of the weight, as a float32 copy."""
        stored = self.master or self.require_weight()
        return stored.read().clone() if stored.cast.name == "fp32" else stored.read()

    def with_weight(self, tensors: Mapping[str, torch.Tensor]) -> "ParamState":
        """A record of the weight alone, with other stored tensors of the same names."""
        weight = copy(self.require_weight())
        weight.tensors, weight.device = dict(tensors), next(iter(tensors.values())).device
        return replace(self, weight=weight, master=None, gradient=None, is_traced=True)

    def write(self, x: torch.Tensor) -> None:
        """Give the master new values and the weight the master's, both rounded to nearest, as in a step."""
        if self.master is not None:
            self.master.write(x.to(self.master.device).float())
            x = self.master.read()
        if self.weight is not None:
            self.weight.write(x.to(self.weight.device).float())

    def load(self, x: torch.Tensor) -> None:
        """Take values from a state dict. Those that the weight has already leave its finer master alone.

        Processes with shards of one scale all write, or none does.
        """
        weight = self.require_weight()
        x = x.to(weight.device).float()
        is_other = x.is_meta or not torch.allclose(weight.read(), x, rtol=0, atol=0, equal_nan=True)
        if weight.shares_scale and not x.is_meta:
            assert weight.shard is not None
            flag = torch.tensor(float(is_other), device=weight.device)
            is_other = bool(all_reduce_max(flag, weight.shard.groups))
        if is_other:
            self.write(x)

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors that a checkpoint holds next to the parameter: `{"weight.scales": tensor, ...}`."""
        for state in self.by_place().values():
            state.wait()
        prescale = self.gradient.prescale if self.gradient else None
        places = {
            "weight": list(self.weight.tensors.items())[1:] if self.weight else [],  # after the parameter
            "master": list(self.master.tensors.items()) if self.master else [],
            "grad": list(prescale.tensors.items()) if prescale else [],
        }
        return {f"{place}.{key}": t for place, named in places.items() for key, t in named}


def state_of(p: torch.Tensor) -> ParamState:
    """The record of a parameter, to be read: an empty one, not attached, if it has none."""
    state: ParamState = getattr(p, _ATTRIBUTE, None) or ParamState()
    return state


def ensure_state(p: torch.Tensor) -> ParamState:
    """The record of a parameter, to be changed: one is attached if it has none."""
    state = state_of(p)
    attach_state(p, state)
    return state


def attach_state(p: torch.Tensor, state: ParamState) -> None:
    """Attach a record to a parameter, replacing its own."""
    setattr(p, _ATTRIBUTE, state)


def shard_of(p: torch.Tensor) -> TensorShard | None:
    """The shard of a parameter that this process holds; None if it holds the full parameter."""
    shard = state_of(p).shard
    return None if shard is None or shard.is_full else shard


def is_large(p: torch.Tensor) -> bool:
    """Whether a parameter is large enough for low-precision moments."""
    shard = shard_of(p)
    return p.ndim >= 2 and (p.numel() if shard is None else shard.shape.numel()) >= SMALLEST_NARROW


def wide_moment(
    p: torch.Tensor, optimizer: torch.optim.Optimizer, casts: Mapping[str, Cast | None]
) -> Cast | None:
    """The cast of a parameter's moment that an optimizer keeps in float32; None if there is none."""
    state = optimizer.state.get(p, {})
    has_plain = any(isinstance(t, torch.Tensor) and t.shape == p.shape for t in state.values())
    for place in ("m", "v") if is_large(p) else ():
        cast, kept = casts[place], state.get(place)
        is_wide = kept.cast.name == "fp32" if isinstance(kept, QuantizedState) else has_plain
        if cast is not None and cast.name != "fp32" and is_wide:
            return cast
    return None


def local_tensor(t: torch.Tensor) -> torch.Tensor:
    """The part of a parameter, or of its gradient, that is in this process's memory; detached."""
    return t.to_local() if isinstance(t, DTensor) else t.detach()


def local_part(x: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """The part of `x`, a DTensor or full tensor, that a parameter holds in this process."""
    shard = shard_of(p)
    return local_tensor(x) if shard is None or isinstance(x, DTensor) else shard.local_of(x)


class NarrowGradParameter(torch.nn.Parameter):
    """A parameter in fp32 whose gradient is stored in a cast; `grad` decodes it for any other code.

    Autograd holds a `NarrowGradient`, to which it adds. Reading `grad` in Python decodes the gradient to
    float32, which it remains until it is dropped: a scaler, clipping and an optimizer's decay write to it
    anyway, and torch's AdamW reads it three times in a step.
    """

    @property
    def grad(self) -> torch.Tensor | None:
        """The gradient as a float32 tensor, which may be changed in place; None if there is none."""
        narrow = _gradient_state(self)
        return plain_gradient(self) if narrow is None else narrow.widen()

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        narrow = _gradient_state(self)
        set_plain_gradient(self, value if narrow is None else None)
        if narrow is not None:
            narrow.replace(value)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None


def _gradient_state(p: torch.Tensor) -> GradientState | None:
    """The gradient in the record of a parameter; None for an alias or a view of one.

    It takes what is in the place of the `NarrowGradient`: the mean of DistributedDataParallel, or what
    autograd has accumulated where the hook of `nn.weight` is on another parameter of the same record, as
    under `torch.nn.utils.parametrize`.
    """
    narrow = state_of(p).gradient if isinstance(p, torch.nn.Parameter) else None
    is_hooked = not isinstance(p, DTensor) and type(p) is not torch.nn.Parameter
    if narrow is not None and is_hooked and (total := plain_gradient(p)) is not None:
        set_plain_gradient(p, None)
        if narrow.is_held or narrow.is_empty:
            narrow.replace(total.detach().float())
        else:
            narrow.add(total.detach().float(), narrow.stream)
    return narrow


def set_plain_gradient(p: torch.Tensor, value: torch.Tensor | None) -> None:
    """Set the gradient to which autograd adds."""
    _PLAIN.__set__(p, value)


def plain_gradient(p: torch.Tensor) -> torch.Tensor | None:
    """The gradient to which autograd adds; None if there is none, or one in a cast."""
    gradient: torch.Tensor | None = _PLAIN.__get__(p)
    return None if isinstance(gradient, NarrowGradient) else gradient


def drop_gradient(p: torch.Tensor) -> None:
    """Drop the gradient of a parameter, wherever it is."""
    if (narrow := state_of(p).gradient) is not None:
        narrow.replace(None)
    set_plain_gradient(p, None)


def has_gradient(p: torch.Tensor) -> bool:
    """Whether the last backward pass reached a parameter."""
    narrow = _gradient_state(p)
    return p.grad is not None if narrow is None else not narrow.is_empty


def gradient_of(p: torch.Tensor) -> torch.Tensor | None:
    """A parameter's local gradient as float32, whether stored in a cast or not; None if there is none."""
    narrow = _gradient_state(p)
    if narrow is not None:
        return None if narrow.is_empty else narrow.read()
    return None if p.grad is None else local_tensor(p.grad).float()


def master_or_weight(p: torch.Tensor) -> torch.Tensor:
    """The widest values that exist of a weight, as float32: the master's if it has one."""
    state = state_of(p)
    stored = state.master or state.weight
    return p.detach().float() if stored is None else stored.read()


def stored_tensor(p: torch.Tensor) -> torch.Tensor:
    """The local tensor with a parameter's values, or with the codes of a narrow weight."""
    weight = state_of(p).weight
    return p.detach() if weight is None else _first_tensor(weight)


def _first_tensor(weight: QuantizedState) -> torch.Tensor:
    """The tensor with the elements of a weight, in the dtype of its element format if torch has one."""
    first = next(iter(weight.tensors.values()))
    return first.view(torch_dtype(weight.cast.element) or first.dtype)


@torch.no_grad()
def write_weight(p: torch.Tensor, x: torch.Tensor) -> None:
    """Give a parameter and its master new local values, each rounded once to its format."""
    state = state_of(p)
    if state.weight is None:
        local_tensor(p).copy_(x)
    else:
        state.write(x)
