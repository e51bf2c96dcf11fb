"""Compile every kernel that the cases launch to machine code of GPUs that need not be here.

    python machine_code.py TARGET...        such as cuda:90 or hip:gfx942

Triton's own compiler and assembler do it; only the launch is replaced. For each kernel and target a line of
JSON reports the assembler's figures for it.
"""

import json
import re
import subprocess
import sys
import tempfile
from importlib import import_module
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from narrowgauge.kernels.triton import launch

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
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


def target_of(name):
    backend, arch = name.split(":")
    return GPUTarget(backend, int(arch) if backend == "cuda" else arch, 32 if backend == "cuda" else 64)


def kind_of(value):
    if isinstance(value, torch.Tensor):
        return "*" + KINDS[value.dtype]
    return "fp32" if isinstance(value, float) else "i32" if abs(value) < 2**31 else "i64"


def is_multiple_of_16(value):
    number = value.data_ptr() if isinstance(value, torch.Tensor) else value
    return isinstance(number, int) and number % 16 == 0


def converts_to_fp8(target):
    """Whether casts let it round to FP8."""
    return target.backend == "cuda" and target.arch >= 90


def resources(kernel, target):
    """The assembler's report: registers a thread, bytes of stack (spilled registers among them)."""
    if target.backend != "cuda":
        return {"spills": int(re.search(r"\.vgpr_spill_count:\s*(\d+)", kernel.asm["amdgcn"])[1])}
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [CUOBJDUMP, "--dump-resource-usage", file.name]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {
        "registers": int(re.search(r"REG:(\d+)", told)[1]),
        "spills": int(re.search(r"STACK:(\d+)", told)[1]),
    }


def instructions_of(kernel):
    """The instructions of a thread; a cast has no loop, so each runs once."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        told = subprocess.run([CUOBJDUMP, "-sass", file.name], capture_output=True, text=True, check=True)
    return len(re.findall(r"/\*[0-9a-f]{4,5}\*/ ", told.stdout))


def compiling_for(targets, found):
    """In place of a launch; every launch requires that multiplications and additions are not fused."""

    def run(self, *args, grid, warmup, **kwargs):
        given = dict(zip(self.arg_names, args, strict=False)) | kwargs
        assert given["enable_fp_fusion"] is False, self.__name__
        options = {k: given.pop(k) for k in ("num_warps", "num_stages", "enable_fp_fusion") if k in given}
        # As a launch does: a stride of 1 is a constant, and multiples of 16 are known to be that.
        constant = {p.name for p in self.params if p.is_constexpr}
        constant |= {k for k, v in given.items() if v is None or (type(v) is int and v == 1)}
        signature = {k: "constexpr" if k in constant else kind_of(given[k]) for k in self.arg_names}
        attrs = {
            (i,): [["tt.divisibility", 16]]
            for i, k in enumerate(self.arg_names)
            if k not in constant and is_multiple_of_16(given[k])
        }
        for target in targets:
            if given.get("CONVERTS") and not converts_to_fp8(target):
                continue
            source = ASTSource(self, signature, constexprs={k: given[k] for k in constant}, attrs=attrs)
            kernel = triton.compile(source, target=target, options=options)
            shared = kernel.metadata.shared
            of = {"kernel": self.__name__, "target": f"{target.backend}:{target.arch}", "shared": shared}
            if given.get("CONVERTS"):
                rows, columns = (
                    given[n] if n in given else given[m] for n, m in (("TR", "ROWS"), ("TK", "COLS"))
                )
                of["elements"] = rows * columns // options["num_warps"] // 32  # of a thread
                of["instructions"] = instructions_of(kernel)
                # pairs of codes that one instruction makes
                of["conversions"] = len(re.findall(r"cvt\.rn\.satfinite\.e\dm\dx2\.f32", kernel.asm["ptx"]))
            found.append(of | resources(kernel, target))

    return run


def main(names):
    sys.path.insert(0, str(Path(__file__).parent))
    found = []
    launch._KNOWN = ()  # so that no launch goes past Triton's binder, to a GPU that need not be here
    JITFunction.run = compiling_for([target_of(n) for n in names], found)
    for path in sorted(Path(__file__).parent.glob("cases_*.py")):
        for case in import_module(path.stem).CASES:
            case()
    for line in {json.dumps(f): None for f in found}:
        print(line)


if __name__ == "__main__":
    main(sys.argv[1:])
