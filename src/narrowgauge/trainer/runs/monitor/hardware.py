"""The device of a run: its choice, its name and its memory."""

import ctypes
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from narrowgauge.system.errors import UserError, unknown
from narrowgauge.system.operating_system import peak_memory_held

DEVICES = ("auto", "cpu", "cuda")
# Segments that grow lose less memory between blocks of different sizes; a user's own choice stands.
_ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
_GPUS = ("gpu", "nvidia", "amd", "hip", "rocm")  # other names of what torch calls cuda

# Options of <malloc.h>: how much freed memory returns to the kernel, and what is mapped outside the heap.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4
_KEEP_FREED = {_M_MMAP_MAX: 0, _M_TRIM_THRESHOLD: 2**31 - 1, _M_TOP_PAD: 2**26}
_DEFAULTS = {_M_MMAP_MAX: 65536, _M_TRIM_THRESHOLD: 2**17, _M_TOP_PAD: 2**17}


def choose_device(requested: str) -> torch.device:
    """The device of "auto" (a GPU if there is one), "cpu", "cuda" or "cuda:N"."""
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", requested):
        if requested.partition(":")[0].lower() in _GPUS:
            raise UserError(
                f"unknown device {requested!r}; a GPU of NVIDIA or AMD is 'cuda', the second 'cuda:1'"
            )
        raise unknown("device", requested, DEVICES)
    if requested == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if requested.startswith("cuda") and not torch.cuda.is_available():
        raise UserError(
            f"training.device = {requested!r}, but this torch ({torch.__version__}) sees no GPU; "
            "use --device cpu, or install a torch built for this machine's GPU"
        )
    device = torch.device(requested)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(
            f"training.device = {requested!r}, but the last GPU that torch sees here is "
            f"'cuda:{torch.cuda.device_count() - 1}'; name that or one before it"
        )
    return device


def use_device(device: torch.device, deterministic: bool = False) -> None:
    """Make `device` the current device, and require fp32 accumulation.

    By default torch lets a GPU add the parts of a split matmul, such as a weight gradient over many tokens,
    in 16 bits.

    Args:
        device: The device.
        deterministic: Whether a GPU uses only kernels that are bitwise reproducible. An error, not only a
            warning, since flash-attention's backward pass would not repeat. `torch_compat.not_strict` is
            for operations that torch refuses although the part in use is reproducible.
    """
    if device.type != "cuda":
        return
    if not any(name in os.environ for name in _ALLOCATOR):  # before memory is first asked for
        os.environ[_ALLOCATOR[0]] = "expandable_segments:True"
    if deterministic:
        workspace = os.environ.setdefault(_CUBLAS, ":4096:8")  # before cuBLAS is first used
        if workspace not in (":4096:8", ":16:8"):
            raise UserError(
                f"training.deterministic = true, but {_CUBLAS} is {workspace!r}, with which cuBLAS does "
                "not repeat every bit; unset it, or set it to ':4096:8'"
            )
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if device.index is not None:
        torch.cuda.set_device(device)
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False


def total_memory(device: torch.device) -> int:
    """Bytes of the GPU's memory, or of the machine's for a CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def memory_at_peak(device: torch.device) -> dict[str, int]:
    """The most bytes that this process has held: allocated by tensors, and reserved by torch's allocator.

    On a CPU both describe the process.
    """
    if device.type != "cuda":
        return dict.fromkeys(("allocated", "reserved"), peak_memory_held())
    memory = torch.cuda.memory
    return {
        "allocated": memory.max_memory_allocated(device),
        "reserved": memory.max_memory_reserved(device),
    }


@contextmanager
def memory_kept(device: torch.device) -> Iterator[None]:
    """Keep the memory of freed CPU tensors in the process for later tensors.

    By default glibc returns large freed blocks to the kernel at once, and the kernel clears each page again
    for the next step, which costs a fifth of a step's processor time (docs/performance.md). Keeping the
    memory makes the process a tenth larger. Without glibc this does nothing.
    """
    libc = ctypes.CDLL(None) if device.type == "cpu" and sys.platform == "linux" else None
    if libc is None or not hasattr(libc, "gnu_get_libc_version"):
        yield
        return
    for option, value in _KEEP_FREED.items():
        libc.mallopt(option, value)
    try:
        yield
    finally:
        for option, value in _DEFAULTS.items():
            libc.mallopt(option, value)
        libc.malloc_trim(0)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that memory ran out; on a CPU torch has no error class for that."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def device_name(device: torch.device) -> str:
    """The human-readable name of a device."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"CPU, {threads} thread{'s' * (threads != 1)}"


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished its queued work, for timing."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
