"""What runs well where: Triton's kernels, and torch's products.

Kernels run on GPUs, and in Triton's interpreter on a CPU.

Triton comes with torch for NVIDIA and AMD GPUs; elsewhere it may be missing, so nothing imports it before it
is known to be there. With TRITON_INTERPRET=1 set before the first kernel is imported, every kernel is
interpreted: slow, for tests, and the way to see on any machine what a GPU would compute.
"""

import importlib.util
import os
import shutil
from functools import cache

import torch

from narrowgauge.torch_compat import cpu_multiplies_bf16


@cache
def _has_triton() -> bool:
    """Whether Triton is there, and the C compiler with which it builds what launches a kernel."""
    compilers = (os.environ.get("CC", ""), "gcc", "clang", "cc")
    return importlib.util.find_spec("triton") is not None and any(map(shutil.which, compilers))


def has_kernels(device: torch.device) -> bool:
    """Whether Triton's kernels run on tensors of a device; nowhere under NARROWGAUGE_KERNELS=0."""
    if os.environ.get("NARROWGAUGE_KERNELS") == "0":
        return False
    if device.type == "cpu":
        return os.environ.get("TRITON_INTERPRET") == "1" and _has_triton()
    return device.type == "cuda" and _has_triton() and _is_for(device)


@cache
def _is_for(device: torch.device) -> bool:
    """Whether Triton compiles for a GPU: AMD's, and NVIDIA's from Ampere on."""
    return bool(torch.version.hip) or torch.cuda.get_device_capability(device) >= (8, 0)


def is_slow(x: torch.Tensor) -> bool:
    """Whether torch multiplies this dtype element by element: the same product in fp32 is faster.

    So it is on any CPU for fp16, and for bf16 on those for which oneDNN has no bf16, which are most without
    AVX-512: there a product in fp32 takes a third of the time, attention a quarter (docs/performance.md).
    """
    if x.device.type != "cpu":
        return False
    return x.dtype == torch.float16 or (x.dtype == torch.bfloat16 and not _has_bf16_products())


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _has_bf16_products() -> bool:
    return cpu_multiplies_bf16()


def use_kernels(x: torch.Tensor) -> bool:
    """Whether an operation on `x` is to launch its kernel.

    Not under a compiler either, which fuses plain operations itself, nor on no numbers at all, nor in fp64.
    """
    if torch.compiler.is_compiling():
        return False
    return has_kernels(x.device) and x.numel() > 0 and x.dtype != torch.float64
