"""TransformerEngine as two tables: a line of Python, and the casts that it represents.

`own_recipes` are recipe classes with options, which set all six places. `quantizers` make two tensors from
one: *rowwise*, which the first GEMM of the tensor contracts (fprop.x, fprop.w, dgrad.dy), and *columnwise*,
which its second GEMM contracts (wgrad.x, dgrad.w, wgrad.dy). A `HybridQuantizer` joins the directions of two.

Source: TransformerEngine @ d0067d0, common/recipe/__init__.py and, for the effect of each option,
pytorch/custom_recipes/quantizer_factories.py; pytorch/tensor/*_tensor.py, and csrc/quantizer.cpp for what
NVFP4's options exclude. Float8CurrentScaling gets exact accumulation in fprop, which is not its default.
"""

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

from narrowgauge.exchange.python_file import Entry, signatures, table
from narrowgauge.quantization import Cast, make_cast
from narrowgauge.recipes.places import GEMM_PLACES
from narrowgauge.recipes.recipe import Recipe

#: The rowwise and the columnwise place of each tensor.
TENSORS = {
    "input": ("fprop.x", "wgrad.x"),
    "weight": ("fprop.w", "dgrad.w"),
    "grad_output": ("dgrad.dy", "wgrad.dy"),
}
#: Parameters that set in how many bits a GEMM accumulates, which a recipe does not specify.
ACCUMULATION = ("fp8_gemm_fprop", "fp8_gemm_dgrad", "fp8_gemm_wgrad")
_ATTENTION = "fp8_dpa=False, fp8_mha=False, backward_override=None"
#: Each recipe class with its defaults if no environment variable is set.
RECIPES = signatures(f"""
DelayedScaling(
    margin=0, fp8_format=Format.HYBRID, amax_history_len=1024, amax_compute_algo="max",
    scaling_factor_compute_algo=None, reduce_amax=True, {_ATTENTION},
)
Float8CurrentScaling(
    use_power_2_scales=False, fp8_format=Format.HYBRID, fp8_gemm_fprop=MMParams(use_split_accumulator=False),
    fp8_gemm_dgrad=MMParams(), fp8_gemm_wgrad=MMParams(), {_ATTENTION},
)
MXFP8BlockScaling(margin=0, fp8_format=Format.E4M3, {_ATTENTION}, enable_2d_quantization=False)
Float8BlockScaling(
    use_f32_scales=False, fp8_format=Format.E4M3,
    x_block_scaling_dim=1, w_block_scaling_dim=2, grad_block_scaling_dim=1,
    fp8_gemm_fprop=MMParams(), fp8_gemm_dgrad=MMParams(), fp8_gemm_wgrad=MMParams(), {_ATTENTION},
)
NVFP4BlockScaling(
    disable_rht=False, disable_stochastic_rounding=False, disable_2d_quantization=False,
    row_scaled_activation=False, nvfp4_4over6="none", nvfp4_4over6_e4m3_use_256="all",
    nvfp4_4over6_err_mode="MAE", fp4_format=Format.E2M1, fp8_format=Format.E4M3, {_ATTENTION},
)
""")
#: The other classes that a file may call: parameters of recipes, and the quantizers that a factory returns.
PARTS = signatures("""
MMParams(use_split_accumulator=True)
IdentityQuantizer()
Float8CurrentScalingQuantizer(
    fp8_dtype, device="cuda", rowwise=True, columnwise=True, use_existing_amax=False,
    with_amax_reduction=False, amax_reduction_group=None, force_pow_2_scales=False, amax_epsilon=0.0,
)
Float8BlockQuantizer(
    fp8_dtype, rowwise=True, columnwise=True, amax_epsilon=0.0, force_pow_2_scales=True, block_scaling_dim=2
)
MXFP8Quantizer(fp8_dtype, rowwise=True, columnwise=True, with_2d_quantization=False)
NVFP4Quantizer(
    fp4_dtype=DType.kFloat4E2M1, rowwise=True, columnwise=True, with_amax_reduction=False,
    amax_reduction_group=None, with_rht=False, with_post_rht_amax=False, with_2d_quantization=False,
    stochastic_rounding=False, row_scaled_nvfp4=False, nvfp4_use_4over6=False, nvfp4_e4m3_max=448,
    nvfp4_4over6_err_mode="MAE", with_random_sign_mask=True,
)
HybridQuantizer(rowwise_quantizer, columnwise_quantizer, columnwise_source="original")
""")
SIGNATURES = RECIPES | PARTS


def own_recipe(recipe: Recipe) -> Entry | None:
    """The recipe of TransformerEngine with the same six casts as a recipe, if there is one."""
    x, dy = recipe.casts["fprop.x"], recipe.casts["dgrad.dy"]
    rows = own_recipes()
    if x.history and dy.element.name in ("e4m3", "e5m2"):
        word = "HYBRID" if dy.element.name == "e5m2" else "E4M3"
        rows = (*rows, delayed_scaling(word, x.history, x.history_algorithm, x.margin))
    return next((own for own in rows if own.casts == recipe.casts), None)


def _six(x: Any, dy: Any, w: Any, wgrad_x: Any = None, wgrad_dy: Any = None) -> dict[str, Cast]:
    given = {"fprop.x": x, "fprop.w": w, "dgrad.dy": dy, "dgrad.w": w}
    given |= {"wgrad.dy": wgrad_dy or dy, "wgrad.x": wgrad_x or x}
    return {place: make_cast(value) for place, value in given.items()}


@table
def own_recipes() -> Iterator[Entry]:
    """All recipes but `delayed_scaling`, with Megatron's fields for those that it names."""
    for word, dy, mx_dy in (("HYBRID", "e5m2", "mxfp8-e5m2"), ("E4M3", "e4m3", "mxfp8")):
        block, square = {"block": 128, "power_of_two": True}, {"block": [128, 128], "power_of_two": True}
        of_dy, e4m3 = {"element": dy} | block, {"element": "e4m3"}
        square_mx = {"cast": "mxfp8", "block": [32, 32]}
        fp8 = f"fp8_format=Format.{word}"
        exact = "use_power_2_scales=False, fp8_gemm_fprop=MMParams(use_split_accumulator=True)"
        for name, text, casts in (
            ("tensorwise", f"Float8CurrentScaling({fp8}, {exact})", _six("e4m3", dy, "e4m3")),
            (
                "blockwise",
                f"Float8BlockScaling({fp8}, use_f32_scales=False)",
                _six(e4m3 | block, of_dy, e4m3 | square),
            ),
            (
                "mxfp8",
                f"MXFP8BlockScaling({fp8}, enable_2d_quantization=False)",
                _six("mxfp8", mx_dy, "mxfp8"),
            ),
            (
                "",
                f"MXFP8BlockScaling({fp8}, enable_2d_quantization=True)",
                _six("mxfp8", mx_dy, square_mx),
            ),
        ):
            fields = {"fp8_quantization_recipe": name, "fp8_format": word.lower()} if name else {}
            yield Entry(text, casts, fields)
    for rht, stochastic, is_2d in product((True, False), repeat=3):
        x: dict[str, Any] = {"cast": "nvfp4"}
        rounded = x | ({"rounding": "stochastic"} if stochastic else {})
        transform = {"hadamard": 16} if rht else {}
        text = (
            f"NVFP4BlockScaling(disable_rht={not rht}, disable_stochastic_rounding={not stochastic}, "
            f"disable_2d_quantization={not is_2d})"
        )
        casts = _six(x, rounded, "nvfp4-2d" if is_2d else x, x | transform, rounded | transform)
        yield Entry(text, casts, {"fp4_quantization_recipe": "nvfp4"} if rht and stochastic and is_2d else {})


def delayed_scaling(word: str, history: int, algorithm: str, margin: int) -> Entry:
    """DelayedScaling with a format, HYBRID or E4M3; Megatron has command-line arguments for it."""
    keys = {"element": "e4m3", "history": history, "history_algorithm": algorithm, "margin": margin}
    text = (
        f"DelayedScaling(margin={margin}, fp8_format=Format.{word}, amax_history_len={history}, "
        f'amax_compute_algo="{algorithm}", reduce_amax=True)'
    )
    arguments = {"--fp8-format": word.lower(), "--fp8-recipe": "delayed", "--fp8-margin": str(margin)}
    arguments |= {"--fp8-amax-history-len": str(history), "--fp8-amax-compute-algo": algorithm}
    of_dy = keys | {"element": "e5m2" if word == "HYBRID" else "e4m3"}
    return Entry(text, _six(keys, of_dy, keys), arguments)


@table
def quantizers(compute: str) -> Iterator[Entry]:
    """All configurations of its quantizers; `compute` is the format of unquantized tensors."""
    yield Entry("IdentityQuantizer()", dict.fromkeys(GEMM_PLACES, make_cast(compute)))
    yield from _fp8_quantizers()
    yield from _nvfp4_quantizers()


def _quantizer(text: str, value: Any, column: Mapping[str, Any] | None = None, tensor: str = "") -> Entry:
    """A quantizer of a tensor, or of all; `column` has the keys of its columnwise cast beside the others."""
    row = make_cast(value)
    second = make_cast(value | column) if column else row
    pairs = [TENSORS[tensor]] if tensor else TENSORS.values()
    return Entry(text, {place: c for pair in pairs for place, c in zip(pair, (row, second), strict=True)})


def _fp8_quantizers() -> Iterator[Entry]:
    for element, powers in product(("e4m3", "e5m2"), (False, True)):
        dtype, keys = f"DType.kFloat8{element.upper()}", {"element": element, "power_of_two": powers}
        options = f'device="cuda", force_pow_2_scales={powers}, amax_epsilon=0.0'
        yield _quantizer(f"Float8CurrentScalingQuantizer({dtype}, {options})", keys)
        for dim, block, tensor in ((1, 128, ""), (2, [128, 128], "weight")):
            options = "rowwise=True, columnwise=True, amax_epsilon=0.0, "
            options += f"force_pow_2_scales={powers}, block_scaling_dim={dim}"
            yield _quantizer(
                f"Float8BlockQuantizer({dtype}, {options})", keys | {"block": block}, tensor=tensor
            )
    mx, square = "MXFP8Quantizer(DType.kFloat8", {"cast": "mxfp8", "block": [32, 32]}
    yield _quantizer(f"{mx}E4M3)", "mxfp8")
    yield _quantizer(f"{mx}E5M2)", "mxfp8-e5m2")
    yield _quantizer(f"{mx}E4M3, with_2d_quantization=True)", square, tensor="weight")


def _nvfp4_quantizers() -> Iterator[Entry]:
    def quantizer(
        tensor: str, options: str, transform: Mapping[str, Any] | None = None, **keys: Any
    ) -> Entry:
        text = f"NVFP4Quantizer(DType.kFloat4E2M1{options})"
        return _quantizer(text, {"cast": "nvfp4", **keys}, transform, tensor)

    rounded = ", stochastic_rounding=True"
    yield quantizer("", "")
    yield quantizer("weight", ", with_2d_quantization=True", cast="nvfp4-2d")
    yield quantizer("grad_output", rounded, rounding="stochastic")
    for random in (True, False):
        transform = {"hadamard": 16} | ({} if random else {"signs": [1] * 16})
        rht = f", with_rht=True, with_post_rht_amax=True, with_random_sign_mask={random}"
        yield quantizer("input", rht, transform)
        yield quantizer("grad_output", rht, transform)
        yield quantizer("grad_output", f"{rht}{rounded}", transform, rounding="stochastic")
    for choose, target, is_2d in product(("mae", "mse"), (256, 448), (False, True)):
        keys: dict[str, Any] = {"candidates": [6, 4], "choose": choose}
        keys |= {"scale_target": 448} if target == 448 else {}
        options = f", nvfp4_use_4over6=True, nvfp4_e4m3_max={target}, "
        options += f'nvfp4_4over6_err_mode="{choose.upper()}"'
        if is_2d:
            yield quantizer("weight", f"{options}, with_2d_quantization=True", cast="nvfp4-2d", **keys)
        else:
            yield quantizer("", options, **keys)
    rows = make_cast({"cast": "nvfp4", "tensor_scale": "row"})
    text = "NVFP4Quantizer(DType.kFloat4E2M1, columnwise=False, row_scaled_nvfp4=True)"
    yield Entry(text, {"fprop.x": rows})
