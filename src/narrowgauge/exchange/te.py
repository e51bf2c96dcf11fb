"""A recipe for TransformerEngine: one of its recipe objects, or a quantizer factory for `CustomRecipe`."""

import ast
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from narrowgauge.exchange.layers import kept, selection
from narrowgauge.exchange.python_file import Call, Entry, PythonFile, python_file
from narrowgauge.exchange.reading import Reading
from narrowgauge.exchange.refusal import OF_GEMM, Refusal, unlike
from narrowgauge.exchange.te_tables import (
    ACCUMULATION,
    RECIPES,
    SIGNATURES,
    TENSORS,
    delayed_scaling,
    own_recipe,
    own_recipes,
    quantizers,
)
from narrowgauge.quantization import Cast, make_cast
from narrowgauge.recipes.describe import wide_and_other_rules
from narrowgauge.recipes.places import GEMM_PLACES, SEEN_BEFORE, values_of
from narrowgauge.recipes.recipe import Recipe
from narrowgauge.system.errors import UserError

VERSION = "TransformerEngine 2.20.0.dev0 (d0067d0, 2026-08-22)"
FACTORY = "qfactory"
#: The places that a HybridQuantizer can make of the values of the other one; not gradients.
_DEQUANTIZED = ("dgrad.w", "wgrad.x")
_FP8 = "Float8CurrentScalingQuantizer"


def choices(recipe: Recipe, place: str) -> list[Cast]:
    """The casts that TransformerEngine has in a place, and those values of the tensor's other place."""
    if own_recipe(recipe) is not None:
        return [recipe.casts[place]]
    found = [q.casts[place] for q in quantizers(recipe.compute) if place in q.casts]
    if place not in _DEQUANTIZED:
        return found
    of = SEEN_BEFORE[place]
    return [*found, values_of(of), *(replace(c, of=of) for c in found if c.is_scaled)]


def others(recipe: Recipe, only: tuple[str, ...], found: Sequence[Refusal]) -> list[Refusal]:
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
    options, (first, second) = quantizers(recipe.compute), (recipe.casts[place] for place in (row, column))
    plain = (
        second if not second.of else replace(second, of="") if second.is_scaled else make_cast(recipe.compute)
    )
    of_row = [q for q in options if q.casts.get(row) == first]
    of_column = [q for q in options if q.casts.get(column) == plain]
    both = [] if second.of else [q for q in of_row if q in of_column]
    return (both[0], both[0]) if both else (of_row[0], of_column[0])


def text(recipe: Recipe, only: tuple[str, ...], blocks: int | None) -> str:
    """The Python file."""
    own = own_recipe(recipe)
    made = f"CustomRecipe(qfactory={FACTORY})" if own is None else _wrapped(own.text)
    names = [name for name in ("Format", "MMParams") if f"{name}." in made or f"{name}(" in made]
    return (
        "import math\nfrom fnmatch import fnmatchcase\n\nimport torch\n"
        f"from transformer_engine.common.recipe import {', '.join([made.partition('(')[0], *names])}\n"
        f"{_factory(recipe) if needs_factory(recipe) else ''}\n"
        f"RECIPE = {made}\n\n{selection(recipe)}"
    )


def needs_factory(recipe: Recipe) -> bool:
    """Whether the file has a quantizer factory: Megatron has no name for the recipe, and needs one."""
    own = own_recipe(recipe)
    return own is None or not own.above


def _wrapped(call: str) -> str:
    """A call with one argument per line, if it is long."""
    if len(call) < 95:
        return call
    name, _, rest = call.partition("(")
    return f"{name}(\n" + "".join(f"    {a},\n" for a in rest[:-1].split(", ")) + ")"


def _factory(recipe: Recipe) -> str:
    """The quantizer factory of six casts, after its imports."""
    cases = []
    for tensor, (row, column) in TENSORS.items():
        first, second = _quantizers_of(recipe, row, column)
        of, made = recipe.casts[column].of, first.text
        if first is not second or of:
            source = "rowwise_dequantized" if of else "original"
            made = _HYBRID.format(row=first.text, column=second.text, source=source)
        cases.append(f'    if is_linear and role.tensor_type == "{tensor}":\n        return {made}\n')
    body = _FACTORY.format(cases="".join(cases))
    imports = ["from transformer_engine.pytorch.constants import DType\n"] * ("DType." in body)
    for name in sorted(name for name in _MODULES if f"{name}(" in body):
        imports.append(f"from transformer_engine.pytorch.tensor.{_MODULES[name]} import {name}\n")
    return "".join(imports) + body


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


def notes(recipe: Recipe) -> list[str]:
    """How the values of TransformerEngine differ, and what its user must do."""
    blocks = "Blocks are counted in the model that wide_layers is given: under pipelining, the whole one."
    has_blocks = bool(wide_and_other_rules(recipe)[0] and any(kept(recipe)[1:]))
    return [
        "Use it as te.autocast(recipe=RECIPE) around the layers that are not in wide_layers(model).",
        *notes_of_values(recipe),
        *([blocks] if has_blocks else []),
    ]


def notes_of_values(recipe: Recipe) -> list[str]:
    """How the values of TransformerEngine differ."""
    own, casts = own_recipe(recipe), recipe.casts.values()
    fast = (own is None or own.name == "DelayedScaling") and recipe.casts["fprop.x"].element.bits == 8
    said = {
        "Stochastic rounding has the same two neighbours and other random bits: runs agree on average.": any(
            c.is_random for c in casts
        ),
        "A tensor that is reused is rounded to the compute format first, which the recipe does not do.": any(
            c.of and not c.is_scaled for c in casts
        ),
        "On sm_90, fprop of FP8 adds up with fast accumulation (module/base.py, _2X_ACC_FPROP), which is "
        "less than fp32.": fast,
    }
    return [sentence for sentence, is_so in said.items() if is_so]


def read(path: Path, blocks: int | None = None) -> Reading:
    """The recipe object or the quantizer factory of a Python file, which is parsed and not executed."""
    file = python_file(path, SIGNATURES)
    if FACTORY in file.functions:
        return Reading(casts=_of_factory(file), keep=file.keep(), lost=file.lost)
    call = file.made(f"recipes of TransformerEngine's and has no function {FACTORY}", *RECIPES)
    given, table = call.arguments, own_recipes()
    if call.name == "DelayedScaling":
        word = "E4M3" if given["fp8_format"] == "Format.E4M3" else "HYBRID"
        algorithm = "most_recent" if given["amax_compute_algo"] == "most_recent" else "max"
        table = (delayed_scaling(word, given["amax_history_len"], algorithm, given["margin"]),)
    lost = [
        f"{key} with use_split_accumulator=False: the recipe accumulates in fp32"
        for key in ACCUMULATION
        if isinstance(given.get(key), Call) and not given[key].arguments.get("use_split_accumulator", True)
    ]
    own = file.entry(call, table, ACCUMULATION)
    return Reading(casts=own.casts, keep=file.keep(), lost=[*lost, *file.lost])


def _of_factory(file: PythonFile) -> dict[str, Cast]:
    """The casts of the six places, from what a factory returns for each type of tensor."""
    casts: dict[str, Cast] = {}
    for node in ast.walk(file.functions[FACTORY]):
        if isinstance(node, ast.If):
            said = [
                c.value for c in ast.walk(node.test) if isinstance(c, ast.Constant) and c.value in TENSORS
            ]
            match said, node.body, node.orelse:
                case [str() as tensor], [ast.Return(value=ast.expr() as value)], []:
                    casts |= _directions(file, file.call(value), *TENSORS[tensor])
                case _:
                    raise UserError(
                        f"{file.path}, line {node.lineno}: a branch of {FACTORY} that is not "
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
    cast = made(second, column)[column]
    if call.arguments["columnwise_source"] != "original":
        of = SEEN_BEFORE[column]
        cast = replace(cast, of=of) if cast.is_scaled else values_of(of)
    return {row: made(first, row)[row], column: cast}
