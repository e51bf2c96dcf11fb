"""Compiles a launch for a GPU that need not be here, and runs what came out on tensors of a CPU."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from narrowgauge.kernels.triton import rounding
from ptx.machine import run
from ptx.memory import Global
from ptx.parse import Kernel, parse

KINDS = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.uint8: "u8",
    torch.int8: "i8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.bool: "i1",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5",
    torch.float8_e8m0fnu: "u8",
}
OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")


def kind_of(value: Any) -> str:
    """The type of an argument in a signature of Triton's."""
    if isinstance(value, torch.Tensor):
        return "*" + KINDS[value.dtype]
    return "fp32" if isinstance(value, float) else "i32" if abs(value) < 2**31 else "i64"


def is_multiple_of_16(value: Any) -> bool:
    number = value.data_ptr() if isinstance(value, torch.Tensor) else value
    return isinstance(number, int) and number % 16 == 0


def source_of(kernel: Any, given: dict[str, Any]) -> ASTSource:
    """A kernel with its arguments by name, specialized as a launch specializes it.

    A stride of 1 is a constant, and multiples of 16 are known to be that.
    """
    constant = {p.name for p in kernel.params if p.is_constexpr}
    unspecialized = {p.name for p in kernel.params if p.do_not_specialize}
    ones = {k for k, v in given.items() if type(v) is int and v == 1} - unspecialized
    constant |= ones | {k for k, v in given.items() if v is None}
    signature = {k: "constexpr" if k in constant else kind_of(given[k]) for k in kernel.arg_names}
    attrs = {
        (i,): [["tt.divisibility", 16]]
        for i, k in enumerate(kernel.arg_names)
        if k not in constant | unspecialized and is_multiple_of_16(given[k])
    }
    return ASTSource(kernel, signature, constexprs={k: given[k] for k in constant}, attrs=attrs)


@lru_cache(maxsize=64)
def _parsed(text: str) -> Kernel:
    return parse(text)


def target_of(name: str) -> GPUTarget:
    """A target by name, such as cuda:90 or hip:gfx942."""
    backend, arch = name.split(":")
    return GPUTarget(backend, int(arch) if backend == "cuda" else arch, 32 if backend == "cuda" else 64)


def converts_to_fp8(target: GPUTarget) -> bool:
    """Whether casts let it round to FP8."""
    return target.backend == "cuda" and target.arch >= 90


#: The launches that were executed, by the name of the kernel.
executed: Counter[str] = Counter()


def execute(kernel: Any, target: GPUTarget, grid: Sequence[int], given: dict[str, Any]) -> None:
    """Compile a launch for a target, and run it on the CPU's tensors among its arguments."""
    options = {k: given.pop(k) for k in OPTIONS if k in given}
    source = source_of(kernel, given)
    compiled = triton.compile(source, target=target, options=options)
    named = [given[k] for k in kernel.arg_names if source.signature[k] != "constexpr"]
    tensors = [a for a in named if isinstance(a, torch.Tensor)]
    # Two more parameters are memory for Triton itself, which no kernel here uses.
    values = [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in named] + [0, 0]
    where = (*grid, 1, 1)[:3]
    run(_parsed(compiled.asm["ptx"]), where, values, compiled.metadata.shared, Global(tensors))
    executed[kernel.__name__] += 1


@contextmanager
def executing(name: str) -> Iterator[None]:
    """Within it every launch on the CPU's tensors executes what is compiled for the target `name`.

    Nothing is assembled: the cache of compiled kernels must be a separate directory.
    """
    target = target_of(name)

    def launch(self: Any, *args: Any, grid: Sequence[int], warmup: bool, **options: Any) -> None:
        execute(self, target, grid, dict(zip(self.arg_names, args, strict=False)) | options)

    with (
        patch.object(JITFunction, "run", launch),
        patch.object(CUDABackend, "make_cubin", lambda *_: b""),
        patch.object(rounding, "converts_to_fp8", lambda _: converts_to_fp8(target)),
    ):
        yield
