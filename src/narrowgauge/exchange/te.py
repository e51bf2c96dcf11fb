"""A recipe for TransformerEngine: one of its recipe objects, or a quantizer factory for `CustomRecipe`.

Two tables have a line of Python, and the casts that it represents. `own_recipes` are recipe classes with
options, which set all six places. `quantizers` make two tensors from one: *rowwise*, which the first GEMM of
the tensor contracts (fprop.x, fprop.w, dgrad.dy), and *columnwise*, which its second GEMM contracts (wgrad.x,
dgrad.w, wgrad.dy). A `HybridQuantizer` joins the directions of two.

Source: TransformerEngine @ d0067d0, common/recipe/__init__.py and, for the effect of each option,
pytorch/custom_recipes/quantizer_factories.py; pytorch/tensor/*_tensor.py, and csrc/quantizer.cpp for what
NVFP4's options exclude. Float8CurrentScaling gets exact accumulation in fprop, which is not its default.
"""

import ast
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

from narrowgauge.exchange.python_file import Call, Entry, PythonFile, python_text, signatures
from narrowgauge.exchange.table import OF_GEMM, TENSORS, Layers, Reading, Refusal, unlike
from narrowgauge.quantization import Cast, make_cast
from narrowgauge.recipes.places import GEMM_PLACES, SEEN_BEFORE, values_of
from narrowgauge.recipes.recipe import Recipe
from narrowgauge.system.errors import UserError

VERSION = "TransformerEngine 2.20.0.dev0 (d0067d0, 2026-08-22)"
FACTORY = "qfactory"
#: The places that a HybridQuantizer can make of the values of the other one; not gradients.
_DEQUANTIZED = ("dgrad.w", "wgrad.x")
_FP8 = "Float8CurrentScalingQuantizer"
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
_HYBRID = """\
HybridQuantizer(
            rowwise_quantizer={row},
            columnwise_quantizer={column},
            columnwise_source="{source}",
        )"""
_FACTORY = '''

def qfactory(role):
    """The quantizer of one tensor of one layer."""
    is_linear = role is not None and role.module_type in ("linear", "grouped_linear")
{cases}    return IdentityQuantizer()

'''
_MODULES = {
    "Float8BlockQuantizer": "float8_blockwise_tensor",
    "Float8CurrentScalingQuantizer": "float8_tensor",
    "HybridQuantizer": "hybrid_tensor",
    "IdentityQuantizer": "identity_tensor",
    "MXFP8Quantizer": "mxfp8_tensor",
    "NVFP4Quantizer": "nvfp4_tensor",
}


def own_recipe(recipe: Recipe) -> Entry | None:
    """The recipe of TransformerEngine with the same six casts as a recipe, if there is one."""
    x, dy = recipe.casts["fprop.x"], recipe.casts["dgrad.dy"]
    rows = own_recipes()
    if x.history and dy.element.name in ("e4m3", "e5m2"):
        word = "HYBRID" if dy.element.name == "e5m2" else "E4M3"
        rows = [*rows, delayed_scaling(word, x.history, x.history_algorithm, x.margin)]
    return next((own for own in rows if own.casts == recipe.casts), None)


def _six(x: Any, dy: Any, w: Any, wgrad_x: Any = None, wgrad_dy: Any = None) -> dict[str, Cast]:
    given = {"fprop.x": x, "fprop.w": w, "dgrad.dy": dy, "dgrad.w": w}
    given |= {"wgrad.dy": wgrad_dy or dy, "wgrad.x": wgrad_x or x}
    return {place: make_cast(value) for place, value in given.items()}


@cache
def own_recipes() -> list[Entry]:
    """All recipes but `delayed_scaling`, with Megatron's fields for those that it names."""
    found = []
    block = {"element": "e4m3", "block": 128, "power_of_two": True}
    for word, dy, mx_dy in (("HYBRID", "e5m2", "mxfp8-e5m2"), ("E4M3", "e4m3", "mxfp8")):
        fp8 = f"fp8_format=Format.{word}"
        exact = f"{fp8}, use_power_2_scales=False, fp8_gemm_fprop=MMParams(use_split_accumulator=True)"
        mx = f"MXFP8BlockScaling({fp8}, enable_2d_quantization"
        in_blocks = _six(block, block | {"element": dy}, block | {"block": [128, 128]})
        square = _six("mxfp8", mx_dy, {"cast": "mxfp8", "block": [32, 32]})
        for name, text, casts in (
            ("tensorwise", f"Float8CurrentScaling({exact})", _six("e4m3", dy, "e4m3")),
            ("blockwise", f"Float8BlockScaling({fp8}, use_f32_scales=False)", in_blocks),
            ("mxfp8", f"{mx}=False)", _six("mxfp8", mx_dy, "mxfp8")),
            ("", f"{mx}=True)", square),
        ):
            fields = {"fp8_quantization_recipe": name, "fp8_format": word.lower()} if name else {}
            found.append(Entry(text, casts, fields))
    for rht, stochastic, is_2d in product((True, False), repeat=3):
        x: dict[str, Any] = {"cast": "nvfp4"}
        rounded = x | ({"rounding": "stochastic"} if stochastic else {})
        transform = {"hadamard": 16} if rht else {}
        text = (
            f"NVFP4BlockScaling(disable_rht={not rht}, disable_stochastic_rounding={not stochastic}, "
            f"disable_2d_quantization={not is_2d})"
        )
        casts = _six(x, rounded, "nvfp4-2d" if is_2d else x, x | transform, rounded | transform)
        fields = {"fp4_quantization_recipe": "nvfp4"} if rht and stochastic and is_2d else {}
        found.append(Entry(text, casts, fields))
    return found


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


@cache
def quantizers(compute: str) -> list[Entry]:
    """All configurations of its quantizers; `compute` is the format of unquantized tensors."""
    found = [Entry("IdentityQuantizer()", dict.fromkeys(GEMM_PLACES, make_cast(compute)))]

    def add(tensor: str, text: str, keys: dict[str, Any], column: Mapping[str, Any] | None = None) -> None:
        """Add a quantizer of a tensor, "" for all; `column` has more keys of its columnwise cast."""
        casts = make_cast(keys), make_cast({**keys, **(column or {})})
        pairs = [TENSORS[tensor]] if tensor else TENSORS.values()
        found.append(Entry(text, {p: c for pair in pairs for p, c in zip(pair, casts, strict=True)}))

    for element, powers in product(("e4m3", "e5m2"), (False, True)):
        dtype, fp8 = f"DType.kFloat8{element.upper()}", {"element": element, "power_of_two": powers}
        add("", f'{_FP8}({dtype}, device="cuda", force_pow_2_scales={powers}, amax_epsilon=0.0)', fp8)
        options = f"rowwise=True, columnwise=True, amax_epsilon=0.0, force_pow_2_scales={powers}"
        block = f"Float8BlockQuantizer({dtype}, {options}, block_scaling_dim"
        add("", f"{block}=1)", fp8 | {"block": 128})
        add("weight", f"{block}=2)", fp8 | {"block": [128, 128]})
    mx, square = "MXFP8Quantizer(DType.kFloat8", {"cast": "mxfp8", "block": [32, 32]}
    add("", f"{mx}E4M3)", {"cast": "mxfp8"})
    add("", f"{mx}E5M2)", {"cast": "mxfp8-e5m2"})
    add("weight", f"{mx}E4M3, with_2d_quantization=True)", square)
    nvfp4, row, dy = "NVFP4Quantizer(DType.kFloat4E2M1", {"cast": "nvfp4"}, "grad_output"
    random, is_square = ", stochastic_rounding=True)", ", with_2d_quantization=True)"
    rounded, row_2d = row | {"rounding": "stochastic"}, {"cast": "nvfp4-2d"}
    add("", f"{nvfp4})", row)
    add("weight", f"{nvfp4}{is_square}", row_2d)
    add(dy, f"{nvfp4}{random}", rounded)
    for signs, is_random in (({}, True), ({"signs": [1] * 16}, False)):
        transform = {"hadamard": 16, **signs}
        rht = f"{nvfp4}, with_rht=True, with_post_rht_amax=True, with_random_sign_mask={is_random}"
        add("input", f"{rht})", row, transform)
        add(dy, f"{rht})", row, transform)
        add(dy, f"{rht}{random}", rounded, transform)
    for choose, target in product(("mae", "mse"), (256, 448)):
        keys = {"candidates": [6, 4], "choose": choose} | ({"scale_target": 448} if target == 448 else {})
        best = f'nvfp4_e4m3_max={target}, nvfp4_4over6_err_mode="{choose.upper()}"'
        add("", f"{nvfp4}, nvfp4_use_4over6=True, {best})", row | keys)
        add("weight", f"{nvfp4}, nvfp4_use_4over6=True, {best}{is_square}", row_2d | keys)
    of_rows = {"fprop.x": make_cast({"cast": "nvfp4", "tensor_scale": "row"})}
    return [*found, Entry(f"{nvfp4}, columnwise=False, row_scaled_nvfp4=True)", of_rows)]


def choices(recipe: Recipe, place: str) -> list[Cast]:
    """The casts that TransformerEngine has in a place, and those values of the tensor's other place."""
    if own_recipe(recipe) is not None:
        return [recipe.casts[place]]
    found = [q.casts[place] for q in quantizers(recipe.compute) if place in q.casts]
    if place not in _DEQUANTIZED:
        return found
    of = SEEN_BEFORE[place]
    return [*found, values_of(of), *(replace(c, of=of) for c in found if c.is_scaled)]


def others(recipe: Recipe, layers: Layers, found: Sequence[Refusal]) -> list[Refusal]:
    """GEMMs whose operands are of two kinds, or both in E5M2: neither is supported there."""
    if own_recipe(recipe) is not None or any(refusal.place in GEMM_PLACES for refusal in found):
        return []
    kinds: dict[str, str] = {}
    for pair in TENSORS.values():
        kinds |= {p: q.name for p, q in zip(pair, _quantizers_of(recipe, *pair), strict=True)}
    e5m2 = {p for p, kind in kinds.items() if kind == _FP8 and recipe.casts[p].element.name == "e5m2"}
    return [
        *unlike("element", kinds, OF_GEMM, "TransformerEngine does not multiply two kinds"),
        *(
            Refusal(gemm, "element", "both operands in e5m2, which TransformerEngine does not multiply")
            for gemm, places in OF_GEMM.items()
            if e5m2.issuperset(places)
        ),
    ]


def _quantizers_of(recipe: Recipe, row: str, column: str) -> tuple[Entry, Entry]:
    """The quantizers of a tensor's two directions; the same one twice if one makes both."""
    options, second = quantizers(recipe.compute), recipe.casts[column]
    plain = replace(second, of="") if second.is_scaled else make_cast(recipe.compute)
    of_row = [q for q in options if q.casts.get(row) == recipe.casts[row]]
    of_column = [q for q in options if q.casts.get(column) == (plain if second.of else second)]
    both = [] if second.of else [q for q in of_row if q in of_column]
    return (both[0], both[0]) if both else (of_row[0], of_column[0])


def needs_factory(recipe: Recipe) -> bool:
    """Whether the file has a quantizer factory: Megatron has no name for the recipe, and needs one."""
    own = own_recipe(recipe)
    return own is None or not own.above


def write(recipe: Recipe, layers: Layers, blocks: int | None) -> tuple[Sequence[str], str]:
    """The notes, with how the values of TransformerEngine differ, and the Python file."""
    own = own_recipe(recipe)
    made = own.text if own else f"CustomRecipe(qfactory={FACTORY})"
    name, _, rest = made.partition("(")
    if len(made) >= 95:
        made = f"{name}(\n" + "".join(f"    {a},\n" for a in rest[:-1].split(", ")) + ")"
    names = [name, *(n for n in ("Format", "MMParams") if f"{n}." in made or f"{n}(" in made)]
    imports = f"from transformer_engine.common.recipe import {', '.join(names)}\n"
    imports += _factory(recipe) if needs_factory(recipe) else ""
    notes = [
        "Use it as te.autocast(recipe=RECIPE) around the layers that are not in wide_layers(model).",
        *notes_of_values(recipe),
    ]
    if layers.first_blocks or layers.last_blocks:
        notes.append(
            "Blocks are counted in the model that wide_layers is given: under pipelining, the whole one."
        )
    return notes, python_text(recipe.compute, layers, imports, f"RECIPE = {made}")


def _factory(recipe: Recipe) -> str:
    """The quantizer factory of six casts, after its imports."""
    cases = ""
    for tensor, (row, column) in TENSORS.items():
        first, second = _quantizers_of(recipe, row, column)
        of, made = recipe.casts[column].of, first.text
        if first is not second or of:
            source = "rowwise_dequantized" if of else "original"
            made = _HYBRID.format(row=first.text, column=second.text, source=source)
        cases += f'    if is_linear and role.tensor_type == "{tensor}":\n        return {made}\n'
    body = _FACTORY.format(cases=cases)
    imports = ["from transformer_engine.pytorch.constants import DType\n"] * ("DType." in body)
    for name in sorted(name for name in _MODULES if f"{name}(" in body):
        imports.append(f"from transformer_engine.pytorch.tensor.{_MODULES[name]} import {name}\n")
    return "".join(imports) + body


def notes_of_values(recipe: Recipe) -> list[str]:
    """How the values of TransformerEngine differ."""
    own, casts = own_recipe(recipe), recipe.casts.values()
    is_current = own is not None and own.name != "DelayedScaling"
    found = []
    if any(c.is_random for c in casts):
        found.append(
            "Stochastic rounding has the same two neighbours and other random bits: runs agree on average."
        )
    if any(c.of and not c.is_scaled for c in casts):
        found.append(
            "A tensor that is reused is rounded to the compute format first, which the recipe does not do."
        )
    if recipe.casts["fprop.x"].element.bits == 8 and not is_current:
        found.append(
            "On sm_90, fprop of FP8 adds up with fast accumulation (module/base.py, _2X_ACC_FPROP), which is "
            "less than fp32."
        )
    return found


def read(text: str, path: Path, blocks: int | None) -> Reading:
    """The recipe object or the quantizer factory of a Python file, which is parsed and not executed."""
    file = PythonFile(text, RECIPES | PARTS)
    if FACTORY in file.functions:
        return file.reading(_of_factory(file), ())
    call = file.made(f"recipes of TransformerEngine's and has no function {FACTORY}", *RECIPES)
    given, rows = call.arguments, own_recipes()
    if call.name == "DelayedScaling":
        word = "E4M3" if given["fp8_format"] == "Format.E4M3" else "HYBRID"
        algorithm = "most_recent" if given["amax_compute_algo"] == "most_recent" else "max"
        rows = [delayed_scaling(word, given["amax_history_len"], algorithm, given["margin"])]
    lost = [
        f"{key} with use_split_accumulator=False: the recipe accumulates in fp32"
        for key in ACCUMULATION
        if isinstance(given.get(key), Call) and not given[key].arguments.get("use_split_accumulator", True)
    ]
    return file.reading(file.entry(call, rows, ACCUMULATION).casts, lost)


def _of_factory(file: PythonFile) -> dict[str, Cast]:
    """The casts of the six places, from what a factory returns for each type of tensor."""
    casts: dict[str, Cast] = {}
    for node in ast.walk(file.functions[FACTORY]):
        if not isinstance(node, ast.If):
            continue
        said = [c.value for c in ast.walk(node.test) if isinstance(c, ast.Constant) and c.value in TENSORS]
        match said, node.body, node.orelse:
            case [str() as tensor], [ast.Return(value=ast.expr() as value)], []:
                casts |= _directions(file, file.call(value), *TENSORS[tensor])
            case _:
                raise UserError(
                    f"line {node.lineno}: a branch of {FACTORY} that is not "
                    "'if ... tensor_type == NAME: return QUANTIZER', which no recipe holds; write it so"
                )
    return casts


def _directions(file: PythonFile, call: Call, row: str, column: str) -> dict[str, Cast]:
    """The casts of the two places of a tensor."""

    def made(call: object, place: str) -> Mapping[str, Cast]:
        return file.entry(call, (q for q in quantizers("bf16") if place in q.casts)).casts

    if call.name != "HybridQuantizer":
        casts = made(call, row)
        return {place: casts[place] for place in (row, column) if place in casts}
    first, second = (call.arguments.get(f"{way}_quantizer") for way in ("rowwise", "columnwise"))
    cast, of = made(second, column)[column], SEEN_BEFORE[column]
    if call.arguments["columnwise_source"] != "original":
        cast = replace(cast, of=of) if cast.is_scaled else values_of(of)
    return {row: made(first, row)[row], column: cast}
