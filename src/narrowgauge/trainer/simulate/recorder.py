"""Records a step: the bytes alive, the bytes sent to other processes, and every operation of a GPU.

The step runs on meta tensors, or on a CPU whose memory is measured. Kernels that are not torch operations are
recorded where they would be launched (`devices.tell`). The host waits where a value is read from the device
or where unpinned memory is copied to it. On meta tensors such a read returns ones or zeros: the course of the
step does not depend on them.
"""

import inspect
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
from narrowgauge.distributed import CommCounter
from narrowgauge.quantization.state.gradient_state import NarrowGradient
from narrowgauge.system.devices import GpuWork
from narrowgauge.system.torch_compat import (
    TorchDispatchMode,
    autograd_node,
    operation_name,
)
from narrowgauge.trainer.simulate.live_bytes import LiveBytes
from narrowgauge.trainer.simulate.meta_results import meta_result
from narrowgauge.trainer.simulate.operations import Cost, cost_of, shown_bytes

_ROOT = str(Path(narrowgauge.__file__).parent)
#: Files that only forward an operation; the caller is recorded instead.
_DOORS = (
    *("trainer/simulate/", "system/devices.py", "system/torch_compat.py"),
    *("kernels/triton/launch.py", "kernels/dispatch.py"),
)
#: Files that make operands, and scale the results of their matmuls.
_CASTS = (
    *("quantization/", "formats/", "kernels/cast.py", "kernels/product.py"),
    *(f"kernels/triton/{name}.py" for name in ("cast_launch", "product", "fp4_rows", "rounding")),
)
_ENGINE = "trainer/distributed/parallel/engine.py"  # which starts the backward pass


@dataclass(frozen=True, slots=True)
class Event:
    """One operation: its name, its place in the program, the phase of the step and its cost."""

    name: str
    site: str
    phase: str
    cost: Cost

    @property
    def is_cast(self) -> bool:
        """Whether it makes operands of a matmul, or scales the result of an emulated one."""
        return not self.cost.flops and self.site.startswith(_CASTS)


class Recorder(TorchDispatchMode):
    """A dispatch mode that records live bytes and traffic, and during a phase events and waits.

    Attributes:
        phase: the current phase of the step, set from outside; events outside a phase are dropped.
        live: the bytes alive.
        traffic: the bytes that this process sends.
        events: the operations of a GPU.
        waits: how often the host waits for the device, by (phase, place).
        functions: calls of Python autograd functions, by phase.
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
        self.events: list[Event] = []
        self.waits: Counter[tuple[str, str]] = Counter()
        self.functions: Counter[str] = Counter()
        self._result = meta_result if device == "meta" else _run

    def __torch_dispatch__(
        self, func: Any, types: Sequence[Any], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if NarrowGradient in types:  # what it does with its codes comes here as well
            return NotImplemented
        kwargs = kwargs or {}
        if func.namespace == "c10d":
            self.live.update_all()
            self.traffic.count(func, args)
        self.live.see(args, is_new=False)
        self.live.see(kwargs, is_new=False)
        known, out = self._of_host(func, args, kwargs)
        if not known:
            out = self._result(func, args, kwargs)
        self.live.see(out, is_new=True)
        if self.phase:
            cost = cost_of(func, args, kwargs, out)
            if cost is not None:
                self._add(operation_name(func), cost)
        return out

    def told(self, work: GpuWork) -> None:
        """Record a kernel that is not a torch operation."""
        moved = sum(shown_bytes(t) for t in (*work.reads, *work.writes))
        kind = work.name if work.kind == "attention" else work.kind
        if work.kind == "attention" and work.reads[0].dtype == torch.float32:
            kind = "fp32"  # priced at the matrix units' 16-bit rate
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


def _run(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return func(*args, **kwargs)


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


def _site() -> str:
    """The function of the package that calls, or the autograd node that computes its gradient."""
    node, frame = autograd_node(), inspect.currentframe()
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(_ROOT):
            place = path[len(_ROOT) + 1 :]
            if node is not None and place == _ENGINE:
                break  # no function of this package is between the engine and the operation
            if not place.startswith(_DOORS):
                return f"{place}:{frame.f_code.co_name}"
        frame = cast(Any, frame.f_back)
    return "torch" if node is None else f"autograd {node.name().replace('torch::autograd::', '')}"
