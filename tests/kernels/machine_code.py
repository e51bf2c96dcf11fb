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

import triton
from triton.runtime.jit import JITFunction

sys.path.insert(0, str(Path(__file__).parents[1]))
from ptx.compiled import OPTIONS, converts_to_fp8, source_of, target_of

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


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
        options = {k: given.pop(k) for k in OPTIONS if k in given}
        for target in targets:
            if given.get("CONVERTS") and not converts_to_fp8(target):
                continue
            kernel = triton.compile(source_of(self, given), target=target, options=options)
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
    JITFunction.run = compiling_for([target_of(n) for n in names], found)
    for path in sorted(Path(__file__).parent.glob("cases_*.py")):
        for case in import_module(path.stem).CASES:
            case()
    for line in {json.dumps(f): None for f in found}:
        print(line)


if __name__ == "__main__":
    main(sys.argv[1:])
