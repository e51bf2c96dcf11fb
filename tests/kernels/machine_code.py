"""Compile every kernel to machine code of GPUs that need not be here, at the real shapes of tests/gpu.

    python machine_code.py TARGET...        such as cuda:90 or hip:gfx942

A step launches no other variant (tests/kernels/test_covers.py). Triton's own compiler and assembler do
it; only the launch is replaced. For each kernel and target a line of JSON reports the assembler's figures.
"""

import json
import re
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import torch
import triton

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
from gpu.operations import passes
from gpu.table import OPERATIONS
from narrowgauge.kernels.activation import gelu, swiglu
from narrowgauge.kernels.cross_entropy import cross_entropy
from narrowgauge.kernels.norm import norm
from narrowgauge.kernels.triton import launch as door
from narrowgauge.recipes import named_device
from narrowgauge.system.devices import imagine
from ptx.compiled import OPTIONS, source_of, target_of

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
META = torch.device("meta")
#: Casts whose code is another's but for constants.
ALIKE = re.compile(r"fnuz|mxint8|mxfp6-e3m2|mxfp8-e5m2|powers of two along axis")


def on_meta(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device=META)


def of_loss(z_TV):
    y_T = torch.empty(len(z_TV), dtype=torch.long, device=META)
    return cross_entropy(z_TV, y_T, targets=3, z_loss=1e-4)[0]


#: What the checks leave out: other dtypes, the widest row, ignored targets and a z-loss.
OTHERS = [
    partial(passes, swiglu, "x", on_meta(64, 9728, dtype=torch.float16)),
    partial(passes, swiglu, "x", on_meta(64, 192)),
    partial(passes, gelu, "x", on_meta(64, 3072)),
    partial(passes, of_loss, "z", on_meta(64, 50257)),
    partial(passes, of_loss, "z", on_meta(64, 128256, dtype=torch.float16)),
    *(
        partial(
            passes,
            lambda x, *weights: norm(x, *weights, 1e-5, "layer", torch.float16),
            *("x weight bias", on_meta(64, 8192, dtype=dtype), on_meta(8192), on_meta(8192)),
        )
        for dtype in (torch.float32, torch.bfloat16)
    ),
]


def told_by(program, *words, file):
    return subprocess.run([program, *words, file], capture_output=True, text=True, check=True).stdout


def figures_of(kernel, target, converts):
    """The assembler's report: registers a thread, bytes of stack (spilled registers among them)."""
    if target.backend != "cuda":
        return {"spills": int(re.search(r"\.vgpr_spill_count:\s*(\d+)", kernel.asm["amdgcn"])[1])}
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        told = told_by(CUOBJDUMP, "--dump-resource-usage", file=file.name)
        found = {
            "registers": int(re.search(r"REG:(\d+)", told)[1]),
            "spills": int(re.search(r"STACK:(\d+)", told)[1]),
        }
        if converts:  # of a thread, whose instructions run once each, as a cast has no loop
            code = told_by(CUOBJDUMP, "-sass", file=file.name)
            found["instructions"] = len(re.findall(r"/\*[0-9a-f]{4,5}\*/ ", code))
            # pairs of codes that one instruction makes
            found["conversions"] = len(re.findall(r"cvt\.rn\.satfinite\.e\dm\dx2\.f32", kernel.asm["ptx"]))
    return found


def compile_for(target, found, kernel, _grid, args, options, _effects):
    """In place of a launch; every launch requires that multiplications and additions are not fused."""
    given = dict(zip(kernel.arg_names, args, strict=False)) | options
    assert given["enable_fp_fusion"] is False, kernel.__name__
    options = {k: given.pop(k) for k in OPTIONS if k in given}
    source = source_of(kernel, given)
    if (key := (source.hash(), *options.items())) in found:
        return
    made = triton.compile(source, target=target, options=options)
    converts = bool(given.get("CONVERTS"))
    found[key] = {"kernel": kernel.__name__, "shared": made.metadata.shared}
    found[key] |= figures_of(made, target, converts)
    if converts:
        found[key]["elements"] = given["TR"] * given["TK"] // options["num_warps"] // 32  # of a thread


def main(names):
    for name in names:
        target, found = target_of(name), {}
        door.perform = partial(compile_for, target, found)
        gpu = named_device(f"sm_{target.arch}" if target.backend == "cuda" else target.arch)
        with imagine(gpu, lambda _: None):
            for operation in OPERATIONS.values():
                for shape in () if ALIKE.search(operation.name) else operation.real:
                    operation.run(META, shape)
            for run in OTHERS:
                run()
        for figures in found.values():
            print(json.dumps(figures))


if __name__ == "__main__":
    main(sys.argv[1:])
