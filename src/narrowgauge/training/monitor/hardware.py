"""The device a run is on: which one, how fast its matrix multiplication is, how much memory was used."""

import ctypes
import os
import re
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from narrowgauge.errors import UserError, unknown

DEVICES = ("auto", "cpu", "cuda")

# Of <malloc.h>: how much freed memory goes back to the kernel, and what is mapped apart from the heap.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4
_KEEPS = {_M_MMAP_MAX: 0, _M_TRIM_THRESHOLD: 2**31 - 1, _M_TOP_PAD: 2**26}
_AS_EVER = {_M_MMAP_MAX: 65536, _M_TRIM_THRESHOLD: 2**17, _M_TOP_PAD: 2**17}


def choose_device(wish: str) -> torch.device:
    """The device that a configuration asks for.

    Raises:
        UserError: an unknown device, or a GPU asked for where torch sees none, or not so many.
    """
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", wish):
        raise unknown("device", wish, DEVICES)
    if wish == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if wish.startswith("cuda") and not torch.cuda.is_available():
        raise UserError(
            f"training.device = {wish!r}, but this torch ({torch.__version__}) sees no GPU; "
            "use --device cpu, or install a torch built for this machine's GPU"
        )
    device = torch.device(wish)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(
            f"training.device = {wish!r}, but the last GPU that torch sees here is "
            f"'cuda:{torch.cuda.device_count() - 1}'; name that or one before it"
        )
    return device


def total_memory(device: torch.device) -> int:
    """Bytes that the GPU has, or the machine."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def limit_memory(device: torch.device, limit: int) -> None:
    """Make a GPU's allocator refuse more than `limit` bytes (0: than there is)."""
    if device.type == "cuda" and limit:
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total_memory(device)), device)


@contextmanager
def memory_kept(device: torch.device) -> Iterator[None]:
    """Let a process that computes on a CPU keep the memory of the tensors it frees, for the next ones.

    glibc gives what large tensors took back to the kernel at once, which clears each page anew before the
    next step gets it: a fifth of the processor time of a step (docs/performance.md), for nothing. In return
    the process holds a tenth more. Elsewhere than with glibc nothing happens.
    """
    libc = ctypes.CDLL(None) if device.type == "cpu" and sys.platform == "linux" else None
    if libc is None or not hasattr(libc, "gnu_get_libc_version"):
        yield
        return
    for option, value in _KEEPS.items():
        libc.mallopt(option, value)
    try:
        yield
    finally:
        for option, value in _AS_EVER.items():
            libc.mallopt(option, value)
        libc.malloc_trim(0)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out; on a CPU torch has no class of its own for that."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def device_name(device: torch.device) -> str:
    """What a person calls the device."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {torch.get_num_threads()} threads"


def measure_peak(device: torch.device, dtype: torch.dtype) -> tuple[float, str]:
    """(FLOP/s, words) of the best of a few square matrix multiplications: the peak that MFU refers to."""
    n = 8192 if device.type == "cuda" else 1024
    if device.type == "cpu" and dtype == torch.float16:
        dtype = torch.float32  # what its products are computed in there (nn.gemm)
    a = torch.ones(n, n, device=device, dtype=dtype)
    best = float("inf")
    for _ in range(6):
        synchronize(device)
        start = time.perf_counter()
        a @ a
        synchronize(device)
        best = min(best, time.perf_counter() - start)
    kind = str(dtype).removeprefix("torch.")
    flops = 2 * n**3 / best
    return flops, f"{flops / 1e12:.2f} TFLOP/s, a {n} x {n} {kind} matmul measured when the run started"


def synchronize(device: torch.device) -> None:
    """Wait for the device's queue, so that a clock means something."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_memory(device: torch.device) -> int:
    """Bytes: the most that torch allocated on a GPU, or the most that this process held on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
