"""Declares and launches Triton kernels; on a simulated GPU it records the launch instead.

`triton`, `tl` and `libdevice` are Triton's modules if it is installed. Otherwise they are stubs, just enough
to declare a kernel. Such a kernel cannot run, but its launch can be recorded (`devices.imagine`), so memory,
work and plans are counted the same on machines with and without Triton.

**Launching again.** Triton binds the arguments of each launch to the kernel's parameters, describes each of
them, and builds a key from the descriptions and all constants: 10 to 20 us for a kernel with 40 of them. A
`Launch` holds a kernel with its grid and constants, and remembers the compiled kernel by what Triton
specializes code by: the dtype of a tensor and whether it starts at a multiple of 16 bytes, the value of an
integer, which arguments are None. So the second launch of the same kind only passes its arguments on. That is
done on NVIDIA GPUs, with the versions of Triton in `_KNOWN`; elsewhere Triton does it.
"""

import inspect
from collections.abc import Callable, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch

from narrowgauge.devices import GpuWork, tell
from narrowgauge.kernels.dispatch import is_triton_installed

__all__ = ["Launch", "cdiv", "launch", "libdevice", "next_power_of_2", "tl", "triton"]


class Declared:
    """A kernel without a compiler; `fn` is its Python function, as in Triton."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn = fn


class Constant:
    """A kernel constant, and the annotation of a constant argument."""

    def __init__(self, value: Any) -> None:
        self.value = value


def _jit(fn: Callable[..., Any] | None = None, **options: Any) -> Any:
    return Declared if fn is None else Declared(fn)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n; Triton's function of this name is slow on the host."""
    return 1 << (n - 1).bit_length()


def cdiv(x: int, y: int) -> int:
    """x / y, rounded up."""
    return -(-x // y)


if is_triton_installed():
    import triton
    import triton.language as tl
    from triton.language.extra import libdevice
else:
    triton = SimpleNamespace(jit=_jit, cdiv=cdiv, next_power_of_2=next_power_of_2)
    tl = SimpleNamespace(constexpr=Constant)
    libdevice = SimpleNamespace()

_SECOND = 2**16  # exclusive limit on the second and third axes of a CUDA grid
_MOST = 1024  # launches that are remembered; shapes of training are few
#: Versions of Triton whose compiled kernels are launched with the same arguments as its own `JITFunction.run`
#: passes them.
_KNOWN = ("3.6.", "3.7.", "3.8.", "3.9.")


class Launch:
    """A kernel with its grid and constants, launched by a call with its other arguments.

    A tensor may stand in for one that is missing: it is then passed for several arguments, and counts once.
    The first argument is a tensor, on the device that launches. No float is an argument whose value a kernel
    is compiled for.
    """

    __slots__ = (
        "_compiled",
        "_constants",
        "grid",
        "is_direct",
        "kernel",
        "lanes",
        "options",
        "seldom",
        "updates",
        "writes",
    )

    def __init__(
        self,
        kernel: Any,
        grid: Sequence[int],
        writes: str = "",
        updates: str = "",
        seldom: str = "",
        lanes: float = 0.0,
        **options: Any,
    ) -> None:
        """Prepare the launches of a kernel.

        Args:
            kernel: A function under `triton.jit`, whose constants are its last parameters.
            grid: The numbers of programs.
            writes: The names of the arguments that it writes, separated by blanks; it reads the others.
            updates: The names of those that it reads and writes.
            seldom: The names of those that it reads only if a value is not finite.
            lanes: Its instructions, where they can take longer than its bytes (`GpuWork.lanes`).
            options: Constants, and the options of a launch.
        """
        self.kernel, self.grid, self.options, self.lanes = kernel, tuple(grid), options, lanes
        self.writes, self.updates, self.seldom = writes, updates, seldom
        assert all(n < _SECOND for n in grid[1:]), f"a GPU does not support a grid of {self.grid} programs"
        self.is_direct = _is_direct(kernel)
        self._compiled: dict[tuple[Any, ...], Any] = {}
        self._constants: list[Any] = []
        if self.is_direct:
            self._constants = [options[p.name] for p in kernel.params if p.is_constexpr]
            self.grid = (*self.grid, 1, 1)[:3]

    def __call__(self, *args: Any) -> None:
        """Launch with these arguments, up to the kernel's constants."""
        if args[0].is_meta:
            self._record(args)
        elif not (self.is_direct and self._launched_again(args)):
            self._by_triton(args)

    def _by_triton(self, args: tuple[Any, ...]) -> Any:
        """Launch on the device of the first argument; returns the compiled kernel."""
        first = args[0]
        with torch.cuda.device_of(first):
            return self.kernel[self.grid](*args, **self.options)

    def _launched_again(self, args: tuple[Any, ...]) -> bool:
        """Launch on torch's current device, if the arguments are there; a new kind is compiled by Triton."""
        runtime, active = triton.knobs.runtime, triton.runtime.driver.active
        device, hook = active.get_current_device(), runtime.launch_enter_hook
        is_here = args[0].get_device() in (device, -1)  # -1: a driver of tensors on a CPU
        if not is_here or self.kernel.pre_run_hooks or getattr(hook, "calls", hook):
            return False
        # What a kernel is compiled for of an argument, or more.
        kinds = [
            (a.dtype, a.data_ptr() % 16 == 0)
            if isinstance(a, torch.Tensor)
            else float
            if isinstance(a, float)
            else a
            for a in args
        ]
        key = (device, *kinds)
        compiled = self._compiled.get(key)
        if compiled is None:
            if len(self._compiled) >= _MOST:
                self._compiled.clear()
            self._compiled[key] = self._by_triton(args)
            return True
        compiled.run(
            *self.grid,
            active.get_current_stream(device),
            compiled.function,
            compiled.packed_metadata,
            None,  # the description for a profiler: there is none
            hook,
            runtime.launch_exit_hook,
            *args,
            *self._constants,
        )
        return True

    def _record(self, args: tuple[Any, ...]) -> None:
        """Report the work of a launch (`devices.tell`)."""
        names = _parameters(self.kernel.fn)
        named = {n: t for n, t in zip(names, args, strict=False) if isinstance(t, torch.Tensor)}
        for name, t in named.items():
            assert t.is_meta, f"kernel {names}: {name} is on {t.device}, which a GPU cannot read"
        updated = {id(named[n]) for n in self.updates.split() if n in named}
        written = {id(named[n]) for n in self.writes.split() if n in named} | updated
        skipped = {id(named[n]) for n in self.seldom.split()}
        tensors = {id(t): t for t in named.values() if id(t) not in skipped}
        tell(
            GpuWork(
                f"triton {self.kernel.fn.__name__}",
                [t for key, t in tensors.items() if key not in written or key in updated],
                [t for key, t in tensors.items() if key in written],
                lanes=self.lanes,
                numbers=[a for a in args if not isinstance(a, torch.Tensor)] + sorted(self.options.items()),
            )
        )


@cache
def _parameters(kernel: Callable[..., Any]) -> list[str]:
    """The names of a kernel's parameters."""
    return list(inspect.signature(kernel).parameters)


def _is_direct(kernel: Any) -> bool:
    """Whether a kernel's launches may go past Triton's binder."""
    is_known = is_triton_installed() and triton.__version__.startswith(_KNOWN) and not torch.version.hip
    return is_known and isinstance(kernel, triton.runtime.JITFunction)


_launches: dict[tuple[Any, ...], Launch] = {}


def launch(kernel: Any, grid: Sequence[int], *args: Any, **constants: Any) -> None:
    """Launch a kernel; one `Launch` serves all calls with the same kernel, grid and keyword arguments."""
    key = (id(kernel), *grid, *constants, *constants.values())
    prepared = _launches.get(key)
    if prepared is None:
        if len(_launches) >= _MOST:
            _launches.clear()
        prepared = _launches[key] = Launch(kernel, grid, **constants)
    prepared(*args)
