"""TransformerEngine as two tables: a line of Python, and the casts that it represents.

`OwnRecipe` is a recipe class with options, which sets all six places. A `Quantizer` makes two tensors from
one: *rowwise*, which the first GEMM of the tensor contracts (fprop.x, fprop.w, dgrad.dy), and *columnwise*,
which its second GEMM contracts (wgrad.x, dgrad.w, wgrad.dy). A `HybridQuantizer` joins the directions of two.

Source: TransformerEngine @ d0067d0, common/recipe/__init__.py and, for the effect of each option,
pytorch/custom_recipes/quantizer_factories.py; pytorch/tensor/*_tensor.py, and csrc/quantizer.cpp for what
NVFP4's options exclude. Float8CurrentScaling gets exact accumulation in fprop, which is not its default.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import product

from narrowgauge.exchange.python_file import Call, call_of, signatures
from narrowgauge.quantization import Cast, make_cast
from narrowgauge.recipes.recipe import Recipe
from narrowgauge.system.errors import UserError

# The tensor, its rowwise place, its columnwise place.
TENSORS = (
    ("input", "fprop.x", "wgrad.x"),
    ("weight", "fprop.w", "dgrad.w"),
    ("grad_output", "dgrad.dy", "wgrad.dy"),
)
ALL = tuple(tensor for tensor, _, _ in TENSORS)
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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OwnRecipe:
    """One of TransformerEngine's recipes.

    Attributes:
        text: The Python expression that makes it.
        casts: Its casts for the six places.
        megatron: Its fields in a Megatron quantization recipe; None if Megatron has no name for it.
        arguments: Megatron's command-line arguments for it, where no field names it.
    """

    text: str
    casts: Mapping[str, Cast]
    megatron: Mapping[str, str] | None = None
    arguments: str = ""


def own_recipe(recipe: Recipe) -> OwnRecipe | None:
    """The recipe of TransformerEngine with the same six casts as a recipe, if there is one."""
    x, dy = recipe.casts["fprop.x"], recipe.casts["dgrad.dy"]
    rows = _own_recipes()
    if x.history and dy.element.name in ("e4m3", "e5m2"):
        word = "HYBRID" if dy.element.name == "e5m2" else "E4M3"
        rows = (*rows, delayed_scaling(word, x.history, x.history_algorithm, x.margin))
    return next((own for own in rows if own.casts == dict(recipe.casts)), None)


def _six(
    x: object, dy: object, w: object, wgrad_x: object = None, wgrad_dy: object = None
) -> dict[str, Cast]:
    texts = {"fprop.x": x, "fprop.w": w, "dgrad.dy": dy, "dgrad.w": w}
    texts |= {"wgrad.dy": wgrad_dy or dy, "wgrad.x": wgrad_x or x}
    return {place: make_cast(text) for place, text in texts.items()}  # type: ignore[arg-type]


@cache
def _own_recipes() -> tuple[OwnRecipe, ...]:
    return (*_fp8_recipes(), *_nvfp4_recipes())


def _fp8_recipes() -> Iterator[OwnRecipe]:
    for word, dy, mx_dy in (("HYBRID", "e5m2", "mxfp8-e5m2"), ("E4M3", "e4m3", "mxfp8")):
        block, square = {"block": 128, "power_of_two": True}, {"block": [128, 128], "power_of_two": True}
        of_dy, e4m3 = {"element": dy} | block, {"element": "e4m3"}
        square_mx = {"cast": "mxfp8", "block": [32, 32]}
        for name, text, casts in (
            (
                "tensorwise",
                "Float8CurrentScaling({}, use_power_2_scales=False, "
                "fp8_gemm_fprop=MMParams(use_split_accumulator=True))",
                _six("e4m3", dy, "e4m3"),
            ),
            (
                "blockwise",
                "Float8BlockScaling({}, use_f32_scales=False)",
                _six(e4m3 | block, of_dy, e4m3 | square),
            ),
            ("mxfp8", "MXFP8BlockScaling({}, enable_2d_quantization=False)", _six("mxfp8", mx_dy, "mxfp8")),
            ("", "MXFP8BlockScaling({}, enable_2d_quantization=True)", _six("mxfp8", mx_dy, square_mx)),
        ):
            fields = {"fp8_quantization_recipe": name, "fp8_format": word.lower()} if name else None
            yield OwnRecipe(text=text.format(f"fp8_format=Format.{word}"), casts=casts, megatron=fields)


def _nvfp4_recipes() -> Iterator[OwnRecipe]:
    for rht, stochastic, is_2d in product((True, False), repeat=3):
        transform: dict[str, object] = {"hadamard": 16} if rht else {}
        x, dy = {"cast": "nvfp4"}, {"cast": "nvfp4"} | ({"rounding": "stochastic"} if stochastic else {})
        yield OwnRecipe(
            text=f"NVFP4BlockScaling(disable_rht={not rht}, disable_stochastic_rounding={not stochastic}, "
            f"disable_2d_quantization={not is_2d})",
            casts=_six(x, dy, "nvfp4-2d" if is_2d else x, x | transform, dy | transform),
            megatron={"fp4_quantization_recipe": "nvfp4"} if rht and stochastic and is_2d else None,
        )


def delayed_scaling(word: str, history: int, algorithm: str, margin: int) -> OwnRecipe:
    """DelayedScaling with a format, HYBRID or E4M3."""
    keys = {"history": history, "history_algorithm": algorithm, "margin": margin}
    of_dy = {"element": "e5m2" if word == "HYBRID" else "e4m3"} | keys
    return OwnRecipe(
        text=f"DelayedScaling(margin={margin}, fp8_format=Format.{word}, "
        f'amax_history_len={history}, amax_compute_algo="{algorithm}", reduce_amax=True)',
        casts=_six({"element": "e4m3"} | keys, of_dy, {"element": "e4m3"} | keys),
        arguments=f"--fp8-format {word.lower()} --fp8-recipe delayed --fp8-margin {margin} "
        f"--fp8-amax-history-len {history} --fp8-amax-compute-algo {algorithm}",
    )


def named_fields(fields: Mapping[str, object]) -> OwnRecipe | None:
    """The recipe that Megatron's fields name; `fp8_format` defaults to Megatron's default, e4m3."""
    given = {key: str(value) for key, value in fields.items()}
    if "fp8_quantization_recipe" in given:
        given.setdefault("fp8_format", "e4m3")
    return next((own for own in _own_recipes() if own.megatron == given), None)


def named_recipe(call: Call) -> tuple[OwnRecipe, list[str]]:
    """The recipe that a call makes, and the parts of the call that a recipe does not hold.

    Raises:
        UserError: No recipe has these arguments; the sentence names those that differ from the nearest.
    """
    given = call.arguments
    rows = [own for own in _own_recipes() if own.text.startswith(f"{call.name}(")]
    word = str(given["fp8_format"]).removeprefix("Format.")
    algorithm = given.get("amax_compute_algo")
    if algorithm in ("max", "most_recent") and word in ("HYBRID", "E4M3"):
        rows = [delayed_scaling(word, given["amax_history_len"], algorithm, given["margin"])]
    if not rows:
        raise UserError(f"{call.name} with these arguments is not in the table of recipes")

    def differing(own: OwnRecipe) -> list[str]:
        row = call_of(own.text, SIGNATURES).arguments
        return [key for key, value in given.items() if key not in ACCUMULATION and value != row[key]]

    nearest = min(rows, key=lambda own: len(differing(own)))
    if keys := differing(nearest):
        said = ", ".join(f"{key} = {given[key]!r}" for key in keys)
        raise UserError(f"{call.name} with {said} is not supported; change it to {nearest.text}")
    lost = [
        f"{key} with use_split_accumulator=False: the recipe accumulates in fp32"
        for key in ACCUMULATION
        if key in given and not given[key].arguments["use_split_accumulator"]
    ]
    return nearest, lost


@dataclass(frozen=True, slots=True)
class Quantizer:
    """One configuration of one of TransformerEngine's quantizers.

    Attributes:
        text: The Python that constructs it.
        family: Both operands of a GEMM must be of one family.
        row: The cast of its rowwise tensor.
        column: The cast of its columnwise tensor; None if it makes none.
        tensors: The tensors that may use it.
    """

    text: str
    family: str
    row: Cast
    column: Cast | None
    tensors: tuple[str, ...] = ALL


@cache
def quantizers(compute: str) -> tuple[Quantizer, ...]:
    """All configurations; `compute` is the format of unquantized tensors."""
    wide = make_cast(compute)
    return (Quantizer("IdentityQuantizer()", "wide", wide, wide), *_fp8_quantizers(), *_nvfp4_quantizers())


def _fp8_quantizers() -> Iterator[Quantizer]:
    for element, power_of_two in product(("e4m3", "e5m2"), (False, True)):
        dtype, keys = f"DType.kFloat8{element.upper()}", {"element": element, "power_of_two": power_of_two}
        cast = make_cast(keys)
        text = (
            f'Float8CurrentScalingQuantizer({dtype}, device="cuda", force_pow_2_scales={power_of_two}, '
            "amax_epsilon=0.0)"
        )
        yield Quantizer(text, f"fp8 {element}", cast, cast)
        for dim, block, tensors in ((1, 128, ALL), (2, [128, 128], ("weight",))):
            cast = make_cast(keys | {"block": block})
            text = (
                f"Float8BlockQuantizer({dtype}, rowwise=True, columnwise=True, amax_epsilon=0.0, "
                f"force_pow_2_scales={power_of_two}, block_scaling_dim={dim})"
            )
            yield Quantizer(text, "fp8 blocks", cast, cast, tensors)
    for options, value, tensors in (
        ("E4M3", "mxfp8", ALL),
        ("E5M2", "mxfp8-e5m2", ALL),
        ("E4M3, with_2d_quantization=True", {"cast": "mxfp8", "block": [32, 32]}, ("weight",)),
    ):
        cast = make_cast(value)
        yield Quantizer(f"MXFP8Quantizer(DType.kFloat8{options})", "mxfp8", cast, cast, tensors)


def _nvfp4_quantizers() -> Iterator[Quantizer]:
    def quantizer(row: Mapping[str, object], options: str, tensor: str = "", **column: object) -> Quantizer:
        first, second = (make_cast({"cast": "nvfp4", **row, **more}) for more in ({}, column))
        text = f"NVFP4Quantizer(DType.kFloat4E2M1{options})"
        return Quantizer(text, "nvfp4", first, second, (tensor,) if tensor else ALL)

    stochastic = {"rounding": "stochastic"}
    yield quantizer({}, "")
    yield quantizer({"cast": "nvfp4-2d"}, ", with_2d_quantization=True", "weight")
    yield quantizer(stochastic, ", stochastic_rounding=True", "grad_output")
    for random in (True, False):
        transform: dict[str, object] = {"hadamard": 16} | ({} if random else {"signs": [1] * 16})
        rht = f", with_rht=True, with_post_rht_amax=True, with_random_sign_mask={random}"
        yield quantizer({}, rht, "input", **transform)
        yield quantizer({}, rht, "grad_output", **transform)
        yield quantizer(stochastic, f"{rht}, stochastic_rounding=True", "grad_output", **transform)
    for choose, target, is_2d in product(("mae", "mse"), (256, 448), (False, True)):
        keys: dict[str, object] = {"candidates": [6, 4], "choose": choose}
        keys |= {"scale_target": 448} if target == 448 else {}
        options = (
            f', nvfp4_use_4over6=True, nvfp4_e4m3_max={target}, nvfp4_4over6_err_mode="{choose.upper()}"'
        )
        if is_2d:
            yield quantizer(keys | {"cast": "nvfp4-2d"}, f"{options}, with_2d_quantization=True", "weight")
        else:
            yield quantizer(keys, options)
    rows = make_cast({"cast": "nvfp4", "tensor_scale": "row"})
    text = "NVFP4Quantizer(DType.kFloat4E2M1, columnwise=False, row_scaled_nvfp4=True)"
    yield Quantizer(text, "nvfp4", rows, None, ("input",))
