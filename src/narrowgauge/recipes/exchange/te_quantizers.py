"""TransformerEngine's quantizers as a table: a line of Python, and the casts that it represents.

A quantizer makes two tensors from one: *rowwise*, which the first GEMM of the tensor contracts (fprop.x,
fprop.w, dgrad.dy), and *columnwise*, which its second GEMM contracts (wgrad.x, dgrad.w, wgrad.dy). A
`HybridQuantizer` joins the directions of two quantizers.

Source: TransformerEngine @ d0067d0, pytorch/tensor/{float8,float8_blockwise,mxfp8,nvfp4,hybrid}_tensor.py,
and csrc/quantizer.cpp for what NVFP4's options exclude.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import product

from narrowgauge.quantization import Cast, make_cast
from narrowgauge.recipes.exchange.reading import Signatures

# The tensor, its rowwise place, its columnwise place.
TENSORS = (
    ("input", "fprop.x", "wgrad.x"),
    ("weight", "fprop.w", "dgrad.w"),
    ("grad_output", "dgrad.dy", "wgrad.dy"),
)
ALL = tuple(tensor for tensor, _, _ in TENSORS)
ONES_16 = [1] * 16
_USAGE = {"rowwise": "True", "columnwise": "True"}
#: The parameters of each quantizer that a factory may return.
SIGNATURES: Signatures = {
    "IdentityQuantizer": {},
    "Float8CurrentScalingQuantizer": {
        "fp8_dtype": "",
        "device": "'cuda'",
        **_USAGE,
        "use_existing_amax": "False",
        "with_amax_reduction": "False",
        "amax_reduction_group": "None",
        "force_pow_2_scales": "False",
        "amax_epsilon": "0.0",
    },
    "Float8BlockQuantizer": {
        "fp8_dtype": "",
        **_USAGE,
        "amax_epsilon": "0.0",
        "force_pow_2_scales": "True",
        "block_scaling_dim": "2",
    },
    "MXFP8Quantizer": {"fp8_dtype": "", **_USAGE, "with_2d_quantization": "False"},
    "NVFP4Quantizer": {
        "fp4_dtype": "DType.kFloat4E2M1",
        **_USAGE,
        "with_amax_reduction": "False",
        "amax_reduction_group": "None",
        "with_rht": "False",
        "with_post_rht_amax": "False",
        "with_2d_quantization": "False",
        "stochastic_rounding": "False",
        "row_scaled_nvfp4": "False",
        "nvfp4_use_4over6": "False",
        "nvfp4_e4m3_max": "448",
        "nvfp4_4over6_err_mode": "'MAE'",
        "with_random_sign_mask": "True",
    },
    "HybridQuantizer": {
        "rowwise_quantizer": "",
        "columnwise_quantizer": "",
        "columnwise_source": "'original'",
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantizer:
    """One configuration of one of TransformerEngine's quantizers.

    Attributes:
        text: The Python that constructs it.
        family: Both operands of a GEMM must be of one family.
        row: The cast of its rowwise tensor; None if it makes none.
        column: The cast of its columnwise tensor; None if it makes none.
        tensors: The tensors that may use it.
    """

    text: str
    family: str
    row: Cast | None
    column: Cast | None
    tensors: tuple[str, ...] = ALL


@cache
def quantizers(compute: str) -> tuple[Quantizer, ...]:
    """All configurations; `compute` is the format of unquantized tensors."""
    wide = make_cast(compute)
    identity = Quantizer(text="IdentityQuantizer()", family="wide", row=wide, column=wide)
    return (identity, *_fp8_quantizers(), *_mxfp8_quantizers(), *_nvfp4_quantizers())


def _fp8_quantizers() -> Iterator[Quantizer]:
    for element, power_of_two in product(("e4m3", "e5m2"), (False, True)):
        dtype = f"DType.kFloat8{element.upper()}"
        cast = make_cast({"cast": element, "power_of_two": power_of_two})
        text = (
            f'Float8CurrentScalingQuantizer({dtype}, device="cuda", force_pow_2_scales={power_of_two}, '
            "amax_epsilon=0.0)"
        )
        yield Quantizer(text=text, family=f"fp8 {element}", row=cast, column=cast)
        for dim, block in ((1, 128), (2, [128, 128])):
            cast = make_cast({"element": element, "block": block, "power_of_two": power_of_two})
            text = (
                f"Float8BlockQuantizer({dtype}, rowwise=True, columnwise=True, amax_epsilon=0.0, "
                f"force_pow_2_scales={power_of_two}, block_scaling_dim={dim})"
            )
            tensors = ("weight",) if dim == 2 else ALL
            yield Quantizer(text=text, family="fp8 blocks", row=cast, column=cast, tensors=tensors)


def _mxfp8_quantizers() -> Iterator[Quantizer]:
    for element, name in (("E4M3", "mxfp8"), ("E5M2", "mxfp8-e5m2")):
        cast = make_cast(name)
        text = f"MXFP8Quantizer(DType.kFloat8{element})"
        yield Quantizer(text=text, family="mxfp8", row=cast, column=cast)
    cast = make_cast({"cast": "mxfp8", "block": [32, 32]})
    text = "MXFP8Quantizer(DType.kFloat8E4M3, with_2d_quantization=True)"
    yield Quantizer(text=text, family="mxfp8", row=cast, column=cast, tensors=("weight",))


def _nvfp4_quantizers() -> Iterator[Quantizer]:
    def quantizer(row: Mapping[str, object], options: str, tensor: str = "", **column: object) -> Quantizer:
        made, both = ({"cast": "nvfp4", **row, **more} for more in ({}, column))
        text = f"NVFP4Quantizer(DType.kFloat4E2M1{options})"
        tensors = (tensor,) if tensor else ALL
        return Quantizer(
            text=text, family="nvfp4", row=make_cast(made), column=make_cast(both), tensors=tensors
        )

    yield quantizer({}, "")
    yield quantizer({"cast": "nvfp4-2d"}, ", with_2d_quantization=True", "weight")
    yield quantizer({"rounding": "stochastic"}, ", stochastic_rounding=True", "grad_output")
    for random in (True, False):
        signs: dict[str, object] = {} if random else {"signs": ONES_16}
        rht = f", with_rht=True, with_post_rht_amax=True, with_random_sign_mask={random}"
        yield quantizer({}, rht, "input", hadamard=16, **signs)
        yield quantizer({}, rht, "grad_output", hadamard=16, **signs)
        rounding = {"rounding": "stochastic"}
        yield quantizer(rounding, f"{rht}, stochastic_rounding=True", "grad_output", hadamard=16, **signs)
    for choose, target, is_2d in product(("mae", "mse"), (256, 448), (False, True)):
        keys: dict[str, object] = {"candidates": [6, 4], "choose": choose} | (
            {"scale_target": 448} if target == 448 else {}
        )
        options = (
            f', nvfp4_use_4over6=True, nvfp4_e4m3_max={target}, nvfp4_4over6_err_mode="{choose.upper()}"'
        )
        if is_2d:
            yield quantizer(keys | {"cast": "nvfp4-2d"}, f"{options}, with_2d_quantization=True", "weight")
        else:
            yield quantizer(keys, options)
    rows = make_cast({"cast": "nvfp4", "tensor_scale": "row"})
    text = "NVFP4Quantizer(DType.kFloat4E2M1, columnwise=False, row_scaled_nvfp4=True)"
    yield Quantizer(text=text, family="nvfp4", row=rows, column=None, tensors=("input",))
