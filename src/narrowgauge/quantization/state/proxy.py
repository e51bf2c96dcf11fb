"""Tensors whose values lie elsewhere, and the one way in which all of them are read and written.

    NarrowTensor      a weight; its record holds codes, scales and perhaps a master
    NarrowGradient    a gradient; its state holds codes
    SavedWeight       a weight's values in a state dict; a write reaches the weight as well
    GatheredWeight    a weight in its transfer format, for a pass (`nn.weight`); it cannot be written

An operation that reads sees `values()`. One that writes changes what `_open` gives, the widest values that
there are, and `_close` stores them; it returns what it was given to write to, as in-place operations do.
"""

from collections.abc import Sequence
from functools import partial
from itertools import count
from typing import Any

import torch

from narrowgauge.system.torch_compat import (
    Wrapper,
    has_result,
    is_in_place,
    operation_name,
    tree_leaves,
    tree_map_only,
    written_arguments,
)

#: The values that an operation writes to, by what holds them: views of one weight change the same ones.
Opened = dict[object, torch.Tensor]


class Proxy(Wrapper):
    """A tensor whose values lie elsewhere."""

    def values(self) -> torch.Tensor:
        """The values that an operation reads."""
        raise NotImplementedError

    def _open(self, operation: str, opened: Opened) -> torch.Tensor | None:
        """The float32 values of this tensor, for an operation to change."""
        raise NotImplementedError

    def _close(self, opened: Opened) -> None:
        """Store the values that an operation has changed."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation on the values."""
        kwargs = kwargs or {}
        written = written_arguments(func, args, kwargs) if is_in_place(func) else {}
        targets = [x for value in written.values() for x in tree_leaves(value) if isinstance(x, Proxy)]
        if not targets:
            args, kwargs = tree_map_only(Proxy, lambda x: x.values(), (tuple(args), kwargs))
            return func(*args, **kwargs)
        opened: Opened = {}

        def substitute(is_written: bool, x: torch.Tensor) -> torch.Tensor | None:
            if isinstance(x, Proxy):
                return x._open(operation_name(func), opened) if is_written else x.values().float()
            # Beside float32 targets, an operand in a target's dtype is float32: as if all had one dtype.
            has_their_dtype = x.is_floating_point() and any(x.dtype == t.dtype for t in targets)
            return x.float() if has_their_dtype and not is_written and x.ndim else x

        def substituted(key: int | str, value: Any) -> Any:
            return tree_map_only(torch.Tensor, partial(substitute, key in written), value)

        func(*map(substituted, count(), args), **{k: substituted(k, value) for k, value in kwargs.items()})
        for x in targets:
            x._close(opened)
        results = [*written.values()]
        if not has_result(func):  # `_foreach_add_`, `_fused_adamw_`
            return None
        return results[0] if len(results) == 1 else tuple(results)

    def numpy(self, *, force: bool = False) -> Any:
        """The values as a NumPy array, copied."""
        return (self.detach() if force else self).clone().numpy(force=force)

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        """The values as a NumPy array."""
        return self.clone().__array__(*args, **kwargs)

    def tolist(self) -> Any:
        """The values as nested lists."""
        return self.detach().clone().tolist()
