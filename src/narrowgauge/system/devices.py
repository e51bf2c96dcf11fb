"""The facts of a device, and a simulated GPU: meta tensors that take a GPU's code path.

Meta tensors have shapes, dtypes and strides but no values. Torch's dispatcher, autograd and shape rules are
the real ones. Inside `imagine(facts)` the program treats them as tensors on that GPU: the facts decide which
recipes are native, kernels are launched, host copies are pinned. A launch only reports (`emit`) what the GPU
would do, so that the memory and work of a step can be counted on any machine, without a driver, a compiler or
the memory.

    memory    `simulate.memory_estimate`
    work      `simulate.count`
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """The facts that decide which code runs."""

    maker: str  # "cpu", "nvidia", "amd", or torch's name for another device type
    capability: tuple[int, int] = (0, 0)  # the compute capability of an NVIDIA GPU, such as (9, 0)
    architecture: str = ""  # the architecture of an AMD GPU, such as "gfx942"
    # the version of CUDA or ROCm that torch was built with, such as (12, 9)
    library: tuple[int, int] = (0, 0)
    compiles: bool = True  # whether the machine has Triton and a C compiler; assumed for a GPU elsewhere

    @property
    def is_gpu(self) -> bool:
        """Whether it is a GPU of a supported maker."""
        return self.maker in ("nvidia", "amd")

    @property
    def has_triton(self) -> bool:
        """Whether kernels run on it: Triton compiles for AMD GPUs, and for NVIDIA GPUs from Ampere on."""
        is_known = self.maker == "amd" or (self.maker == "nvidia" and self.capability >= (8, 0))
        return is_known and self.compiles

    def __str__(self) -> str:
        match self.maker:
            case "nvidia":
                return "compute capability " + ".".join(map(str, self.capability))
            case "amd":
                return self.architecture
            case "cpu":
                return "a CPU"
            case _:
                return self.maker


@dataclass(frozen=True, slots=True)
class GpuWork:
    """The work of one GPU kernel, reported by the code that would have launched it."""

    name: str  # the kernel's name
    reads: Sequence[torch.Tensor]  # the tensors that it reads; a tensor that it reads and writes is in both
    writes: Sequence[torch.Tensor]  # the tensors that it writes
    flops: float = 0.0  # its FLOPs on the matrix units
    kind: str = ""  # the rate of these FLOPs: "bf16", "fp32" or "attention"
    launches: int = 1  # the number of kernels
    # its instructions, in fp32 lanes; 0 where they are not counted because memory is slower
    lanes: float = 0.0
    scalars: Sequence[Any] = ()  # arguments that its launch passes by value: constants and host numbers


Listener = Callable[[GpuWork], None]
_imagined: list[tuple[Device, Listener]] = []  # innermost last; a single thread simulates


@contextmanager
def imagine(facts: Device | None, listener: Listener = lambda _: None) -> Iterator[None]:
    """Treat meta tensors as tensors on a GPU with these facts; None, or a CPU's facts, changes nothing.

    `listener` is called with the work of each kernel.
    """
    if facts is None or not facts.is_gpu:
        yield
        return
    _imagined.append((facts, listener))
    try:
        yield
    finally:
        _imagined.pop()


def imagined(device: torch.device) -> Device | None:
    """The facts of the GPU that a meta device simulates; None if it simulates none."""
    return _imagined[-1][0] if _imagined and device.type == "meta" else None


def is_gpu(device: torch.device) -> bool:
    """Whether a device is a GPU, real or simulated."""
    return device.type == "cuda" or imagined(device) is not None


def is_shape_only(x: torch.Tensor) -> bool:
    """Whether a meta tensor only stands for memory, with no simulated GPU whose work is counted."""
    return x.is_meta and not _imagined


def emit(work: GpuWork) -> None:
    """Report the work of a simulated GPU."""
    _imagined[-1][1](work)
