"""The record of a parameter: everything that belongs to it and that torch has no place for.

A parameter carries one attribute of this package, `parameter.narrowgauge`, a `ParamState`. `state_of` reads
it, `ensure_state` attaches one. The optimizer, checkpoints, gauges and the account of memory find there what
layers and sharding have put there:

    nn.weight          weight, master, gradient
    distributed.parallel     shard, holders
    training                 index

A `torch.nn.Parameter` keeps its record as long as it is the same object: through `.to(...)`, `.half()`,
`parameter.data = ...` and `pickle`. Torch makes new objects, without a record, in three places, and each has
somebody who attaches one again:

    copy.deepcopy, `to("meta")`, load_state_dict(assign=True)     `nn.Linear`, for the state of its weight
    fully_shard (FSDP2)                                           `distributed.fsdp`
    the parameter that FSDP2 gathers for a forward pass           nobody: the record is the shard's
"""

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from narrowgauge.formats import torch_dtype
from narrowgauge.quantization.sharding.shard import TensorShard
from narrowgauge.quantization.state.gradient_state import GradientState
from narrowgauge.quantization.state.quantized_state import QuantizedState

_ATTRIBUTE = "narrowgauge"  # the only attribute that a parameter carries
_PLAIN: Any = torch.Tensor.grad  # the descriptor, which subclasses may hide


@dataclass(slots=True, eq=False)
class ParamState:
    """The record of one parameter: all that is kept for it except its numbers and `parameter.grad`.

    Attributes:
        index: The number of the parameter among those of the full model, on which the random bits of its
            state depend; -1 if it is not numbered.
        shard: The shard of the full model's parameter in this process; None for all of it.
        holders: How many have it, over the processes of a pipeline stage: 2 for an embedding that is tied to
            the head, in another stage; 1 / n for an expert, where n processes have different ones.
        gathered_shape: The shape that FSDP2 gathers it to, in a simulated step (a DTensor has this shape).
        weight: The weight in the numbers of a cast; None: the parameter itself is the weight.
        master: A wider copy that the optimizer updates; None: it updates the weight.
        gradient: The sum over micro-batches in the numbers of a cast; None: it is `parameter.grad`.
        version: The count of in-place writes to a parameter with a narrow weight when it was bound to it.
    """

    index: int = -1
    shard: TensorShard | None = None
    holders: Fraction = Fraction(1)
    gathered_shape: torch.Size | None = None
    weight: QuantizedState | None = None
    master: QuantizedState | None = None
    gradient: GradientState | None = None
    version: int = -1

    def by_place(self) -> dict[str, QuantizedState]:
        """The tensors that are kept in casts, under the names that recipes give their places."""
        places = {"weight": self.weight, "master": self.master, "grad": self.gradient}
        return {place: state for place, state in places.items() if state is not None}

    def write(self, x: torch.Tensor) -> None:
        """Give weight and master new numbers, each rounded once."""
        for state in (self.weight, self.master):
            if state is not None:
                state.write(x.to(state.device).float())

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
    """The record of a parameter, to be read: an empty one, not attached, where it carries none."""
    state: ParamState | None = getattr(p, _ATTRIBUTE, None)
    return ParamState() if state is None else state


def ensure_state(p: torch.Tensor) -> ParamState:
    """The record of a parameter, to be changed: one is attached where it carries none."""
    state = state_of(p)
    attach_state(p, state)
    return state


def attach_state(p: torch.Tensor, state: ParamState) -> None:
    """Attach a record to a parameter, in place of the one that it has."""
    setattr(p, _ATTRIBUTE, state)


def shard_of(p: torch.Tensor) -> TensorShard | None:
    """The shard that a parameter's local numbers are; None where this process holds the full parameter."""
    shard = state_of(p).shard
    return None if shard is None or shard.is_full else shard


def local_tensor(t: torch.Tensor) -> torch.Tensor:
    """The part of a parameter, or of its gradient, that is in this process's memory; detached."""
    return t.to_local() if isinstance(t, DTensor) else t.detach()


def like_shard(local: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """Local numbers as a DTensor of the same shards as a parameter; as they are if it is not sharded."""
    if not isinstance(p, DTensor):
        return local
    return DTensor.from_local(
        local, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
    )


def local_part(x: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """The numbers of `x`, which is a DTensor or full, that a parameter has in this process."""
    shard = shard_of(p)
    return local_tensor(x) if shard is None or isinstance(x, DTensor) else shard.local_of(x)


class NarrowGradParameter(torch.nn.Parameter):
    """A parameter whose gradient is kept in a cast; `grad` shows it to code that does not know of it.

    Reading `grad` decodes the gradient to float32, which it stays until it is dropped (`GradientState`).
    """

    @property
    def grad(self) -> torch.Tensor | None:
        """The gradient as a float32 tensor, which may be changed in place; None if there is none."""
        narrow = state_of(self).gradient
        return plain_gradient(self) if narrow is None else narrow.widen()

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        narrow = state_of(self).gradient
        if narrow is None:
            _PLAIN.__set__(self, value)
        else:
            narrow.replace(value)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None


def plain_gradient(p: torch.Tensor) -> torch.Tensor | None:
    """The gradient that autograd keeps for a parameter; None if there is none, or a narrow one."""
    gradient: torch.Tensor | None = _PLAIN.__get__(p)
    return gradient


def has_gradient(p: torch.Tensor) -> bool:
    """Whether the last backward pass reached a parameter."""
    narrow = state_of(p).gradient
    return p.grad is not None if narrow is None else not narrow.is_empty


def gradient_of(p: torch.Tensor) -> torch.Tensor | None:
    """A parameter's local gradient as float32, wherever it is kept; None if there is none."""
    narrow = state_of(p).gradient
    if narrow is not None:
        return None if narrow.is_empty else narrow.read()
    return None if p.grad is None else local_tensor(p.grad).float()


def master_or_weight(p: torch.Tensor) -> torch.Tensor:
    """The widest numbers that exist of a weight, as float32: the master's if it has one."""
    state = state_of(p)
    stored = state.master or state.weight
    return p.detach().float() if stored is None else stored.read()


def stored_tensor(p: torch.Tensor) -> torch.Tensor:
    """The local tensor with a parameter's numbers, or with the codes of a narrow weight."""
    weight = state_of(p).weight
    if weight is None:
        return p.detach()
    first = next(iter(weight.tensors.values()))
    return first.view(torch_dtype(weight.cast.element) or first.dtype)


@torch.no_grad()
def write_weight(p: torch.Tensor, x: torch.Tensor) -> None:
    """Give a parameter new local numbers, its master too; each is rounded once to what it is kept in."""
    state = state_of(p)
    if state.weight is None:
        local_tensor(p).copy_(x)
    else:
        state.write(x)
