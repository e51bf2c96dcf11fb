"""Records what a step asks of an imagined GPU: every operation of torch, and every kernel that is told.

Waits of the host are found where a number leaves the device, or where memory that is not pinned goes to it.
A step then goes on with ones and zeros: its course does not depend on them.
"""

import inspect
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any, cast

import torch
from torch.overrides import TorchFunctionMode

import narrowgauge
from narrowgauge.devices import GpuWork
from narrowgauge.simulate.operations import Cost, cost_of, shown_bytes
from narrowgauge.torch_compat import (
    TorchDispatchMode,
    autograd_node,
    operation_name,
    storage_key,
    tree_iter,
)

_ROOT = str(Path(narrowgauge.__file__).parent)
_ALLOCATION = 512  # bytes; torch's allocator rounds up to it
#: Files that only pass an operation on: the caller is named.
_DOORS = ("simulate/", "devices.py", "torch_compat.py", "kernels/triton/launch.py", "kernels/dispatch.py")
#: Files that make operands, and scale the results of products of what they made.
_CASTS = (
    *("quantization/", "formats/", "kernels/cast.py", "kernels/product.py"),
    *(f"kernels/triton/{name}.py" for name in ("cast_launch", "product", "remedies", "rounding")),
)
_ENGINE = "distributed/parallel/engine.py"  # which starts the backward pass


@dataclass(frozen=True, slots=True)
class Event:
    """One operation: its name, the place in the program, the part of the step, what it costs."""

    name: str
    site: str
    phase: str
    cost: Cost

    @property
    def is_cast(self) -> bool:
        """Whether it makes operands of a product, or scales the result of an emulated one."""
        return not self.cost.flops and self.site.startswith(_CASTS)


class Recorder(TorchDispatchMode):
    """A dispatch mode that records events, waits and live bytes; `phase` is set from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = ""  # events of no phase are not kept
        self.events: list[Event] = []
        self.waits: Counter[tuple[str, str]] = Counter()  # (phase, place)
        self.functions: Counter[str] = Counter()  # calls of Python autograd functions by phase
        self.alive = self.peak = 0
        self.held: Counter[tuple[str, str]] = Counter()  # live bytes by (place, operation) that made them
        self._held_at_peak: Counter[tuple[str, str]] | None = None  # None: memory has only grown since
        self._known: dict[int, tuple[int, tuple[str, str]]] = {}  # by storage: bytes, who made it

    def __torch_dispatch__(
        self, func: Any, types: Sequence[Any], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        known, out = self._of_host(func, args, kwargs)
        if not known:
            out = func(*args, **kwargs)
        self._see(out, operation_name(func))
        if self.phase:
            cost = cost_of(func, args, kwargs, out)
            if cost is not None:
                self._add(operation_name(func), cost)
        return out

    def told(self, work: GpuWork) -> None:
        """Record a kernel that is no operation of torch."""
        moved = sum(shown_bytes(t) for t in (*work.reads, *work.writes))
        kind = work.name if work.kind == "attention" else work.kind
        if work.kind == "attention" and work.reads[0].dtype == torch.float32:
            kind = "fp32"  # the matrix units' rate is that of 16 bits
        self._add(work.name, Cost(moved, work.flops, kind, work.launches, work.lanes))

    def wait(self) -> None:
        """Record that the host waits for the device."""
        if self.phase:
            self.waits[self.phase, _site()] += 1

    def _add(self, name: str, cost: Cost) -> None:
        if self.phase:
            self.events.append(Event(name, _site(), self.phase, cost))

    def _of_host(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[bool, Any]:
        """(whether the operation is between host and device and answered here, its result)."""
        name = operation_name(func)
        if name == "_local_scalar_dense" and args[0].is_meta:
            self.wait()
            return True, 1.0 if args[0].dtype.is_floating_point else 1
        if name == "_to_copy":
            source, target = args[0].device, torch.device(kwargs.get("device") or args[0].device)
        elif name == "copy_":
            source, target = args[1].device, args[0].device
        else:
            return False, None
        if source.type == target.type:
            return False, None
        does_not_wait = kwargs.get("non_blocking") or (len(args) > 2 and args[2])
        if source.type == "meta" or not does_not_wait:
            self.wait()
        if source.type != "meta":
            return False, None
        if name == "copy_":
            return True, args[0]
        return True, torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)

    def _see(self, tree: Any, name: str) -> None:
        """Count the memory of new tensors until their storage is freed."""
        for t in tree_iter(tree):
            if not isinstance(t, torch.Tensor) or not t.is_meta:
                continue
            storage = t.untyped_storage()
            key = storage_key(storage)
            if key not in self._known:
                weakref.finalize(storage, self._forget, key)
                size, maker = -(-storage.nbytes() // _ALLOCATION) * _ALLOCATION, (_site(), name)
                self._known[key] = size, maker
                self.alive += size
                self.held[maker] += size
                if self.alive > self.peak:
                    self.peak, self._held_at_peak = self.alive, None

    def _forget(self, key: int) -> None:
        if self._held_at_peak is None and self.alive == self.peak:
            self._held_at_peak = self.held.copy()
        size, maker = self._known.pop(key)
        self.alive -= size
        self.held[maker] -= size

    def begin_peak(self) -> None:
        """Look for the peak from here on."""
        self.peak, self._held_at_peak = self.alive, None

    def held_at_peak(self) -> Mapping[tuple[str, str], int]:
        """The bytes that were alive at the peak, by (place, operation) that made them."""
        return self.held if self._held_at_peak is None else self._held_at_peak

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Record operations, copies made from lists, and calls of Python autograd functions."""
        with ExitStack() as stack:
            stack.enter_context(_Lists(self))
            for function in _subclasses(torch.autograd.Function):
                stack.enter_context(_counted(function, self._call))
            stack.enter_context(self)
            yield

    def _call(self) -> None:
        self.functions[self.phase] += 1


class _Lists(TorchFunctionMode):
    """Sees tensors that are made from numbers of the host on the device: a copy that waits."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.tensor and kwargs and torch.device(kwargs.get("device") or "cpu").type == "meta":
            self.recorder.wait()
        return func(*args, **(kwargs or {}))


def _subclasses(base: type) -> list[type]:
    """The autograd functions of this package that are defined by now."""
    defined: list[type] = base.__subclasses__()
    own = (c for c in defined if c.__module__.startswith(narrowgauge.__name__))
    found = [c for c in own if not c.__name__.startswith("_Meta")]  # which stand for one of torch, in C++
    return found + [c for each in found for c in _subclasses(each)]


@contextmanager
def _counted(function: type, call: Callable[[], None]) -> Iterator[None]:
    """Call `call` whenever the forward or the backward of an autograd function runs."""

    def counted(method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def run(*args: Any) -> Any:
            call()
            return method(*args)

        return run

    own = {name: vars(function)[name] for name in ("forward", "backward") if name in vars(function)}
    for name, method in own.items():
        setattr(function, name, staticmethod(counted(method.__func__)))
    try:
        yield
    finally:
        for name, method in own.items():
            setattr(function, name, method)


def _site() -> str:
    """The function of the package that asks, or the node of autograd that computes its gradient."""
    node, frame = autograd_node(), inspect.currentframe()
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(_ROOT):
            place = path[len(_ROOT) + 1 :]
            if node is not None and place == _ENGINE:
                break  # no function of ours stands between the engine and the operation
            if not place.startswith(_DOORS):
                return f"{place}:{frame.f_code.co_name}"
        frame = cast(Any, frame.f_back)
    return "torch" if node is None else f"autograd {node.name().replace('torch::autograd::', '')}"
