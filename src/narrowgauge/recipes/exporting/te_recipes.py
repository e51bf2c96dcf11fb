"""TransformerEngine's own recipe classes that say a recipe as a whole: a line of Python, and six casts.

Source: TransformerEngine @ d0067d0, common/recipe/__init__.py and, for what each makes of its options,
pytorch/custom_recipes/quantizer_factories.py. Float8CurrentScaling is given exact accumulation in fprop,
which it leaves out by default.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product

from narrowgauge.quantization import Cast, make_cast
from narrowgauge.recipes.recipe import Recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnRecipe:
    """One of TransformerEngine's recipes.

    Attributes:
        text: The Python that makes it.
        casts: What it puts into the six places.
        megatron: The same as fields of a Megatron quantization recipe; None if Megatron has no name for it.
        arguments: The same as arguments of Megatron.
    """

    text: str
    casts: Mapping[str, Cast]
    megatron: Mapping[str, str] | None = None
    arguments: str = ""


def own_recipe(recipe: Recipe) -> OwnRecipe | None:
    """The recipe of TransformerEngine's whose six casts are those of a recipe."""
    delayed = _delayed(recipe)
    candidates = (*_own_recipes(), *([delayed] if delayed else []))
    return next((own for own in candidates if own.casts == dict(recipe.casts)), None)


def _six(
    x: object, dy: object, w: object, wgrad_x: object = None, wgrad_dy: object = None
) -> dict[str, Cast]:
    texts = {"fprop.x": x, "fprop.w": w, "dgrad.dy": dy, "dgrad.w": w}
    texts |= {"wgrad.dy": wgrad_dy or dy, "wgrad.x": wgrad_x or x}
    return {place: make_cast(text) for place, text in texts.items()}  # type: ignore[arg-type]


def _own_recipes() -> Iterator[OwnRecipe]:
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
    yield from _nvfp4_recipes()


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
    """DelayedScaling with the history of a recipe's first operand, if it has one."""
    x, dy = recipe.casts["fprop.x"], recipe.casts["dgrad.dy"]
    if not x.amax.history or dy.element.name not in ("e4m3", "e5m2"):
        return None
    keys = {"history": x.amax.history, "history_algorithm": x.amax.algorithm, "margin": x.amax.margin}
    word = "HYBRID" if dy.element.name == "e5m2" else "E4M3"
    of_dy = {"element": dy.element.name} | keys
    return OwnRecipe(
        text=f"DelayedScaling(margin={x.amax.margin}, fp8_format=Format.{word}, "
        f'amax_history_len={x.amax.history}, amax_compute_algo="{x.amax.algorithm}", reduce_amax=True)',
        casts=_six({"element": "e4m3"} | keys, of_dy, {"element": "e4m3"} | keys),
        arguments=f"--fp8-format {word.lower()} --fp8-recipe delayed --fp8-margin {x.amax.margin} "
        f"--fp8-amax-history-len {x.amax.history} --fp8-amax-compute-algo {x.amax.algorithm}",
    )
