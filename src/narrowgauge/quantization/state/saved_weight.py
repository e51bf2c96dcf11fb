"""A narrow weight in the state dict of its module: float32 values, and a write to them reaches the weight.

A state dict of an ordinary module aliases its parameters, and `state_dict()[name].copy_(x)` or an average
over `state_dict().values()` changes the module. The same happens here, after each operation that writes.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from narrowgauge.quantization.state.parameter_state import ParamState, state_of
from narrowgauge.system.torch_compat import (
    Wrapper,
    as_shard,
    has_result,
    storage_key,
    tree_leaves,
    tree_map_only,
    version_of,
    without_torch_function,
    wrapper_subclass,
    written_arguments,
)


class SavedWeight(torch.Tensor):
    """The values of a narrow weight in a state dict, copied; a write reaches the weight as well.

    Attributes:
        whole: The float32 values of which this tensor is a view, or all of.
        record: The record of the weight.
    """

    whole: torch.Tensor
    record: ParamState

    @staticmethod
    def of(values: torch.Tensor, whole: torch.Tensor, record: ParamState) -> "SavedWeight":
        """Values that share memory with the float32 values `whole` of a record."""
        self = values.as_subclass(SavedWeight)
        self.whole, self.record = whole, record
        return self

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation on the values, and write to the weight what it has changed."""
        kwargs = kwargs or {}
        with without_torch_function():
            given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, SavedWeight)]
            before = [version_of(x) for x in given]
            result = func(*args, **kwargs)
            changed = {id(x.record): x for x, v in zip(given, before, strict=True) if version_of(x) != v}
            for x in changed.values():
                x.record.write(x.whole)

            def owned(t: torch.Tensor) -> torch.Tensor:
                for x in given:
                    if t is not x and t.dtype == x.dtype and _share_memory(t, x):
                        return SavedWeight.of(t, x.whole, x.record)
                return t

            return tree_map_only(torch.Tensor, owned, result)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """The values alone."""
        return self.as_subclass(torch.Tensor).clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the values alone."""
        return self.as_subclass(torch.Tensor).detach().__reduce_ex__(protocol)


def _share_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return storage_key(a.untyped_storage()) == storage_key(b.untyped_storage())


class SavedShard(Wrapper):
    """The values of a shard in a state dict, copied; a write to the whole DTensor reaches the weight as well.

    All processes write to a DTensor together, as the scale that they share requires. A checkpoint that is
    loaded in place writes to views of the local tensor, each process by itself: these belong to the copy.

    Attributes:
        copied: The float32 values.
        record: The record of the weight.
    """

    copied: torch.Tensor
    record: ParamState

    @staticmethod
    def __new__(cls, values: torch.Tensor, record: ParamState) -> "SavedShard":
        """Show values that are a copy of a record's."""
        self = wrapper_subclass(cls, values.shape, values.stride(), values.dtype, values.device)
        self.copied, self.record = values, record
        return self

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation on the values, and write to the weight what it has changed."""
        written = tree_leaves(list(written_arguments(func, args, kwargs or {}).values()))
        values = tree_map_only(SavedShard, lambda x: x.copied, (tuple(args), kwargs or {}))
        result = func(*values[0], **values[1])
        for x in written:
            if isinstance(x, SavedShard):
                x.record.write(x.copied)
        return args[0] if written and has_result(func) else result

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
    if isinstance(p, DTensor):
        return as_shard(SavedShard(values, record), p)
    return SavedWeight.of(values, values, record)
