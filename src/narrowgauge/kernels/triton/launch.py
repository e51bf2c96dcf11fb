"""Declares and launches Triton kernels; on a simulated GPU it records the launch instead.

`triton`, `tl` and `libdevice` are Triton's modules if it is installed. Otherwise they are stubs, just enough
to declare a kernel. Such a kernel cannot run, but its launch can be recorded (`devices.imagine`), so memory,
work and plans are counted the same on machines with and without Triton.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch

from narrowgauge.kernels.dispatch import is_triton_installed
from narrowgauge.system.devices import GpuWork, emit

__all__ = ["cdiv", "launch", "libdevice", "next_power_of_2", "tl", "triton"]


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
#: A kernel rounds where its reference does: it never fuses a multiplication and an addition.
DEFAULTS: Mapping[str, Any] = {"num_warps": 4, "enable_fp_fusion": False}


def launch(
    kernel: Any,
    grid: Sequence[int],
    *args: Any,
    writes: str = "",
    updates: str = "",
    seldom: str = "",
    lanes: float = 0.0,
    **options: Any,
) -> None:
    """Launch a kernel with its arguments, up to its constants.

    A tensor may stand in for one that is missing: it is then passed for several arguments, and counts once.
    The first argument is a tensor, on the device that launches.

    Args:
        kernel: A function under `triton.jit`, whose constants are its last parameters.
        grid: The numbers of programs.
        args: Its arguments.
        writes: The names of the arguments that it writes, separated by blanks; it reads the others.
        updates: The names of those that it reads and writes.
        seldom: The names of those that it reads only if a value is not finite.
        lanes: Its instructions, where they can take longer than its bytes (`GpuWork.lanes`).
        options: Constants, and the options of a launch (`DEFAULTS`).
    """
    assert max(grid[1:], default=1) < _SECOND, f"a GPU does not support a grid of {grid} programs"
    perform(kernel, tuple(grid), args, {**DEFAULTS, **options}, (writes, updates, seldom, lanes))


def perform(
    kernel: Any,
    grid: tuple[int, ...],
    args: Sequence[Any],
    options: Mapping[str, Any],
    effects: tuple[str, str, str, float],
) -> None:
    """Launch; on a simulated GPU report the work instead (`devices.emit`), by the last four of `launch`."""
    if not args[0].is_meta:
        with torch.cuda.device_of(args[0]):
            kernel[grid](*args, **options)
        return
    writes, updates, seldom, lanes = effects
    names = _parameters(kernel.fn)
    named = {n: t for n, t in zip(names, args, strict=False) if isinstance(t, torch.Tensor)}
    for name, t in named.items():
        assert t.is_meta, f"kernel {names}: {name} is on {t.device}, which a GPU cannot read"
    updated = {id(named[n]) for n in updates.split() if n in named}
    written = {id(named[n]) for n in writes.split() if n in named} | updated
    skipped = {id(named[n]) for n in seldom.split()}
    tensors = {id(t): t for t in named.values() if id(t) not in skipped}
    emit(
        GpuWork(
            f"triton {kernel.fn.__name__}",
            [t for key, t in tensors.items() if key not in written or key in updated],
            [t for key, t in tensors.items() if key in written],
            lanes=lanes,
            scalars=[a for a in args if not isinstance(a, torch.Tensor)] + sorted(options.items()),
        )
    )


@cache
def _parameters(kernel: Callable[..., Any]) -> list[str]:
    """The names of a kernel's parameters."""
    return list(inspect.signature(kernel).parameters)
