"""Triton 3.8.0: float32 to E4M3 on sm_89 rounds twice.

OFP8 converts with one rounding. For `sm_89` Triton goes through float16, rounding toward zero, and then to
E4M3; `sm_90` converts at once. 0.39 % of codes differ (imitated on a CPU). Triton 3.9.0 converts at once
for `sm_89` as well.
"""

import triton, triton.language as tl
from triton.backends.compiler import GPUTarget


def narrow(x, out):
    tl.store(out + tl.arange(0, 128), tl.load(x + tl.arange(0, 128)).to(tl.float8e4nv))


if __name__ == "__main__":
    source = triton.compiler.ASTSource(triton.jit(narrow), {"x": "*fp32", "out": "*fp8e4nv"})
    for arch in (89, 90):
        text = triton.compile(source, target=GPUTarget("cuda", arch, 32)).asm["ptx"]
        print(arch, *sorted({w for w in text.split() if w.startswith("cvt.r")}))
# prints:
#   89 cvt.rn.satfinite.e4m3x2.f16x2 cvt.rz.f16.f32
#   90 cvt.rn.satfinite.e4m3x2.f32
