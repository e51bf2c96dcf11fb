"""A recipe for torchao: its `Float8LinearConfig`, or the configuration of its MXFP8 training.

Source: torchao 0.18.0, float8/config.py (which casts an operand can have), float8/float8_linear.py (which
operand is scaled along which axis), prototype/moe_training/{config,mxfp8_linear}.py. Its NVFP4 training
(NVFP4TrainingConfig) is refused: block scales are at least 2^-6 there (nvfp4_training/quantize_2d_triton.py).
"""

from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

from narrowgauge.exchange.layers import selection
from narrowgauge.exchange.python_file import Call, PythonFile, python_file, signatures
from narrowgauge.exchange.reading import Reading
from narrowgauge.exchange.refusal import Refusal, cast_refusals, outside_products
from narrowgauge.quantization import Cast, make_cast
from narrowgauge.recipes.places import GEMM_PLACES
from narrowgauge.recipes.recipe import Recipe
from narrowgauge.system.errors import UserError, unknown

VERSION = "torchao 0.18.0"
# The two GEMMs of each tensor, and the fields of Float8LinearConfig for its casts there.
TENSORS = (
    ("fprop.x", "cast_config_input", "wgrad.x", "cast_config_input_for_grad_weight"),
    ("fprop.w", "cast_config_weight", "dgrad.w", "cast_config_weight_for_grad_input"),
    ("dgrad.dy", "cast_config_grad_output", "wgrad.dy", "cast_config_grad_output_for_grad_weight"),
)
DTYPES = {
    "e4m3": "torch.float8_e4m3fn",
    "e5m2": "torch.float8_e5m2",
    "e4m3fnuz": "torch.float8_e4m3fnuz",
    "e5m2fnuz": "torch.float8_e5m2fnuz",
}
BLOCKS = {"tensor": "ScalingGranularity.TENSORWISE", "row": "ScalingGranularity.AXISWISE"}
MX_MODES = {"rceil": "ScaleCalculationMode.RCEIL", "floor": "ScaleCalculationMode.FLOOR"}
#: The parameters of torchao's classes; a cast that is None is the tensor's other one.
SIGNATURES = signatures("""
CastConfig(
    scaling_type=ScalingType.DYNAMIC, scaling_granularity=ScalingGranularity.TENSORWISE, target_dtype=None
)
Float8GemmConfig(use_fast_accum=False)
Float8LinearConfig(
    cast_config_input=CastConfig(), cast_config_input_for_grad_weight=None,
    cast_config_weight=CastConfig(), cast_config_weight_for_grad_input=None,
    cast_config_grad_output=CastConfig(), cast_config_grad_output_for_grad_weight=None,
    gemm_config_output=Float8GemmConfig(use_fast_accum=True), gemm_config_grad_input=Float8GemmConfig(),
    gemm_config_grad_weight=Float8GemmConfig(), enable_fsdp_float8_all_gather=False, pad_inner_dim=False,
    emulate=False, force_recompute_fp8_weight_in_bwd=False, round_scales_to_power_of_2=False,
)
from_recipe_name(recipe_name="")
MXFP8TrainingOpConfig(
    kernel_preference=KernelPreference.AUTO, out_dtype=torch.bfloat16, wgrad_with_hp=False,
    scale_calculation_mode=ScaleCalculationMode.RCEIL, pad_token_groups_for_grouped_mm=False,
)
""")
_ROW = {"element": "e4m3", "block": "row", "power_of_two": True}
#: Float8LinearConfig.from_recipe_name: the casts of each name in the order of `GEMM_PLACES`.
NAMED: Mapping[str, tuple[Any, ...]] = {
    "tensorwise": ("e4m3", "e4m3", "e5m2", "e4m3", "e5m2", "e4m3"),
    "rowwise": (_ROW,) * 6,
    "rowwise_with_gw_hp": (*(_ROW,) * 3, {"element": "e4m3", "power_of_two": True}, "bf16", "bf16"),
}
_FAST = "the output's GEMM with use_fast_accum=True: the recipe accumulates in fp32"


def _cast(element: str, block: str, power_of_two: bool) -> Cast:
    return make_cast({"element": element, "block": block, "power_of_two": power_of_two})


def _mx(rule: str) -> Cast:
    return make_cast({"cast": "mxfp8", "scale_rule": rule})


def _mx_mode(recipe: Recipe) -> str:
    """The scale rule of torchao's MXFP8 training that a recipe uses; "" if none."""
    for rule, wgrad in product(MX_MODES, (True, False)):
        if _mxfp8_casts(rule, wgrad, recipe.compute) == dict(recipe.casts):
            return rule
    return ""


def _mxfp8_casts(rule: str, wgrad: bool, compute: str) -> dict[str, Cast]:
    """The casts of the MXFP8 training: in all GEMMs, or in all but wgrad."""
    mx, wide = _mx(rule), make_cast(compute)
    return {place: mx if wgrad or not place.startswith("wgrad") else wide for place in GEMM_PLACES}


def refusals(recipe: Recipe) -> list[Refusal]:
    """What torchao cannot express of a recipe."""
    found = outside_products(recipe, "torchao")
    if _mx_mode(recipe):
        return found
    said = [make_cast(recipe.compute), *(_cast(*keys) for keys in product(DTYPES, BLOCKS, (False, True)))]
    if any(c.scale == "e8m0" for c in recipe.casts.values()):
        said += map(_mx, MX_MODES)
    for place in GEMM_PLACES:
        found += cast_refusals(place, recipe.casts[place], said, "torchao")
    return found or _together(recipe)


def _together(recipe: Recipe) -> list[Refusal]:
    """Combinations of casts that torchao supports one by one, but not together."""
    casts, found = recipe.casts, []
    if any(c.scale == "e8m0" for c in casts.values()):
        why = "MXFP8 in some places, which torchao has in all three GEMMs, or in all but wgrad"
        return [Refusal("", "scale", why)]
    if len({c.power_of_two for c in casts.values() if c.is_scaled}) > 1:
        found.append(
            Refusal("", "power_of_two", "power_of_two in some places, which torchao has in all or none")
        )
    for first, _, second, _ in TENSORS:
        a, b = casts[first], casts[second]
        if a.is_scaled and b.is_scaled and a.element != b.element:
            why = f"element = {b.element.name!r} with {a.element.name!r} in {first}; torchao has one a tensor"
            found.append(Refusal(second, "element", why))
    for first, second in zip(GEMM_PLACES[::2], GEMM_PLACES[1::2], strict=True):
        if casts[first].is_scaled != casts[second].is_scaled:
            why = f"one wide operand and one narrow in {first}, {second}; torchao has both or none"
            found.append(Refusal(first.split(".")[0], "element", why))
    return found


def text(recipe: Recipe, blocks: int | None = None) -> str:
    """The Python file."""
    rule = _mx_mode(recipe)
    config, convert = _mxfp8(recipe, rule) if rule else _float8(recipe)
    head = "import math\nfrom fnmatch import fnmatchcase\n\nimport torch\n"
    return f"{head}{config}\n{selection(recipe)}{convert}"


def _float8(recipe: Recipe) -> tuple[str, str]:
    """(the imports and the configuration, the function that converts a model)."""
    lines = [
        "from torchao.float8 import convert_to_float8_training",
        "from torchao.float8.config import (\n    CastConfig,\n    Float8GemmConfig,",
        "    Float8LinearConfig,\n    ScalingGranularity,\n    ScalingType,\n)\n",
        "CONFIG = Float8LinearConfig(",
    ]
    for first, name, second, name_2 in TENSORS:
        a, b = recipe.casts[first], recipe.casts[second]
        dtype = DTYPES.get((a if a.is_scaled else b).element.name, DTYPES["e4m3"])  # one in both GEMMs
        for place, field, c in ((first, name, a), (second, name_2, b)):
            said = f"ScalingType.DISABLED, target_dtype={dtype}"
            if c.is_scaled:
                block = BLOCKS["tensor" if c.block is None else "row"]
                said = f"\n        ScalingType.DYNAMIC, {block}, {dtype}\n    "
            lines += [f"    # {place}", f"    {field}=CastConfig({said}),"]
    exact = "Float8GemmConfig(use_fast_accum=False)"
    lines += [f"    gemm_config_{p}={exact}," for p in ("output", "grad_input", "grad_weight")]
    powers = any(c.power_of_two for c in recipe.casts.values())
    lines += [f"    round_scales_to_power_of_2={powers},", ")\n"]
    convert = _CONVERT.format(
        call="convert_to_float8_training(\n        model, config=config, "
        "module_filter_fn=lambda _, name: name not in wide\n    )",
        note="; without FP8 give it replace(CONFIG, emulate=True)",
    )
    return "\n".join(lines), convert


def _mxfp8(recipe: Recipe, rule: str) -> tuple[str, str]:
    """The same for MXFP8."""
    config = (
        "from torchao.prototype.moe_training.config import MXFP8TrainingOpConfig\n"
        "from torchao.prototype.mx_formats.config import ScaleCalculationMode\n"
        "from torchao.quantization import quantize_\n"
        "from torchao.quantization.quantize_.common import KernelPreference\n\n"
        "CONFIG = MXFP8TrainingOpConfig(\n    kernel_preference=KernelPreference.AUTO,\n"
        f"    out_dtype=torch.{'bfloat16' if recipe.compute == 'bf16' else 'float32'},\n"
        f"    wgrad_with_hp={not recipe.casts['wgrad.x'].is_scaled},\n"
        f"    scale_calculation_mode={MX_MODES[rule]},\n)\n"
    )
    call = (
        "quantize_(\n        model,\n        config,\n        filter_fn=lambda module, name: "
        "isinstance(module, torch.nn.Linear) and name not in wide,\n    )"
    )
    return config, _CONVERT.format(call=call, note="")


_CONVERT = '''

def convert(model, config=CONFIG):
    """Put the model's linear layers under the recipe{note}."""
    wide = wide_layers(model)
    {call}
    return model
'''


def notes(recipe: Recipe) -> list[str]:
    """How the values of torchao differ, and what its user must do."""
    dtype = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}[recipe.compute]
    found = [
        f"Call convert(model) on a model in torch.{dtype}, or under autocast to it.",
        "E8M0 code 0 (2^-127) is a scale of 1 in torchao up to 0.18: blocks below 2^-118 differ."
        if _mx_mode(recipe)
        else "torchao scales a tensor or row whose largest magnitude is below 1e-12 as if it were 1e-12.",
    ]
    if recipe.gather.is_scaled:
        found.append(
            "gather: under FSDP2, set enable_fsdp_float8_all_gather=True; weights then travel in FP8, in the "
            "same numbers."
        )
    return found


def read(path: Path, blocks: int | None = None) -> Reading:
    """The configuration that a Python file makes; the file is parsed and not executed.

    Raises:
        UserError: The file makes none, several, or one that no recipe holds.
    """
    file = python_file(path, SIGNATURES)
    made = list(file.calls("Float8LinearConfig", "from_recipe_name", "MXFP8TrainingOpConfig"))
    if len(made) != 1:
        raise UserError(
            f"{path} makes {len(made)} configurations of torchao's; name a file that makes one "
            "Float8LinearConfig or MXFP8TrainingOpConfig"
        )
    call, lost, gather = file.call(made[0]), file.lost, ""
    given = call.arguments
    if call.name == "MXFP8TrainingOpConfig":
        rule = _named(f"{path}: scale_calculation_mode", given["scale_calculation_mode"], MX_MODES)
        casts = _mxfp8_casts(rule, not given["wgrad_with_hp"], "bf16")
    elif call.name == "from_recipe_name":
        name = str(given["recipe_name"]).removeprefix("Float8LinearRecipeName.").lower()
        if name not in NAMED:
            raise unknown("recipe of torchao's", name, NAMED)
        casts, lost = dict(zip(GEMM_PLACES, map(make_cast, NAMED[name]), strict=True)), [_FAST, *lost]
    else:
        if given["gemm_config_output"].arguments["use_fast_accum"]:
            lost = [_FAST, *lost]
        casts = _float8_casts(given, file)
        weight = casts.get("fprop.w")
        if given["enable_fsdp_float8_all_gather"]:
            gather = weight.name if weight else ""
        elif weight and weight.block is None:
            lost = ["gather, the format of weights between devices: the file leaves it to its user", *lost]
    narrow = {place: c for place, c in casts.items() if c.is_scaled}
    return Reading(casts=narrow, keep=file.keep(), gather=gather, lost=lost)


def _named(what: str, theirs: object, names: Mapping[str, str]) -> str:
    """Our name for one of theirs."""
    if str(theirs) not in names.values():
        raise unknown(what, str(theirs), names.values())
    return next(ours for ours, name in names.items() if name == str(theirs))


def _float8_casts(given: Mapping[str, Any], file: PythonFile) -> dict[str, Cast]:
    """The casts of a `Float8LinearConfig`; its dtypes default to an NVIDIA GPU's."""
    casts, powers = {}, bool(given["round_scales_to_power_of_2"])
    for (first, name, second, name_2), element in zip(TENSORS, ("e4m3", "e4m3", "e5m2"), strict=True):
        for place, config in ((first, given[name]), (second, given[name_2] or given[name])):
            if not isinstance(config, Call) or config.name != "CastConfig":
                raise UserError(f"{file.path}: the cast of {place} is not a CastConfig(...); write it out")
            kind, block, dtype = (
                config.arguments[key] for key in ("scaling_type", "scaling_granularity", "target_dtype")
            )
            made = _named(f"{file.path}: target_dtype", dtype or DTYPES[element], DTYPES)
            if kind == "ScalingType.DISABLED":
                continue
            if kind != "ScalingType.DYNAMIC" or block not in BLOCKS.values():
                raise UserError(
                    f"{file.path}: {kind} with {str(block).rpartition('.')[2]} for {place}, which no recipe "
                    "holds; take ScalingType.DYNAMIC"
                )
            casts[place] = _cast(made, _named("", block, BLOCKS), powers)
    return casts
