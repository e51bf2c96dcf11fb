"""Records a step: the bytes alive, the bytes sent to other processes, and every operation of a GPU.

The step runs on meta tensors, or on a CPU whose memory is measured. Kernels that are not torch operations are
recorded where they would be launched (`devices.emit`). The host waits where a value is read from the device
or where unpinned memory is copied to it. On meta tensors such a read returns ones or zeros: the course of the
step does not depend on them.
"""

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import wraps
from types import MethodType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

import narrowgauge
from narrowgauge import formats, quantization
from narrowgauge.distributed import CommCounter
from narrowgauge.kernels import cast, gradient_sum, product
from narrowgauge.quantization.state.gradient_state import NarrowGradient
from narrowgauge.system.devices import GpuWork
from narrowgauge.system.torch_compat import TorchDispatchMode, operation_name
from narrowgauge.trainer.simulate.live_bytes import LiveBytes
from narrowgauge.trainer.simulate.meta_results import flatten, meta_result
from narrowgauge.trainer.simulate.operations import Cost, cost_of, shown_bytes

#: Modules that make operands of matmuls, and scale their results: what they call belongs to them.
_CASTS = tuple(f"{module.__name__}." for module in (formats, quantization, cast, product))
_SUMS = f"{gradient_sum.__name__}."  # adds to quantized gradients, which casts nothing for a matmul
#: Kernels of casts that others launch.
_CAST_KERNELS = ("triton transpose", "triton slope_of_rows")


@dataclass(frozen=True, slots=True)
class Event:
    """One operation: its name, its cost, and whether it makes operands of a matmul or scales its result."""

    name: str
    cost: Cost
    is_cast: bool


@dataclass
class Part:
    """A phase of a step: the operations of a GPU, calls of Python autograd functions, waits of the host."""

    events: list[Event] = field(default_factory=list)
    functions: int = 0
    waits: int = 0


class Recorder(TorchDispatchMode):
    """A dispatch mode that records live bytes and traffic, and during a phase events and waits.

    Attributes:
        phase: the current phase of the step, set from outside; "" outside of all.
        live: the bytes alive.
        traffic: the bytes that this process sends.
        parts: what was recorded, by phase; of operations outside a phase nothing.
    """

    def __init__(self, device: str = "meta", allocation: int = 1) -> None:
        """Record tensors on a type of device.

        Args:
            device: the type of device.
            allocation: the device allocates whole multiples of this many bytes.
        """
        super().__init__()
        self.phase = ""
        self.live, self.traffic = LiveBytes(device, allocation), CommCounter()
        if self.live.is_on_meta:  # nothing is compiled, so no call needs torch's guard against its compiler
            unguarded = inspect.unwrap(Recorder.__torch_dispatch__)
            self.__torch_dispatch__ = MethodType(unguarded, self)  # type: ignore[method-assign]
        self.parts = defaultdict[str, Part](Part)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[Any], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if NarrowGradient in types:  # what it does with its codes comes here as well
            return NotImplemented
        kwargs = kwargs or {}
        if func.namespace == "c10d":
            self.live.update_all()
            self.traffic.count(func, args)
        tensors: list[torch.Tensor] = []
        key: list[Any] = []
        has_key = flatten((*args, *kwargs, *kwargs.values()), tensors, key)
        self.live.see(tensors, is_new=False)
        known, out = self._of_host(func, args, kwargs)
        if not known and self.live.is_on_meta and has_key:
            out = meta_result(func, args, kwargs, tensors, key)
        elif not known:
            out = func(*args, **kwargs)
        self.live.see(out if isinstance(out, (list, tuple)) else (out,), is_new=True)
        if self.phase:
            cost = cost_of(func, args, kwargs, out)
            if cost is not None:
                self._add(operation_name(func), cost)
        return out

    def on_launch(self, work: GpuWork) -> None:
        """Record a kernel that is not a torch operation."""
        moved = sum(shown_bytes(t) for t in (*work.reads, *work.writes))
        kind = work.name if work.kind == "attention" else work.kind
        if work.kind == "attention" and work.reads[0].dtype == torch.float32:
            kind = "fp32"  # priced at the matrix units' 16-bit rate
        self._add(work.name, Cost(moved, work.flops, kind, work.launches, work.lanes))

    def wait(self) -> None:
        """Record that the host waits for the device."""
        self.parts[self.phase].waits += 1

    def _add(self, name: str, cost: Cost) -> None:
        if self.phase:
            is_cast = not cost.flops and (name in _CAST_KERNELS or _is_called_by_cast())
            self.parts[self.phase].events.append(Event(name, cost, is_cast))

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
        self.parts[self.phase].functions += 1


class _Lists(TorchFunctionMode):
    """Detects tensors made on the device from host values: a copy that waits."""

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
    """The autograd functions of this package defined so far."""
    defined: list[type] = base.__subclasses__()
    own = (c for c in defined if c.__module__.startswith(narrowgauge.__name__))
    found = [c for c in own if not c.__name__.startswith("_Meta")]  # those stand for C++ functions of torch
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


def _is_called_by_cast() -> bool:
    """Whether a function of casts is running, and nothing in it that adds gradients."""
    frame = inspect.currentframe()
    while frame is not None:
        module = f"{frame.f_globals.get('__name__')}."
        if module.startswith(_CASTS):
            return True
        if module == _SUMS:
            return False
        frame = frame.f_back
    return False
