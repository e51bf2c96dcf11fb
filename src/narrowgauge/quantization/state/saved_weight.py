"""A narrow weight in the state dict of its module: float32 values, and a write to them reaches the weight.

A state dict of an ordinary module aliases its parameters, and `state_dict()[name].copy_(x)` or an average
over `state_dict().values()` changes the module. The same happens here, after each operation that writes.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from narrowgauge.quantization.state.parameter_state import ParamState, state_of
from narrowgauge.quantization.state.proxy import Opened, Proxy
from narrowgauge.system.torch_compat import as_shard, is_view_operation, tree_map_only


class SavedWeight(Proxy):
    """The values of a narrow weight in a state dict, copied; a write reaches the weight as well.

    It has memory, so that programs may write the copy to a file.
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
