"""TransformerEngine's recipe classes that express a whole recipe: a line of Python, and six casts.

Source: TransformerEngine @ d0067d0, common/recipe/__init__.py and, for the effect of each option,
pytorch/custom_recipes/quantizer_factories.py. Float8CurrentScaling gets exact accumulation in fprop, which is
not its default.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import product

from narrowgauge.errors import UserError
from narrowgauge.quantization import Cast, make_cast
from narrowgauge.recipes.exchange.reading import Call, Signatures, call_of
from narrowgauge.recipes.recipe import Recipe

_ATTENTION = {"fp8_dpa": "False", "fp8_mha": "False", "backward_override": "None"}
_EXACT = "MMParams(use_split_accumulator=True)"
_GEMMS = {f"fp8_gemm_{gemm}": _EXACT for gemm in ("fprop", "dgrad", "wgrad")}
#: The parameters of each recipe class, with their values if no environment variable is set.
SIGNATURES: Signatures = {
    "MMParams": {"use_split_accumulator": "True"},
    "DelayedScaling": {
        "margin": "0",
        "fp8_format": "Format.HYBRID",
        "amax_history_len": "1024",
        "amax_compute_algo": "'max'",
        "scaling_factor_compute_algo": "None",
        "reduce_amax": "True",
        **_ATTENTION,
    },
    "Float8CurrentScaling": {
        "use_power_2_scales": "False",
        "fp8_format": "Format.HYBRID",
        **_GEMMS,
        "fp8_gemm_fprop": "MMParams(use_split_accumulator=False)",
        **_ATTENTION,
    },
    "MXFP8BlockScaling": {
        "margin": "0",
        "fp8_format": "Format.E4M3",
        **_ATTENTION,
        "enable_2d_quantization": "False",
    },
    "Float8BlockScaling": {
        "use_f32_scales": "False",
        "fp8_format": "Format.E4M3",
        "x_block_scaling_dim": "1",
        "w_block_scaling_dim": "2",
        "grad_block_scaling_dim": "1",
        **_GEMMS,
        **_ATTENTION,
    },
    "NVFP4BlockScaling": {
        "disable_rht": "False",
        "disable_stochastic_rounding": "False",
        "disable_2d_quantization": "False",
        "row_scaled_activation": "False",
        "nvfp4_4over6": "'none'",
        "nvfp4_4over6_e4m3_use_256": "'all'",
        "nvfp4_4over6_err_mode": "'MAE'",
        "fp4_format": "Format.E2M1",
        "fp8_format": "Format.E4M3",
        **_ATTENTION,
    },
}
#: Parameters that set in how many bits a GEMM accumulates, which a recipe does not specify.
ACCUMULATION = tuple(_GEMMS)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OwnRecipe:
    """One of TransformerEngine's recipes.

    Attributes:
        text: The Python expression that makes it.
        casts: Its casts for the six places.
        megatron: Its fields in a Megatron quantization recipe; None if Megatron has no name for it.
        arguments: Its command-line arguments for Megatron.
    """

    text: str
    casts: Mapping[str, Cast]
    megatron: Mapping[str, str] | None = None
    arguments: str = ""


def own_recipe(recipe: Recipe) -> OwnRecipe | None:
    """The recipe of TransformerEngine with the same six casts as a recipe, if there is one."""
    delayed = _delayed(recipe)
    candidates = (*_own_recipes(), *([delayed] if delayed else []))
    return next((own for own in candidates if own.casts == dict(recipe.casts)), None)


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
    for word, dy in (("HYBRID", "e5m2"), ("E4M3", "e4m3")):
        yield OwnRecipe(
            text=f"Float8CurrentScaling(fp8_format=Format.{word}, use_power_2_scales=False, "
            "fp8_gemm_fprop=MMParams(use_split_accumulator=True))",
            casts=_six("e4m3", dy, "e4m3"),
            megatron={"fp8_quantization_recipe": "tensorwise", "fp8_format": word.lower()},
            arguments=f"--fp8-format {word.lower()} --fp8-recipe tensorwise",
        )
        block, square = {"block": 128, "power_of_two": True}, {"block": [128, 128], "power_of_two": True}
        of_dy = {"element": dy} | block
        yield OwnRecipe(
            text=f"Float8BlockScaling(fp8_format=Format.{word}, use_f32_scales=False)",
            casts=_six({"element": "e4m3"} | block, of_dy, {"element": "e4m3"} | square),
            megatron={"fp8_quantization_recipe": "blockwise", "fp8_format": word.lower()},
            arguments=f"--fp8-format {word.lower()} --fp8-recipe blockwise",
        )
        mx_dy = "mxfp8-e5m2" if dy == "e5m2" else "mxfp8"
        yield OwnRecipe(
            text=f"MXFP8BlockScaling(fp8_format=Format.{word}, enable_2d_quantization=False)",
            casts=_six("mxfp8", mx_dy, "mxfp8"),
            megatron={"fp8_quantization_recipe": "mxfp8", "fp8_format": word.lower()},
            arguments=f"--fp8-format {word.lower()} --fp8-recipe mxfp8",
        )
        yield OwnRecipe(
            text=f"MXFP8BlockScaling(fp8_format=Format.{word}, enable_2d_quantization=True)",
            casts=_six("mxfp8", mx_dy, {"cast": "mxfp8", "block": [32, 32]}),
        )


def _nvfp4_recipes() -> Iterator[OwnRecipe]:
    for rht, stochastic, is_2d in product((True, False), repeat=3):
        transform: dict[str, object] = {"hadamard": 16} if rht else {}
        dy = {"cast": "nvfp4"} | ({"rounding": "stochastic"} if stochastic else {})
        yield OwnRecipe(
            text=f"NVFP4BlockScaling(disable_rht={not rht}, disable_stochastic_rounding={not stochastic}, "
            f"disable_2d_quantization={not is_2d})",
            casts=_six(
                "nvfp4", dy, "nvfp4-2d" if is_2d else "nvfp4", {"cast": "nvfp4"} | transform, dy | transform
            ),
            megatron={"fp4_quantization_recipe": "nvfp4"} if rht and stochastic and is_2d else None,
            arguments="--fp4-format e2m1 --fp4-recipe nvfp4",
        )


def _delayed(recipe: Recipe) -> OwnRecipe | None:
    """DelayedScaling with the amax history of a recipe's first operand, if it has one."""
    x, dy = recipe.casts["fprop.x"], recipe.casts["dgrad.dy"]
    words = {"e5m2": "HYBRID", "e4m3": "E4M3"}
    if not x.amax.history or dy.element.name not in words:
        return None
    return delayed_scaling(words[dy.element.name], x.amax.history, x.amax.algorithm, x.amax.margin)


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
    if call.name == "DelayedScaling" and given["amax_compute_algo"] in ("max", "most_recent"):
        word = str(given["fp8_format"]).removeprefix("Format.")
        sizes = given["amax_history_len"], given["amax_compute_algo"], given["margin"]
        rows = [delayed_scaling(word, *sizes)] if word in ("HYBRID", "E4M3") else []
    made = {own: call_of(own.text, SIGNATURES).arguments for own in rows}
    differing = {
        own: [key for key, value in given.items() if key not in ACCUMULATION and value != row[key]]
        for own, row in made.items()
    }
    if not differing:
        raise UserError(f"{call.name} with these arguments is not in the table of recipes")
    nearest = min(differing, key=lambda own: len(differing[own]))
    if keys := differing[nearest]:
        said = ", ".join(f"{key} = {given[key]!r}" for key in keys)
        raise UserError(f"{call.name} with {said} is not supported; change it to {nearest.text}")
    lost = [
        f"{key} with use_split_accumulator=False: the recipe accumulates in fp32"
        for key in ACCUMULATION
        if key in given and not given[key].arguments["use_split_accumulator"]
    ]
    return nearest, lost
