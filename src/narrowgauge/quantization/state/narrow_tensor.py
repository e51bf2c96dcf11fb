"""A weight whose memory is narrow: values to every reader, codes inside.

`NarrowTensor` is a wrapper subclass of `torch.Tensor`, as `QuantizedTensor` of TransformerEngine and
`TorchAOBaseTensor` of torchao are. It has a shape, a device and the dtype that the parameter had before
conversion, and holds no memory: the record (`ParamState`) of the parameter holds the codes, their scales
and perhaps a master.

    an operation that reads       sees the decoded values; autograd records it like any other, so that a
                                  gradient reaches the parameter by every path
    a view (`t`, `view`, `w[0]`)  is another `NarrowTensor` on the same record
    an operation that writes      runs on the widest values (the master's, if there is one) in float32; the
                                  result is rounded once into the weight and once into the master

A write rounds to nearest, which loses most of an optimizer's small updates. So a weight whose gradient waits
for an optimizer is changed by this package's alone, and any other write to it is refused.
"""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.nn.functional import pad

from narrowgauge.quantization.state.parameter_state import (
    NarrowGradParameter,
    ParamState,
    attach_state,
    state_of,
)
from narrowgauge.quantization.state.proxy import Opened, Proxy
from narrowgauge.system.errors import UserError
from narrowgauge.system.torch_compat import (
    as_shard,
    is_collective,
    is_in_place,
    is_view_operation,
    local_tensor,
    operation_name,
    reattach_hooks,
    tree_leaves,
    tree_map_only,
    wait_for,
    wrapper_subclass,
)

View = Callable[[torch.Tensor], torch.Tensor]

_OF_FSDP = ("fsdp_pre_all_gather", "fsdp_post_all_gather")
_OWN = ("narrowgauge", "views", "_is_param", "_local_tensor", "_spec")  # attributes that make a tensor


class NarrowTensor(Proxy):
    """A weight, or a view of one, whose values are stored in a cast.

    Attributes:
        narrowgauge: The record with the stored tensors, which views and aliases share.
        views: The views that lead from the full weight to this tensor.
    """

    narrowgauge: ParamState
    views: tuple[View, ...]
    grad = NarrowGradParameter.grad

    @staticmethod
    def __new__(
        cls, like: torch.Tensor, record: ParamState, dtype: torch.dtype, views: tuple[View, ...] = ()
    ) -> "NarrowTensor":
        """Make a tensor with the shape, strides and device of `like`, with the values of a record."""
        self = wrapper_subclass(cls, like.shape, like.stride(), dtype, record.require_weight().device)
        self.narrowgauge, self.views = record, views
        return self

    def stored_values(self) -> torch.Tensor:
        """What a GEMM multiplies with: the stored tensor, or float32 values if it has scales."""
        return _through(self.views, self.narrowgauge.stored_values())

    def values(self) -> torch.Tensor:
        """The values in this tensor's dtype."""
        return _through(self.views, self.narrowgauge.require_weight().read()).to(self.dtype)

    def _open(self, operation: str, opened: Opened) -> torch.Tensor:
        record = self.narrowgauge
        if record not in opened:
            _require_writable(record, operation)
            opened[record] = record.widest()
        return _through(self.views, opened[record])

    def _close(self, opened: Opened) -> None:
        if self.narrowgauge in opened:
            self.narrowgauge.write(opened.pop(self.narrowgauge))

    def move(self, device: torch.device, dtype: torch.dtype) -> None:
        """Move a parameter with its record, and give it another dtype; the codes remain as they are."""
        assert isinstance(self, torch.nn.Parameter)
        record = self.narrowgauge
        if (device, dtype) != (self.device, self.dtype):
            for state in record.by_place().values():
                state.move(device)
            _become(self, NarrowTensor(self, record, dtype), record)

    @property
    def data(self) -> torch.Tensor:
        """The weight without autograd; writing to it writes to the weight."""
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if value.shape != self.shape:
            raise UserError(
                f"a weight of shape {tuple(self.shape)} that is kept in low precision cannot take data of "
                f"shape {tuple(value.shape)}: convert the model again after the layer has its new shape"
            )
        with torch.no_grad():
            self.detach().copy_(value)

    def data_ptr(self) -> Any:
        """Refuse an address, and a storage: the values lie nowhere in memory."""
        name = self.narrowgauge.require_weight().cast.name
        raise UserError(
            f"a weight that is kept as {name!r} has no memory with its values: take a copy, "
            "weight.detach().clone(), or the model's state_dict()"
        )

    storage = data_ptr

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """A weight with its own record; of a view or a shard, its values."""
        if self.views or not self.is_leaf or self.narrowgauge.gathering is not None:
            copied = self.detach().clone()
        else:
            copied = NarrowTensor(self, deepcopy(self.narrowgauge, memo), self.dtype)
            if copied.narrowgauge.gradient is not None:  # a copied parameter has no gradient
                copied.narrowgauge.gradient.replace(None)
            kept = {k: v for k, v in vars(self).items() if k not in ("narrowgauge", "views")}
            vars(copied).update(deepcopy(kept, memo))
            copied.requires_grad_(self.requires_grad)
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the values: a file then loads without this package, with `weights_only=True`.

        A layer ties its pickled record to the parameter again (`nn.Linear`).
        """
        values = self.detach().clone()
        is_parameter = isinstance(self, torch.nn.Parameter)
        plain = torch.nn.Parameter(values, self.requires_grad) if is_parameter else values
        return plain.__reduce_ex__(protocol)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        """The names of the stored tensors, for tracers."""
        if self.views:
            raise UserError("a view of a weight in low precision cannot be traced: trace the weight itself")
        stored = self.narrowgauge.require_weight().tensors
        return [f"inner_{name}" for name in stored], (self.narrowgauge, self.dtype)

    def __getattr__(self, name: str) -> Any:
        """The stored tensors by the names of `__tensor_flatten__`, and FSDP2's methods of a shard."""
        record = self.__dict__.get("narrowgauge")
        if record is not None and record.gathering is not None and name in _OF_FSDP:
            return getattr(record.gathering, name)
        key = name.removeprefix("inner_")
        if record is None or key == name or record.weight is None or key not in record.weight.tensors:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return record.weight.tensors[key]

    @staticmethod
    def __tensor_unflatten__(
        inner: Mapping[str, torch.Tensor], context: Any, size: Sequence[int], stride: Sequence[int]
    ) -> "NarrowTensor":
        """A weight with other stored tensors, such as a tracer's."""
        record, dtype = context
        stored = {name.removeprefix("inner_"): t for name, t in inner.items()}
        shape = torch.empty(tuple(size), device="meta")
        return NarrowTensor(shape, record.with_weight(stored), dtype)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Take a view, write to the weight, or read its values."""
        kwargs = kwargs or {}
        if is_collective(func):
            return _communicate(func, args, kwargs)
        name = operation_name(func)
        if is_in_place(func):
            is_kept = name == "copy_" and _keeps_master(args[0], args[1])
            return args[0] if is_kept else super().__torch_dispatch__(func, types, args, kwargs)
        first = args[0] if args else None
        if isinstance(first, NarrowTensor) and is_view_operation(func) and "dtype" not in str(func):
            return _view(first, func, args[1:], kwargs)
        if isinstance(first, NarrowTensor) and (name.endswith("_like") or name.startswith("new_")):
            if name == "new_zeros" and first.narrowgauge.gathering is not None and not first.views:
                return _padded(first, torch.Size(args[1]))
            like = torch.empty_strided(first.shape, first.stride(), dtype=first.dtype, device=first.device)
            return func(like, *args[1:], **kwargs)
        if torch.is_grad_enabled():
            leaves = tree_leaves((args, kwargs))
            for record in {x.narrowgauge for x in leaves if isinstance(x, NarrowTensor)}:
                record.reads += 1
        return super().__torch_dispatch__(func, types, args, kwargs)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        """The values, and the cast that stores them."""
        shown = f"shape={tuple(self.shape)}" if self.is_meta else repr(self.detach().clone())
        return f"NarrowTensor({shown}, cast={self.narrowgauge.require_weight().cast.name!r})"


def make_narrow(p: torch.Tensor, record: ParamState) -> None:
    """Turn a parameter into the weight of a record; it stays the same object, for optimizers that hold it.

    Of one that FSDP2 has sharded the local tensor becomes the weight, whose values are float32.
    """
    if isinstance(local_tensor(p), NarrowTensor):
        return
    shape = torch.empty(record.require_weight().shape, device="meta")  # contiguous, as the stored tensors are
    if isinstance(p, DTensor):
        _become(p, as_shard(NarrowTensor(shape, record, torch.float32), p), record)
    else:
        _become(p, NarrowTensor(shape, record, p.dtype), record)


def make_plain(p: torch.nn.Parameter, values: torch.Tensor) -> None:
    """Turn a narrow weight into an ordinary parameter with values in its dtype."""
    _become(p, values.to(p.dtype), state_of(p))


def _become(p: torch.Tensor, content: torch.Tensor, record: ParamState) -> None:
    """Put other content in a parameter, which keeps its attributes and hooks, and gets the record."""
    other = torch.nn.Parameter(content, p.requires_grad)
    vars(other).update({k: v for k, v in vars(p).items() if k not in _OWN})
    try:
        torch.utils.swap_tensors(p, other)
    except RuntimeError as error:
        raise UserError(
            "a weight cannot change its format while an autograd graph or a weak reference holds it: "
            "convert or move the model before the forward pass, or after its results are dropped"
        ) from error
    reattach_hooks(p)
    attach_state(p, record)


def _view(x: NarrowTensor, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The views of a weight that an operation makes: one, or several (`split`, `unbind`)."""
    shape = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
    result = func(shape, *args, **kwargs)
    record, dtype, views = x.narrowgauge, x.dtype, x.views
    if operation_name(func) in ("detach", "alias", "lift_fresh"):
        return NarrowTensor(x, record, dtype, views)

    def view(base: torch.Tensor) -> Any:
        return func(base, *args, **kwargs)

    if isinstance(result, torch.Tensor):
        if views and isinstance(views[-1], _Padding) and result.shape == record.require_weight().shape:
            return NarrowTensor(result, record, dtype, views[:-1])
        return NarrowTensor(result, record, dtype, (*views, view))
    return [NarrowTensor(each, record, dtype, (*views, view, itemgetter(i))) for i, each in enumerate(result)]


@dataclass(frozen=True)
class _Padding:
    """The view of a shard with rows of zeros after its own, which a slice takes off again.

    FSDP2 makes all shards of a parameter as long as the longest, and then keeps such a slice.
    """

    rows: int

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return pad(x, (0, 0) * (x.ndim - 1) + (0, self.rows - len(x)))


def _padded(x: NarrowTensor, size: torch.Size) -> torch.Tensor:
    """What FSDP2 gets for `x.new_zeros(size)` and then copies `x` to; zeros for any other size."""
    shape = torch.empty(size, dtype=x.dtype, device="meta")
    if size[1:] != x.shape[1:] or size[0] <= len(x):
        return torch.zeros_like(shape, device=x.device)
    return NarrowTensor(shape, x.narrowgauge, x.dtype, (_Padding(size[0]),))


def _communicate(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run a collective on the values, wait for it, and write what it gave.

    A sum or a broadcast is of the widest values, and is written on every process, so that weights and masters
    are the same on all of them.
    """
    given: list[tuple[NarrowTensor, torch.Tensor, torch.Tensor]] = []
    is_shared = operation_name(func) in ("broadcast_", "allreduce_")

    def values(x: NarrowTensor) -> torch.Tensor:
        record = x.narrowgauge
        wide = record.widest() if is_shared else record.require_weight().read()
        before = _through(x.views, wide).to(x.dtype).contiguous()
        given.append((x, before, before.clone()))
        return given[-1][2]

    args, kwargs = tree_map_only(NarrowTensor, values, (tuple(args), kwargs))
    result = wait_for(func(*args, **kwargs))
    for x, before, after in given:
        if is_shared or not torch.equal(before, after):
            whole = x.narrowgauge.widest()
            _through(x.views, whole).copy_(after)
            x.narrowgauge.write(whole)
    return result


def _keeps_master(to: Any, of: torch.Tensor) -> bool:
    """Whether a full weight is given the values that it has, which leave its finer master alone.

    DistributedDataParallel does so in process 0 when it wraps a model. Shards of one scale are written by all
    processes or by none (`ParamState.load`), so that they are only asked whether they are copied to
    themselves.
    """
    if not isinstance(to, NarrowTensor) or to.views:
        return False
    record = to.narrowgauge
    if isinstance(of, NarrowTensor) and record is of.narrowgauge:
        return not of.views
    if record.master is None or record.require_weight().shares_scale or to.is_meta or of.is_meta:
        return False
    given = of.values() if isinstance(of, NarrowTensor) else of
    return torch.equal(to.values(), given.to(to.device, to.dtype))


def _through(views: Sequence[View], x: torch.Tensor) -> torch.Tensor:
    for view in views:
        x = view(x)
    return x


def _require_writable(record: ParamState, operation: str) -> None:
    """Refuse a write that a tracer would record without its master, and one that an optimizer may have made.

    An update rounded to nearest is often lost, and two in a row (decay, then step) are rounded twice.
    """
    weight = f"change a weight that is kept as {record.require_weight().cast.name!r}"
    if record.is_traced:
        raise UserError(
            f"{operation} in compiled code cannot {weight}, because compiled code does not know its master: "
            "run it under torch.compiler.set_stance('force_eager')"
        )
    if record.has_gradient:
        raise UserError(
            f"{operation} cannot {weight} while its gradient waits for an optimizer: update it with "
            "narrowgauge.AdamW, or drop the gradient first (zero_grad)"
        )


class SavedWeight(Proxy):
    """The float32 values of a narrow weight in a state dict, copied; a write reaches the weight as well.

    A state dict of an ordinary module aliases its parameters: `state_dict()[name].copy_(x)`, or an average
    over its values, changes the module. It has memory, so that programs may write the copy to a file.
    """

    copied: torch.Tensor  # its values, an ordinary tensor in the same memory
    whole: torch.Tensor  # the float32 values of the weight, of which these are a view, or all
    record: ParamState  # the record of the weight
    is_shard: bool = False  # whether it is a shard's, whose views belong to the copy

    @staticmethod
    def of(copied: torch.Tensor, whole: torch.Tensor, record: ParamState) -> "SavedWeight":
        """Values that share memory with the float32 values `whole` of a record."""
        self = copied.as_subclass(SavedWeight)
        self.copied, self.whole, self.record = copied, whole, record
        return self

    def values(self) -> torch.Tensor:
        """The copy."""
        return self.copied

    def _open(self, operation: str, opened: Opened) -> torch.Tensor:
        return self.copied

    def _close(self, opened: Opened) -> None:
        self.record.write(self.whole)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Let a view of a full weight write to it as well, and run other operations on the values.

        All processes write to a DTensor together, as the scale that they share requires. A checkpoint that is
        loaded in place writes to views of the local tensor, each process by itself: these belong to the copy.
        """
        first = args[0] if args else None
        if not isinstance(first, SavedWeight) or first.is_shard or not is_view_operation(func):
            return super().__torch_dispatch__(func, types, args, kwargs)

        def view(t: torch.Tensor) -> torch.Tensor:
            return SavedWeight.of(t, first.whole, first.record) if t.dtype == first.dtype else t

        return tree_map_only(torch.Tensor, view, func(first.copied, *args[1:], **(kwargs or {})))

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """The values alone."""
        return self.copied.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the values alone."""
        return self.copied.__reduce_ex__(protocol)


def saved_weight(p: torch.Tensor) -> torch.Tensor:
    """The values of a narrow weight, for a state dict; float32."""
    record = state_of(p)
    values = record.require_weight().read().detach()
    saved = SavedWeight.of(values, values, record)
    saved.is_shard = isinstance(p, DTensor)
    return as_shard(saved, p) if isinstance(p, DTensor) else saved
