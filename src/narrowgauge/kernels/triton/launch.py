"""The one door through which kernels are launched or, on an imagined GPU, told (`devices.imagine`)."""

import inspect
from collections.abc import Sequence
from typing import Any

import torch

from narrowgauge.devices import GpuWork, tell

_SECOND = 2**16  # CUDA's grids have fewer programs than this along their second axis, and their third


def launch(
    kernel: Any,
    grid: Sequence[int],
    *args: Any,
    writes: str = "",
    updates: str = "",
    seldom: str = "",
    **options: Any,
) -> None:
    """Launch a kernel on the device of its tensors; Triton's own way launches on torch's current device.

    A tensor may stand in for one that is missing: it is then given for several arguments, and counts once.

    Args:
        kernel: A function under `triton.jit`.
        grid: The numbers of programs.
        args: Its arguments up to its constants.
        writes: The names of the arguments that it writes, separated by blanks; it reads the others.
        updates: The names of those that it reads and writes.
        seldom: The names of those that it reads only if a number is not finite.
        options: Constants, and the options of a launch.
    """
    assert all(n < _SECOND for n in grid[1:]), f"a GPU takes no grid of {tuple(grid)} programs"
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
            numbers=[a for a in args if not isinstance(a, torch.Tensor)] + sorted(options.items()),
        )
    )
