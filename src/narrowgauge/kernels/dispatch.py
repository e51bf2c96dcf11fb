"""Chooses what runs where: Triton's kernels, torch's matmuls, torch's attention; and what need not run.

Kernels run on GPUs, and in Triton's interpreter on a CPU. Triton comes with torch for NVIDIA and AMD GPUs;
elsewhere it may be missing, so it is imported only once it is known to exist. With TRITON_INTERPRET=1 set
before the first kernel is imported, every kernel is interpreted: slow, meant for tests, and a way to see on
any machine what a GPU would compute.

A checkpoint (`torch.utils.checkpoint`) keeps the input of a block. In the backward pass it repeats the
forward pass to obtain the tensors that the block's operations keep. So the following are never read, and
gradients stay the same bit for bit without them:

    in the first pass     results that an operation needs only for its backward pass (`is_discarding`)
    in the second pass    the last matmul of the block, which is the block's output (`is_unread`)
"""

import importlib.util
import os
import shutil
import sysconfig
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from narrowgauge.system.devices import imagined
from narrowgauge.system.torch_compat import cpu_multiplies_bf16

# In torch's order. Under strict determinism the backward passes of all three repeat every bit.
WITHOUT_CUDNN = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@cache
def can_compile() -> bool:
    """Whether Triton is installed, and what it needs to build kernel launchers."""
    return is_triton_installed() and not build_gap()


@cache
def build_gap() -> str:
    """What Triton lacks to build kernel launchers, a C compiler or Python's headers; "" for nothing."""
    compiler = os.environ.get("CC", "").split()[:1]
    if not any(map(shutil.which, (*compiler, "gcc", "clang", "cc"))):
        return "a C compiler (install gcc, or name one in CC)"
    folders = [sysconfig.get_path("include")]
    for variable in ("CPATH", "C_INCLUDE_PATH"):  # where a compiler looks besides
        folders += os.environ.get(variable, "").split(os.pathsep)
    if not any(Path(folder, "Python.h").exists() for folder in folders if folder):
        return "Python.h (install python3-dev or python3-devel, or take another Python)"
    return ""


def kernels_missing(device: torch.device) -> str:
    """A sentence where a GPU could run Triton's kernels, and this machine cannot build them; else ""."""
    is_off = os.environ.get("NARROWGAUGE_KERNELS") == "0" or device.type != "cuda" or not _is_for(device)
    if is_off or can_compile():
        return ""
    lacks = build_gap() or "Triton, which comes with torch's builds for GPUs"
    return f"no kernels: this machine lacks {lacks}; plain operations take several times as long"


@cache
def is_triton_installed() -> bool:
    """Whether Triton can be imported; a simulated GPU records launches without it (`devices.emit`)."""
    return importlib.util.find_spec("triton") is not None


def has_kernels(device: torch.device) -> bool:
    """Whether Triton's kernels run on tensors of a device; never under NARROWGAUGE_KERNELS=0.

    On a simulated GPU the launch is only recorded (`devices.imagine`).
    """
    if os.environ.get("NARROWGAUGE_KERNELS") == "0":
        return False
    if device.type == "cpu":
        return os.environ.get("TRITON_INTERPRET") == "1" and can_compile()
    if (facts := imagined(device)) is not None:
        return facts.has_triton
    return device.type == "cuda" and can_compile() and _is_for(device)


def _is_for(device: torch.device) -> bool:
    """Whether Triton compiles for a GPU: AMD's, and NVIDIA's from Ampere on."""
    return bool(torch.version.hip) or _capability(device) >= (8, 0)


def converts_to_fp8(device: torch.device) -> bool:
    """Whether Triton rounds float32 to E4M3 and E5M2 with one GPU instruction: NVIDIA's from Hopper on.

    Ada also has the instruction, but for Ada Triton first converts to float16, rounding toward zero, and
    rounds that to FP8. Values slightly above the midpoint of two codes then become the midpoint, and
    sometimes the lower code: 0.4 % of codes differ.
    """
    if (facts := imagined(device)) is not None:
        return facts.maker == "nvidia" and facts.capability >= (9, 0)
    return device.type == "cuda" and _capability(device) >= (9, 0)


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    """The compute capability of an NVIDIA GPU; (0, 0) for any other."""
    return (0, 0) if torch.version.hip else torch.cuda.get_device_capability(device)


def sums_in_fp32(device: torch.device) -> bool:
    """Whether torch multiplies 16-bit operands on a device and returns fp32 sums (`out_dtype`).

    It does on AMD GPUs and on NVIDIA GPUs from Ampere on; elsewhere the operands are widened first.
    """
    if device.type == "meta":
        facts = imagined(device)
        return facts is None or facts.maker == "amd" or facts.capability >= (8, 0)
    return device.type == "cuda" and _is_for(device)


def is_slow(x: torch.Tensor) -> bool:
    """Whether torch multiplies this dtype element by element, so that the same matmul in fp32 is faster.

    True for fp16 on any CPU, and for bf16 on CPUs where oneDNN lacks bf16, which are most without AVX-512:
    there an fp32 matmul takes a third of the time, attention a quarter (docs/performance.md). A run measures
    which is faster, and keeps its choice (`choose_products`).
    """
    if x.device.type != "cpu":
        return False
    return x.dtype == torch.float16 or (x.dtype == torch.bfloat16 and not _has_bf16_products())


# The last choices of a run in this process. A compiler guards them: other choices make other code.
_chosen_products: list[str] = []
_chosen_attention: list[str] = []


def choose_products(name: str) -> None:
    """From now on multiply bf16 values on a CPU in "bf16" or "fp32"; "" leaves it to oneDNN."""
    _chosen_products[:] = [name] if name else []


def _has_bf16_products() -> bool:
    return _chosen_products == ["bf16"] if _chosen_products else _onednn_multiplies_bf16()


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _onednn_multiplies_bf16() -> bool:
    return cpu_multiplies_bf16()


def choose_attention(name: str) -> None:
    """From now on compute attention of 16-bit values on a CPU by "torch", "in-order" or in "fp32".

    "in-order" is for bf16 values (`attention_in_order`).
    """
    _chosen_attention[:] = [name] if name else []


def chosen_attention() -> str:
    """How a CPU computes attention of 16-bit values; "" if nothing was chosen: by torch."""
    return _chosen_attention[0] if _chosen_attention else ""


def is_traced() -> bool:
    """Whether a compiler is tracing this call; an exported graph keeps torch's operators instead."""
    return torch.compiler.is_compiling() and not torch.compiler.is_exporting()


def use_kernels(x: torch.Tensor) -> bool:
    """Whether an operation on `x` launches its kernel.

    Not under a compiler, which fuses plain operations itself, nor on empty tensors, nor in fp64.
    """
    if torch.compiler.is_compiling():
        return False
    return has_kernels(x.device) and x.numel() > 0 and x.dtype != torch.float64


def in_rows(x: torch.Tensor) -> torch.Tensor:
    """`x`, or a copy, with its last axis contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()


def attention_backends(device: torch.device, has_mask: bool) -> AbstractContextManager[Any]:
    """A context for torch's attention on a device: torch's own order, without cuDNN's where it is unfit.

    Torch knows with which versions of cuDNN its attention is both right and fastest, and obeys
    TORCH_CUDNN_SDPA_DEPRIORITIZED. Two cases it leaves open. With a mask, cuDNN's backward pass gives NaN at
    some lengths (pytorch issue 196678). And where torch's deterministic algorithms are on, cuDNN's gradients
    would depend on the order of threads.
    """
    if device.type == "cuda" and (has_mask or torch.are_deterministic_algorithms_enabled()):
        return sdpa_kernel(WITHOUT_CUDNN, set_priority=True)
    return nullcontext()


class _Pass(threading.local):
    """The pass of a checkpoint, which autograd repeats in a thread of its own, and whether a block ends."""

    number = 0
    is_last_product = False


_pass = _Pass()


def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """The contexts of the first and of the second pass of one checkpoint, for its `context_fn`."""
    return _within(1), _within(2)


@contextmanager
def _within(number: int) -> Iterator[None]:
    before, _pass.number = _pass.number, number
    try:
        yield
    finally:
        _pass.number = before


@contextmanager
def last_product() -> Iterator[None]:
    """Mark the last matmul of a block, whose result is the block's output or a term of it."""
    _pass.is_last_product = True
    try:
        yield
    finally:
        _pass.is_last_product = False


def is_unread() -> bool:
    """Whether the next matmul's result is never read: it is a block's last, in its second pass."""
    return not torch.compiler.is_compiling() and _pass.is_last_product and _pass.number == 2


def is_discarding() -> bool:
    """Whether nothing of this pass is kept for a backward pass, because another pass follows."""
    return not torch.compiler.is_compiling() and _pass.number == 1
