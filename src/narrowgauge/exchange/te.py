"""A recipe for TransformerEngine: one of its recipe objects, or a quantizer factory for `CustomRecipe`."""

import ast
from dataclasses import replace
from pathlib import Path

from narrowgauge.exchange.layers import kept, selection
from narrowgauge.exchange.python_file import Call, PythonFile, call_of, python_file
from narrowgauge.exchange.reading import Reading
from narrowgauge.exchange.refusal import Refusal, cast_refusals, outside_products
from narrowgauge.exchange.te_tables import (
    RECIPES,
    SIGNATURES,
    TENSORS,
    Quantizer,
    named_recipe,
    own_recipe,
    quantizers,
)
from narrowgauge.quantization import Cast
from narrowgauge.recipes.describe import wide_and_other_rules
from narrowgauge.recipes.places import GEMMS, SEEN_BEFORE, values_of
from narrowgauge.recipes.recipe import Recipe
from narrowgauge.system.errors import UserError

VERSION = "TransformerEngine 2.20.0.dev0 (d0067d0, 2026-08-22)"
FACTORY = "qfactory"


def refusals(recipe: Recipe) -> list[Refusal]:
    """What TransformerEngine cannot express of a recipe."""
    return [*outside_products(recipe, "te"), *of_products(recipe, "te")]


def of_products(recipe: Recipe, target: str) -> list[Refusal]:
    """The same for the six operands; `target` is the tool that passes them to TransformerEngine."""
    if own_recipe(recipe) is not None:
        return []
    found: list[Refusal] = []
    for tensor, row, column in TENSORS:
        options = [q for q in quantizers(recipe.compute) if tensor in q.tensors]
        found += cast_refusals(row, recipe.casts[row], (q.row for q in options), target)
        second = recipe.casts[column]
        if second.of and column != "wgrad.dy":  # columnwise_source is not for gradients
            if not second.is_scaled:
                continue
            second = replace(second, of="")
        found += cast_refusals(column, second, (q.column for q in options if q.column), target)
    return found or _unmultiplied(recipe)


def _unmultiplied(recipe: Recipe) -> list[Refusal]:
    """GEMMs whose operands are of two families, or both in E5M2: neither is supported there."""
    families: dict[str, list[str]] = {gemm: [] for gemm in GEMMS}
    for tensor, row, column in TENSORS:
        for place, quantizer in zip((row, column), _quantizers_of(recipe, tensor, row, column), strict=True):
            families[place.split(".")[0]].append(quantizer.family)
    found = []
    for gemm, (a, b) in families.items():
        is_fp8 = {a, b} == {"fp8 e4m3", "fp8 e5m2"}
        if (a != b and not is_fp8) or a == b == "fp8 e5m2":
            why = f"operands of two kinds ({a}, {b}), which te does not multiply"
            found.append(Refusal(gemm, "element", why))
    return found


def _quantizers_of(recipe: Recipe, tensor: str, row: str, column: str) -> tuple[Quantizer, Quantizer]:
    """The quantizers of a tensor's two directions; the same one twice if one makes both."""
    first, second = recipe.casts[row], recipe.casts[column]
    options = [q for q in quantizers(recipe.compute) if tensor in q.tensors]
    of_row = next(q for q in options if q.row == first)
    if second.of and not second.is_scaled:
        return of_row, options[0]
    plain = replace(second, of="")
    both = next((q for q in options if (q.row, q.column) == (first, plain) and not second.of), None)
    return (both, both) if both else (of_row, next(q for q in options if q.column == plain))


def text(recipe: Recipe, blocks: int | None = None) -> str:
    """The Python file."""
    own = own_recipe(recipe)
    parts = ["import math\nfrom fnmatch import fnmatchcase\n\nimport torch"]
    names = ["CustomRecipe"] if own is None else [own.text.partition("(")[0]]
    names += [n for n in ("Format", "MMParams") if own and (f"{n}." in own.text or f"{n}(" in own.text)]
    parts.append(f"from transformer_engine.common.recipe import {', '.join(names)}")
    if needs_factory(recipe):
        parts.append(_factory(recipe))
    made = _wrapped(own.text) if own else f"CustomRecipe(qfactory={FACTORY})"
    parts.append(f"\nRECIPE = {made}\n")
    return "\n".join(parts) + "\n" + selection(recipe)


def needs_factory(recipe: Recipe) -> bool:
    """Whether the file has a quantizer factory: Megatron has no name for the recipe, and needs one."""
    own = own_recipe(recipe)
    return own is None or not (own.megatron or own.arguments)


def _wrapped(call: str) -> str:
    """A call with one argument per line, if it is long."""
    if len(call) < 95:
        return call
    name, _, rest = call.partition("(")
    return f"{name}(\n" + "".join(f"    {a},\n" for a in rest[:-1].split(", ")) + ")"


def _factory(recipe: Recipe) -> str:
    """The quantizer factory of six casts, after its imports."""
    cases, used = [], {"IdentityQuantizer"}
    for tensor, row, column in TENSORS:
        first, second = _quantizers_of(recipe, tensor, row, column)
        made = first.text
        of = recipe.casts[column].of
        if first is not second or of:
            source = "rowwise_dequantized" if of else "original"
            made = (
                f"HybridQuantizer(\n            rowwise_quantizer={first.text},\n            "
                f"columnwise_quantizer={second.text},\n            "
                f'columnwise_source="{source}",\n        )'
            )
        used |= {n for n in _MODULES if f"{n}(" in made}
        cases.append(f'    if is_linear and role.tensor_type == "{tensor}":\n        return {made}')
    te = "from transformer_engine.pytorch"
    imports = [f"{te}.constants import DType"] if "DType." in "".join(cases) else []
    imports += [f"{te}.tensor.{_MODULES[n]} import {n}" for n in sorted(used)]
    return "\n".join(
        [
            *imports,
            f"\n\ndef {FACTORY}(role):",
            '    """The quantizer of one tensor of one layer."""',
            '    is_linear = role is not None and role.module_type in ("linear", "grouped_linear")',
            *cases,
            "    return IdentityQuantizer()",
            "",
        ]
    )


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
    fast = (own is None or own.arguments) and recipe.casts["fprop.x"].element.bits == 8
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
    """The recipe object or the quantizer factory of a Python file, which is parsed and not executed.

    Raises:
        UserError: The file makes no recipe of TransformerEngine's, several, or one that no table row has.
    """
    file = python_file(path, SIGNATURES)
    if FACTORY in file.functions:
        return Reading(casts=_of_factory(file), keep=file.keep(), lost=file.lost)
    made = list(file.calls(*RECIPES))
    if len(made) != 1:
        raise UserError(
            f"{path} makes {len(made)} recipes of TransformerEngine's; name a file that makes one of "
            f"{', '.join(RECIPES)}, or that has a quantizer factory called {FACTORY}"
        )
    try:
        own, lost = named_recipe(file.call(made[0]))
    except UserError as error:
        raise UserError(f"{path}, line {made[0].lineno}: {error}") from None
    return Reading(casts=own.casts, keep=file.keep(), lost=[*lost, *file.lost])


def _of_factory(file: PythonFile) -> dict[str, Cast]:
    """The casts of the six places, from what a factory returns for each type of tensor."""
    casts: dict[str, Cast] = {}
    places = {tensor: (row, column) for tensor, row, column in TENSORS}
    for node in ast.walk(file.functions[FACTORY]):
        if isinstance(node, ast.If):
            said = [c.value for c in ast.walk(node.test) if isinstance(c, ast.Constant) and c.value in places]
            match said, node.body, node.orelse:
                case [str() as tensor], [ast.Return(value=ast.expr() as value)], []:
                    casts |= _directions(file, value, tensor, *places[tensor])
                case _:
                    raise UserError(
                        f"{file.path}, line {node.lineno}: a branch of {FACTORY} that is not "
                        "'if ... tensor_type == NAME: return QUANTIZER', which no recipe holds; write it so"
                    )
    return casts


def _directions(file: PythonFile, node: ast.expr, tensor: str, row: str, column: str) -> dict[str, Cast]:
    """The casts of the two places of a tensor."""
    call = file.call(node)
    if call.name != "HybridQuantizer":
        quantizer = _quantizer(file, call, node, tensor)
        return {row: quantizer.row} | ({column: quantizer.column} if quantizer.column else {})
    first = _quantizer(file, call.arguments["rowwise_quantizer"], node, tensor)
    made = _quantizer(file, call.arguments["columnwise_quantizer"], node, tensor).column
    if made is None:
        raise UserError(f"{file.path}, line {node.lineno}: a quantizer without that direction; name another")
    if call.arguments["columnwise_source"] != "original":
        of = SEEN_BEFORE[column]
        made = replace(made, of=of) if made.is_scaled else values_of(of)
    return {row: first.row, column: made}


def _quantizer(file: PythonFile, call: Call, node: ast.expr, tensor: str) -> Quantizer:
    """The row of the table of quantizers that a call makes."""
    rows = (q for q in quantizers("bf16") if tensor in q.tensors)
    found = next((q for q in rows if call_of(q.text, SIGNATURES) == call), None)
    if found is None:
        raise UserError(
            f"{file.path}, line {node.lineno}: {ast.unparse(node)} as the quantizer of {tensor}, which no "
            "recipe holds; take one that `narrowgauge recipes NAME --to te` writes"
        )
    return found
