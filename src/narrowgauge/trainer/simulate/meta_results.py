"""Caches the results of operations on meta tensors by the shapes that determine them.

Torch computes the result of many operations in Python, in 50 to 200 us. A step repeats itself block by block,
so most of its operations have occurred before. The layout of a result that shares no memory with an argument
is a function of the arguments' layouts and values; the cached result is a new tensor of that layout. An
operation in place that left the layout and memory of all its arguments as they were would do so again, and is
skipped: a meta tensor has no values.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from narrowgauge.system.torch_compat import is_in_place, is_view_operation, storage_key

_Layout = tuple[torch.Size, tuple[int, ...], torch.dtype]
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_MOST = 20_000  # results cached in a process


class _NoKey(Exception):
    """An argument is of a kind that cannot be part of a key."""


_known: dict[Any, _Layout | None] = {}  # None: the result shares memory, or is of another kind
_only_writes: set[Any] = set()  # operations that wrote values into their first argument, and did nothing else


def meta_result(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The result of an operation: a new tensor of the cached layout or the one written into, if known."""
    if func.namespace == "c10d" or is_view_operation(func):
        return func(*args, **kwargs)
    tensors: list[torch.Tensor] = []
    try:
        key = (func, torch.get_default_dtype(), _key(args, tensors), _key(tuple(kwargs.items()), tensors))
    except _NoKey:
        return func(*args, **kwargs)
    if key in _only_writes:
        return args[0]
    if (layout := _known.get(key)) is not None:
        return torch.empty_strided(*layout[:2], dtype=layout[2], device="meta")
    if key in _known or len(_known) + len(_only_writes) >= _MOST or not tensors:
        return func(*args, **kwargs)
    if not is_in_place(func):
        out = func(*args, **kwargs)
        _known[key] = _layout(out, tensors)
        return out
    before = [_place(t) for t in tensors]
    out = func(*args, **kwargs)
    if out is args[0] and out.is_meta and before == [_place(t) for t in tensors]:
        _only_writes.add(key)
    else:
        _known[key] = None
    return out


def _place(x: torch.Tensor) -> tuple[Any, ...]:
    """The layout of a tensor and the memory that it has."""
    storage = x.untyped_storage()
    return x.shape, x.stride(), x.storage_offset(), storage_key(storage), storage.nbytes()


def _key(values: Sequence[Any], tensors: list[torch.Tensor]) -> tuple[Any, ...]:
    """The key of a result, which distinguishes 1, 1.0 and True. `tensors` collects the tensors in it."""
    parts: list[Any] = []
    for value in values:
        kind = type(value)
        if kind in _PLAIN:
            tensors.append(value)
            parts.append((value.shape, value.stride(), value.dtype, value.is_meta))
        elif kind is list or kind is tuple:
            parts.append(_key(value, tensors))
        elif value is None or kind in (int, float, bool, str, torch.dtype, torch.device):
            parts.append((kind, value))
        elif kind in (torch.memory_format, torch.layout):
            parts.append(value)
        else:
            raise _NoKey
    return tuple(parts)


def _layout(out: Any, tensors: Sequence[torch.Tensor]) -> _Layout | None:
    """The layout of a result that is a single meta tensor filling its storage."""
    if type(out) is not torch.Tensor or not out.is_meta or out.requires_grad:
        return None
    storage = out.untyped_storage()
    fresh = torch.empty_strided(out.shape, out.stride(), dtype=out.dtype, device="meta")
    fills = out.storage_offset() == 0 and fresh.untyped_storage().nbytes() == storage.nbytes()
    if not fills or storage_key(storage) in {storage_key(t.untyped_storage()) for t in tensors}:
        return None
    return out.shape, out.stride(), out.dtype
