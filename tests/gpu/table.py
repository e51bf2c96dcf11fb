"""The table of kernels: each operation that has one, its small and its real shapes, and how it is compared.

A step launches no variant of a kernel that no operation launches (tests/kernels/test_covers.py).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch

import gpu.joined_operations as joined
import gpu.operations as of
from gpu.compare import Tensors, close, near, same
from narrowgauge.kernels.activation import gelu, swiglu
from narrowgauge.quantization import cast, cast_names, make_cast
from narrowgauge.recipes import recipe

Shape = tuple[int, ...]
Run = Callable[[torch.device, Shape], Tensors]


@dataclass(frozen=True)
class Operation:
    """An operation with a kernel; `run` computes it on a device at a shape."""

    name: str
    run: Run
    compare: Callable[[Tensors, Tensors], None]
    small: Shape
    real: tuple[Shape, ...]
    reference: Run  # the same, unless the operation exists only as a kernel


OPERATIONS: dict[str, Operation] = {}


def add(runs: Mapping[str, Run], compare: Callable[..., None], small: Shape, *real: Shape) -> None:
    """Add operations with the same shapes; a pair is a kernel and its reference."""
    for name, run in runs.items():
        run, reference = run if isinstance(run, tuple) else (run, run)
        OPERATIONS[name] = Operation(name, run, compare, small, real, reference)


def of_casts(**casts):
    """State by place."""
    return {place: make_cast(c) for place, c in casts.items()}


RANDOM = {"rounding": "stochastic"}
#: Every named cast with a scale, and others that shipped recipes have.
CASTS = {
    **{name: cast(name) for name in cast_names() if cast(name).is_scaled},
    **{f"{name} with random bits": make_cast({"cast": name} | RANDOM) for name in ("e5m2", "mxfp4", "nvfp4")},
    "nvfp4 with random bits and a transform": make_cast({"cast": "nvfp4", "hadamard": 16} | RANDOM),
    **{f"{name} with powers of two": c for name, c in joined.POWERS_OF_TWO.items()},
    "mxfp4 with even scales": make_cast({"cast": "mxfp4", "scale_rule": "even"}),
}
IN_TILES = ("mxfp8", "mxfp4", "nvfp4", "nvfp4-2d", "nvfp4 with random bits")
EACH_AXIS = {
    "": {name: partial(of.matrix_cast, c) for name, c in CASTS.items()},
    " as the hardware reads it,": {name: partial(joined.hardware_layout, CASTS[name]) for name in IN_TILES},
}
_thrice = partial(near, roundings=3)  # of the sigmoid, its GEMM and the result
# A last bit of a sigmoid, of a sum, or of a matmul that differs between devices, may change a rounding.
_nearly = partial(close, share=0.01)
_close_to_fp32 = partial(close, share=0.02)  # probabilities are rounded to bf16

add(
    {
        f"{name}{words} along axis {axis}": partial(run, axis)
        for words, runs in EACH_AXIS.items()
        for name, run in runs.items()
        for axis in (-1, 0)
    }
    | joined.BOTH_LAYOUTS,
    *(same, (72, 200), (4096, 4608)),
)
add({"cast without outliers": of.clamped_cast}, same, (40, 72), (4096, 8960))
add({"FP4 matmul with separate outliers": of.product_with_outliers_apart}, near, (40, 72), (4096, 8960))
HEADS = {"bias and positions": (True, True), "positions": (False, True), "bias": (True, False)}
add(
    {f"heads with {words}": partial(joined.heads, *options) for words, options in HEADS.items()},
    *(_nearly, (2, 9, 4, 2, 16), (4, 1024, 12, 2, 128)),
)
add({"RMSNorm of two terms": joined.norm_of_terms}, _nearly, (24, 100), (16384, 1536))
add({"codes along the other axis": joined.turned_codes}, same, (72, 200), (17920, 1536))
add({"scales of a product": joined.scaled_product}, same, (72, 200), (4096, 17920))
add({"random signs": joined.signs}, same, (16,), joined.SIGNS)
add({"casts before a gather": joined.sharded_casts}, same, (72, 200), (4480, 1536))
add({"RMSNorm": partial(of.norms, "rms")}, near, (24, 100), (16384, 1536), (4096, 4096))
add({"LayerNorm": partial(of.norms, "layer")}, near, (24, 100), (16384, 768))
add({"SwiGLU": partial(of.passes_of, swiglu)}, _thrice, (24, 200), (4096, 17920))
add({"GELU": partial(of.passes_of, gelu)}, _thrice, (24, 100), (16384, 3072))
add({"rotary positions": of.rotary_passes}, near, (2, 3, 9, 16), (4, 12, 1024, 128))
add({"cross entropy": partial(of.losses, False)}, near, (20, 24, 300), (2048, 64, 50257))
add({"head and loss in chunks": partial(of.losses, True)}, _nearly, (20, 24, 300), (8192, 1024, 50257))
CODES_SR = make_cast({"cast": "e4m3"} | RANDOM)
STATES = {f"{name}'s state": recipe(name).state for name in ("msamp-o1", "msamp-o2", "msamp-o3", "bf16-sr")}
STATES["16 bits"] = of_casts(weight="fp32", grad="bf16", m="bf16", v="fp16")
STATES["random codes"] = of_casts(master="fp32", weight=CODES_SR, grad="fp16", m=CODES_SR, v="e5m2")
STATES["random fp16"] = of_casts(
    master={"cast": "fp16-scaled"} | RANDOM, weight={"cast": "bf16"} | RANDOM, grad="fp32", m="bf16", v="bf16"
)
SUMS = {"in FP8": recipe("msamp-o2").state["grad"], "without a factor": CODES_SR}
SUMS["to nearest"] = make_cast({"cast": "e5m2", "prescale": True})
add(
    {f"AdamW on {name}": partial(of.adamw_update, casts) for name, casts in STATES.items()}
    | {f"gradients added {words}": partial(of.gradient_sums, c) for words, c in SUMS.items()},
    *(same, (71, 137), (4096, 4096)),
)
add(
    {"attention": (of.attention, of.attention_in_fp32)},
    *(_close_to_fp32, (2, 4, 40, 16), (2, 12, 1024, 128), (1, 8, 4096, 128)),
)
