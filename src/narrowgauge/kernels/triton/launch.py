"""Declares and launches Triton kernels; on a simulated GPU it records the launch instead.

`triton`, `tl` and `libdevice` are Triton's modules if it is installed. Otherwise they are stubs, just enough
to declare a kernel. Such a kernel cannot run, but its launch can be recorded (`devices.imagine`), so memory,
work and plans are counted the same on machines with and without Triton.
"""

import inspect
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from narrowgauge.devices import GpuWork, tell
from narrowgauge.kernels.dispatch import is_triton_installed

__all__ = ["launch", "libdevice", "tl", "triton"]


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


def _next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()


def _cdiv(x: int, y: int) -> int:
    return -(-x // y)


if is_triton_installed():
    import triton
    import triton.language as tl
    from triton.language.extra import libdevice
else:
    triton = SimpleNamespace(jit=_jit, cdiv=_cdiv, next_power_of_2=_next_power_of_2)
    tl = SimpleNamespace(constexpr=Constant)
    libdevice = SimpleNamespace()

_SECOND = 2**16  # exclusive limit on the second and third axes of a CUDA grid


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
    """Launch a kernel on the device of its tensors; Triton alone launches on torch's current device.

    A tensor may stand in for one that is missing: it is then passed for several arguments, and counts once.

    Args:
        kernel: A function under `triton.jit`.
        grid: The numbers of programs.
        args: Its arguments up to its constants.
        writes: The names of the arguments that it writes, separated by blanks; it reads the others.
        updates: The names of those that it reads and writes.
        seldom: The names of those that it reads only if a value is not finite.
        lanes: Its instructions, where they can take longer than its bytes (`GpuWork.lanes`).
        options: Constants, and the options of a launch.
    """
    assert all(n < _SECOND for n in grid[1:]), f"a GPU does not support a grid of {tuple(grid)} programs"
    first = next(a for a in args if isinstance(a, torch.Tensor))
    if not first.is_meta:
        with torch.cuda.device_of(first):
            kernel[tuple(grid)](*args, **options)
        return
    names = list(inspect.signature(kernel.fn).parameters)
    named = {n: t for n, t in zip(names, args, strict=False) if isinstance(t, torch.Tensor)}
    for name, t in named.items():
        assert t.is_meta, f"kernel {names}: {name} is on {t.device}, which a GPU cannot read"
    updated = {id(named[n]) for n in updates.split() if n in named}
    written = {id(named[n]) for n in writes.split() if n in named} | updated
    skipped = {id(named[n]) for n in seldom.split()}
    tensors = {id(t): t for t in named.values() if id(t) not in skipped}
    tell(
        GpuWork(
            f"triton {kernel.fn.__name__}",
            [t for key, t in tensors.items() if key not in written or key in updated],
            [t for key, t in tensors.items() if key in written],
            lanes=lanes,
            numbers=[a for a in args if not isinstance(a, torch.Tensor)] + sorted(options.items()),
        )
    )
