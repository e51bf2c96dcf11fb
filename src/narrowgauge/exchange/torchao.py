"""A recipe for torchao: its `Float8LinearConfig`, or the configuration of its MXFP8 training.

Source: torchao 0.18.0, float8/config.py (which casts an operand can have), float8/float8_linear.py (which
operand is scaled along which axis), prototype/moe_training/{config,mxfp8_linear}.py. Its NVFP4 training
(NVFP4TrainingConfig) is refused: block scales are at least 2^-6 there (nvfp4_training/quantize_2d_triton.py).
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

from narrowgauge.exchange.python_file import Call, Entry, PythonFile, python_text, signatures
from narrowgauge.exchange.table import FLOAT8, OF_GEMM, TENSORS, Layers, Reading, Refusal, unlike
from narrowgauge.quantization import Cast, make_cast
from narrowgauge.recipes.places import GEMM_PLACES, GROUPS, SEEN_BEFORE
from narrowgauge.recipes.recipe import Recipe
from narrowgauge.system.errors import UserError

VERSION = "torchao 0.18.0"
#: The fields of Float8LinearConfig for the casts of each tensor.
FIELDS = {
    "fprop.x": "cast_config_input",
    "wgrad.x": "cast_config_input_for_grad_weight",
    "fprop.w": "cast_config_weight",
    "dgrad.w": "cast_config_weight_for_grad_input",
    "dgrad.dy": "cast_config_grad_output",
    "wgrad.dy": "cast_config_grad_output_for_grad_weight",
}
DTYPES = {element: f"torch.{name}" for element, name in FLOAT8.items()}
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
#: Those that change no values.
_NO_VALUES = ("kernel_preference", "out_dtype", "pad_token_groups_for_grouped_mm")
_FAST = "the output's GEMM with use_fast_accum=True: the recipe accumulates in fp32"
_GATHER = "gather, the format of weights between devices: the file leaves it to its user"
_MX = """\
MXFP8TrainingOpConfig(
    kernel_preference=KernelPreference.AUTO,
    out_dtype=torch.{dtype},
    wgrad_with_hp={is_wide},
    scale_calculation_mode=ScaleCalculationMode.{mode},
)"""
_FLOAT8 = """\
from torchao.float8 import convert_to_float8_training
from torchao.float8.config import (
    CastConfig,
    Float8GemmConfig,
    Float8LinearConfig,
    ScalingGranularity,
    ScalingType,
)
"""
_CONFIG = """\
CONFIG = Float8LinearConfig(
{casts}
    gemm_config_output=Float8GemmConfig(use_fast_accum=False),
    gemm_config_grad_input=Float8GemmConfig(use_fast_accum=False),
    gemm_config_grad_weight=Float8GemmConfig(use_fast_accum=False),
    round_scales_to_power_of_2={powers},
)"""
_MXFP8 = """\
from torchao.prototype.moe_training.config import MXFP8TrainingOpConfig
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.quantization import quantize_
from torchao.quantization.quantize_.common import KernelPreference
"""
_TO_FLOAT8 = """\
convert_to_float8_training(
        model, config=config, module_filter_fn=lambda _, name: name not in wide
    )"""
_QUANTIZE = """\
quantize_(
        model,
        config,
        filter_fn=lambda module, name: isinstance(module, torch.nn.Linear) and name not in wide,
    )"""
_CONVERT = '''

def convert(model, config=CONFIG):
    """Put the model's linear layers under the recipe{}"""
    wide = wide_layers(model)
    {}
    return model
'''


@cache
def named() -> list[Entry]:
    """Float8 configurations by name (Float8LinearConfig.from_recipe_name), with casts as in `GEMM_PLACES`."""
    row, tensor = ({"element": "e4m3", "block": block, "power_of_two": True} for block in ("row", "tensor"))
    configurations: Mapping[str, tuple[Any, ...]] = {
        "tensorwise": ("e4m3", "e4m3", "e5m2", "e4m3", "e5m2", "e4m3"),
        "rowwise": (row,) * 6,
        "rowwise_with_gw_hp": (row, row, row, tensor, "bf16", "bf16"),
    }
    return [
        Entry(f"from_recipe_name({argument})", dict(zip(GEMM_PLACES, map(make_cast, casts), strict=True)))
        for name, casts in configurations.items()
        for argument in (f'"{name}"', f'"{name.upper()}"', f"Float8LinearRecipeName.{name.upper()}")
    ]


@cache
def mxfp8(compute: str) -> list[Entry]:
    """The MXFP8 training: in all GEMMs, or in all but wgrad."""
    found = []
    for rule, is_wide in product(("rceil", "floor"), (False, True)):
        casts = dict.fromkeys(GEMM_PLACES, make_cast({"cast": "mxfp8", "scale_rule": rule}))
        casts |= dict.fromkeys(GROUPS["wgrad"] if is_wide else (), make_cast(compute))
        dtype = "bfloat16" if compute == "bf16" else "float32"
        found.append(Entry(_MX.format(dtype=dtype, is_wide=is_wide, mode=rule.upper()), casts))
    return found


@cache
def operands(compute: str, powers: bool, *elements: str) -> list[Entry]:
    """The casts of an operand; `powers` is the configuration's round_scales_to_power_of_2."""
    found = {}
    for element in elements:
        for block, granularity in (("tensor", "TENSORWISE"), ("row", "AXISWISE")):
            how = f"ScalingType.DYNAMIC, ScalingGranularity.{granularity}, {DTYPES[element]}"
            cast = make_cast({"element": element, "block": block, "power_of_two": powers})
            found[f"CastConfig(\n        {how}\n    )"] = cast
        text = f"CastConfig(ScalingType.DISABLED, target_dtype={DTYPES[element]})"
        found[text] = make_cast(compute)
    return [Entry(text, dict.fromkeys(GEMM_PLACES, cast)) for text, cast in found.items()]


def _mxfp8(recipe: Recipe) -> Entry | None:
    """The MXFP8 training of a recipe; None for another."""
    return next((e for e in mxfp8(recipe.compute) if e.casts == recipe.casts), None)


def choices(recipe: Recipe, place: str) -> list[Cast]:
    """The casts that torchao has in a place."""
    entries = [e for powers in (False, True) for e in operands(recipe.compute, powers, *FLOAT8)]
    if any(c.scale == "e8m0" for c in recipe.casts.values()):
        entries += mxfp8(recipe.compute)
    return [entry.casts[place] for entry in entries]


def others(recipe: Recipe, layers: Layers, found: Sequence[Refusal]) -> list[Refusal]:
    """Combinations of casts that torchao supports one by one, but not together."""
    casts = recipe.casts
    if found or _mxfp8(recipe):
        return []
    if any(c.scale == "e8m0" for c in casts.values()):
        why = "MXFP8 in some places, which torchao has in all three GEMMs, or in all but wgrad"
        return [Refusal("", "scale", why)]
    scaled = {place: c for place, c in casts.items() if c.is_scaled}
    elements = {place: c.element.name for place, c in scaled.items()}
    powers = {place: c.power_of_two for place, c in scaled.items()}
    widths = {place: "narrow" if place in scaled else "wide" for place in casts}
    of_tensor = {pair[1]: pair for pair in TENSORS.values()}
    return [
        *unlike("power_of_two", powers, {"": GEMM_PLACES}, "torchao has it in all places or none"),
        *unlike("element", elements, of_tensor, "torchao has one a tensor"),
        *unlike("element", widths, OF_GEMM, "torchao has both wide or both narrow"),
    ]


def write(recipe: Recipe, layers: Layers, blocks: int | None) -> tuple[Sequence[str], str]:
    """The notes, with how the values of torchao differ, and the Python file."""
    dtype = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}[recipe.compute]
    mx, casts = _mxfp8(recipe), recipe.casts
    notes = [
        f"Call convert(model) on a model in torch.{dtype}, or under autocast to it.",
        "E8M0 code 0 (2^-127) is a scale of 1 in torchao up to 0.18: blocks below 2^-118 differ."
        if mx
        else "torchao scales a tensor or row whose largest magnitude is below 1e-12 as if it were 1e-12.",
    ]
    if recipe["gather"].is_scaled:
        notes.append(
            "gather: under FSDP2, set enable_fsdp_float8_all_gather=True; weights then travel in FP8, in the "
            "same numbers."
        )
    if mx:
        made = python_text(recipe.compute, layers, _MXFP8, f"CONFIG = {mx.text}")
        return notes, made + _CONVERT.format(".", _QUANTIZE)
    lines, powers = [], any(c.power_of_two for c in casts.values())
    for pair in TENSORS.values():
        element = next((casts[place].element.name for place in pair if casts[place].is_scaled), "e4m3")
        for place in pair:  # one element in both GEMMs
            entries = operands(recipe.compute, powers, element)
            said = next(e.text for e in entries if e.casts[place] == casts[place])
            lines += [f"    # {place}", f"    {FIELDS[place]}={said},"]
    config = _CONFIG.format(casts="\n".join(lines), powers=powers)
    what = "; without FP8 give it replace(CONFIG, emulate=True)."
    return notes, python_text(recipe.compute, layers, _FLOAT8, config) + _CONVERT.format(what, _TO_FLOAT8)


def read(text: str, path: Path, blocks: int | None) -> Reading:
    """The configuration that a Python file makes; the file is parsed and not executed."""
    file = PythonFile(text, SIGNATURES)
    classes = ("Float8LinearConfig", "from_recipe_name", "MXFP8TrainingOpConfig")
    call = file.made("configurations of torchao's", *classes)
    gather, is_fast, lost = "", call.name == "from_recipe_name", list[str]()
    if call.name == "Float8LinearConfig":
        casts, given = _casts(call.arguments, file), call.arguments
        weight, output = casts["fprop.w"], given["gemm_config_output"]
        is_fast = isinstance(output, Call) and output.arguments.get("use_fast_accum") is True
        is_gathered = given["enable_fsdp_float8_all_gather"]
        gather = weight.name if weight.is_scaled and is_gathered else ""
        lost = [_GATHER] if not is_gathered and weight.is_scaled and weight.block is None else []
    else:
        casts = file.entry(call, [*mxfp8("bf16"), *named()], _NO_VALUES).casts
    narrow = {place: c for place, c in casts.items() if c.is_scaled}
    return file.reading(narrow, [*lost, *[_FAST] * is_fast], gather)


def _casts(given: Mapping[str, Any], file: PythonFile) -> Mapping[str, Cast]:
    """The casts of a `Float8LinearConfig`; its dtypes default to an NVIDIA GPU's."""
    casts, entries = {}, operands("bf16", bool(given["round_scales_to_power_of_2"]), *FLOAT8)
    for place, field in FIELDS.items():
        config = given[field] or given[FIELDS[SEEN_BEFORE.get(place, place)]]
        if not isinstance(config, Call):
            raise UserError(f"the cast of {place} is not a CastConfig(...); write it out")
        usual = "e5m2" if place.endswith(".dy") else "e4m3"
        dtype = config.arguments.get("target_dtype") or DTYPES[usual]
        whole = replace(config, arguments={**config.arguments, "target_dtype": dtype})
        is_off = config.arguments.get("scaling_type") == "ScalingType.DISABLED"
        casts[place] = file.entry(whole, entries, ["scaling_granularity"] * is_off).casts[place]
    return casts
