"""Compares every kernel with its reference: the same operation with kernels and with plain torch.

At a small shape the reference runs on the CPU, whose digits are verified by this project's tests. At real
shapes it runs on the device itself. On a CPU, kernels run in Triton's interpreter and only at the small
shape, which verifies their values but not a GPU's compiler.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

import narrowgauge.bench.verify.joined_operations as joined
from narrowgauge.bench.verify.check import Check, Tensors, close, near, same
from narrowgauge.bench.verify.operations import (
    adamw_update,
    attention,
    attention_in_fp32,
    clamped_cast,
    gelu_passes,
    gradient_sums,
    losses,
    matrix_cast,
    norms,
    product_with_outliers_apart,
    rotary_passes,
    swiglu_passes,
)
from narrowgauge.kernels.dispatch import plain_operations
from narrowgauge.quantization import Cast, cast, cast_names, make_cast
from narrowgauge.recipes import recipe

Shape = tuple[int, ...]
PLAIN = (
    "start runs under NARROWGAUGE_KERNELS=0, so that plain operations compute this; please report it with "
    "this file"
)
ATTENTION = (
    "this kernel is torch's: try another version of torch, or --training.deterministic true, which selects "
    "another kernel on a GPU"
)
_STATES = ("msamp-o1", "msamp-o2", "msamp-o3", "bf16-sr")


@dataclass(frozen=True)
class _Operation:
    """An operation with a kernel; `run` computes it on a device at a shape."""

    name: str
    run: Callable[[torch.device, Shape], Tensors]
    compare: Callable[[Tensors, Tensors], str]
    small: Shape
    real: tuple[Shape, ...]
    do: str = PLAIN
    reference: Callable[[torch.device, Shape], Tensors] | None = None  # None: the same without kernels


def kernel_checks(device: torch.device, lacks: str) -> list[Check]:
    """The checks of all kernels; `lacks` is the reason why this machine cannot run kernels, or empty."""
    return [
        Check("kernels", o.name, partial(_compare, o), o.do, "" if o.do == ATTENTION else lacks)
        for o in _operations()
    ]


def _compare(operation: _Operation, device: torch.device) -> str:
    shapes = [operation.small, *(operation.real if device.type == "cuda" else ())]
    words = ""
    for shape in shapes:
        got = operation.run(device, shape)
        with plain_operations():
            reference = device if shape != operation.small else torch.device("cpu")
            words = operation.compare(got, (operation.reference or operation.run)(reference, shape))
    return f"{words}, {' and '.join(' x '.join(map(str, shape)) for shape in shapes)}"


def _operations() -> list[_Operation]:
    casts = [
        _Operation(f"{name} along axis {axis}", run, same, (72, 200), ((4096, 4608),))
        for name, axis, run in _casts()
    ]
    thrice = partial(near, roundings=3)  # of the sigmoid, its GEMM and the result
    nearly = partial(close, share=0.01)  # bf16 logits of a matmul that differs between devices
    close_to_fp32 = partial(close, share=0.02)  # probabilities are rounded to bf16
    rows, wide = (24, 100), ((16384, 1536), (4096, 4096))
    return [
        *casts,
        _Operation("cast without outliers", clamped_cast, same, (40, 72), ((4096, 8960),)),
        _Operation(
            "FP4 matmul with separate outliers", product_with_outliers_apart, near, (40, 72), ((4096, 8960),)
        ),
        *_joined(),
        _Operation("RMSNorm", partial(norms, "rms"), near, rows, wide),
        _Operation("LayerNorm", partial(norms, "layer"), near, rows, ((16384, 768),)),
        _Operation("SwiGLU", swiglu_passes, thrice, (24, 200), ((4096, 17920),)),
        _Operation("GELU", gelu_passes, thrice, rows, ((16384, 3072),)),
        _Operation("rotary positions", rotary_passes, near, (2, 3, 9, 16), ((4, 12, 1024, 128),)),
        _Operation("cross entropy", partial(losses, False), near, (20, 24, 300), ((2048, 64, 50257),)),
        _Operation(
            "head and loss in chunks", partial(losses, True), nearly, (20, 24, 300), ((8192, 1024, 50257),)
        ),
        *(
            _Operation(
                f"AdamW on {name}'s state",
                partial(adamw_update, recipe(name)),
                same,
                (71, 137),
                ((4096, 4096),),
            )
            for name in _STATES
        ),
        _Operation(
            "gradients added in FP8",
            partial(gradient_sums, recipe("msamp-o2")),
            same,
            (71, 137),
            ((4096, 4096),),
        ),
        _Operation(
            "attention",
            attention,
            close_to_fp32,
            (2, 4, 40, 16),
            ((2, 12, 1024, 128), (1, 8, 4096, 128)),
            ATTENTION,
            attention_in_fp32,
        ),
    ]


def _joined() -> list[_Operation]:
    """What a step joins into one kernel, what it lays out for the hardware, and the casts of FSDP."""
    matrix, real = (72, 200), ((4096, 4608),)
    nearly = partial(close, share=0.01)  # a last bit of a sigmoid or a sum may change a rounding
    in_tiles = {name: make_cast(name) for name in ("mxfp8", "mxfp4", "nvfp4", "nvfp4-2d")}
    in_tiles["nvfp4 with random bits"] = make_cast({"cast": "nvfp4", "rounding": "stochastic"})
    qkv = {"bias and positions": (True, True), "positions": (False, True), "bias": (True, False)}
    return [
        *(_Operation(name, run, same, matrix, real) for name, run in joined.BOTH_LAYOUTS),
        *(
            _Operation(
                f"{name} as the hardware reads it, along axis {axis}",
                partial(joined.hardware_layout, c, axis),
                same,
                matrix,
                real,
            )
            for name, c in in_tiles.items()
            for axis in (-1, 0)
        ),
        *(
            _Operation(
                f"heads with {words}",
                partial(joined.heads, *options),
                nearly,
                (2, 9, 4, 2, 16),
                ((4, 1024, 12, 2, 128),),
            )
            for words, options in qkv.items()
        ),
        _Operation("RMSNorm of two terms", joined.norm_of_terms, nearly, (24, 100), ((16384, 1536),)),
        _Operation("codes along the other axis", joined.turned_codes, same, matrix, ((17920, 1536),)),
        _Operation("scales of a product", joined.scaled_product, same, matrix, ((4096, 17920),)),
        _Operation("random signs", joined.signs, same, (16,), (joined.SIGNS,)),
        _Operation("casts before a gather", joined.sharded_casts, same, matrix, ((4480, 1536),)),
    ]


def _casts() -> list[tuple[str, int, Callable[[torch.device, Shape], dict[str, Tensor | None]]]]:
    """(name, axis, operation) for every named cast with a scale, and for others that shipped recipes have."""
    random = {"rounding": "stochastic"}
    found: dict[str, Cast] = {name: cast(name) for name in cast_names() if cast(name).is_scaled}
    found |= {
        f"{name} with random bits": make_cast({"cast": name} | random) for name in ("e5m2", "mxfp4", "nvfp4")
    }
    transformed = make_cast({"cast": "nvfp4", "hadamard": 16} | random)
    found["nvfp4 with random bits and a transform"] = transformed
    found |= {f"{name} with powers of two": c for name, c in joined.POWERS_OF_TWO.items()}
    found["mxfp4 with even scales"] = make_cast({"cast": "mxfp4", "scale_rule": "even"})
    return [(name, axis, partial(matrix_cast, c, axis)) for name, c in found.items() for axis in (-1, 0)]
