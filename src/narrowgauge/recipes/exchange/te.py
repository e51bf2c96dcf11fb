"""A recipe for TransformerEngine: one of its recipe objects, or a quantizer factory for `CustomRecipe`."""

import ast
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from narrowgauge.errors import UserError
from narrowgauge.quantization import Cast
from narrowgauge.recipes.describe import wide_and_other_rules
from narrowgauge.recipes.exchange.layers import kept, selection
from narrowgauge.recipes.exchange.reading import Call, PythonFile, Reading, call_of, python_file
from narrowgauge.recipes.exchange.refusal import Refusal, cast_refusals, other_rules, outside_products
from narrowgauge.recipes.exchange.te_quantizers import SIGNATURES as QUANTIZERS
from narrowgauge.recipes.exchange.te_quantizers import TENSORS, Quantizer, quantizers
from narrowgauge.recipes.exchange.te_recipes import SIGNATURES as RECIPES
from narrowgauge.recipes.exchange.te_recipes import named_recipe, own_recipe
from narrowgauge.recipes.places import GEMMS, SEEN_BEFORE, cast_in
from narrowgauge.recipes.recipe import Recipe

VERSION = "TransformerEngine 2.20.0.dev0 (d0067d0, 2026-08-22)"
FACTORY = "qfactory"


def refusals(recipe: Recipe) -> list[Refusal]:
    """What TransformerEngine cannot express of a recipe."""
    return [*outside_products(recipe, "te"), *other_rules(recipe, "te"), *of_products(recipe, "te")]


def of_products(recipe: Recipe, target: str) -> list[Refusal]:
    """The same for the six operands; `target` is the tool that passes them to TransformerEngine."""
    if own_recipe(recipe) is not None:
        return []
    found: list[Refusal] = []
    for tensor, row, column in TENSORS:
        options = [q for q in quantizers(recipe.compute) if tensor in q.tensors]
        found += cast_refusals(row, recipe.casts[row], (q.row for q in options if q.row), target)
        columns = [q.column for q in options if q.column]
        found += _column_refusals(column, recipe.casts[column], columns, target)
    return found or _unmultiplied(recipe)


def _column_refusals(place: str, c: Cast, said: list[Cast], target: str) -> list[Refusal]:
    """The same for a columnwise tensor, which may be made from the values of the rowwise one."""
    if c.of and place != "wgrad.dy":  # columnwise_source is not for gradients
        return cast_refusals(place, replace(c, of=""), said, target) if c.is_scaled else []
    return cast_refusals(place, c, said, target)


def _unmultiplied(recipe: Recipe) -> list[Refusal]:
    """GEMMs whose operands are of two families, or both in E5M2: neither is supported there."""
    families: dict[str, list[str]] = {gemm: [] for gemm in GEMMS}
    for tensor, row, column in TENSORS:
        first, second = quantizers_of(recipe, tensor, row, column)
        families[row.split(".")[0]].append(first.family)
        families[column.split(".")[0]].append(second.family)
    found = []
    for gemm, (a, b) in families.items():
        is_fp8 = {a, b} == {"fp8 e4m3", "fp8 e5m2"}
        if (a != b and not is_fp8) or a == b == "fp8 e5m2":
            why = f"operands of two kinds ({a}, {b}), which te does not multiply"
            found.append(Refusal(gemm, "element", why))
    return found


def quantizers_of(recipe: Recipe, tensor: str, row: str, column: str) -> tuple[Quantizer, Quantizer]:
    """The quantizers of a tensor's two directions; the same one twice if one makes both."""
    first, second = recipe.casts[row], recipe.casts[column]
    of = second.of
    options = [q for q in quantizers(recipe.compute) if tensor in q.tensors]
    if of and not second.is_scaled:
        return _with(options, "row", first), options[0]
    second = replace(second, of="")
    both = [q for q in options if q.row == first and q.column == second]
    if both and not of:
        return both[0], both[0]
    return _with(options, "row", first), _with(options, "column", second)


def _with(options: Iterable[Quantizer], direction: str, c: Cast) -> Quantizer:
    return next(q for q in options if getattr(q, direction) == c)


def text(recipe: Recipe) -> str:
    """The Python file."""
    own = own_recipe(recipe)
    parts = ["import math\nfrom fnmatch import fnmatchcase\n\nimport torch"]
    names = [] if own is None else [own.text.partition("(")[0]]
    names += [n for n in ("Format", "MMParams") if own and (f"{n}." in own.text or f"{n}(" in own.text)]
    names += [] if own else ["CustomRecipe"]
    parts.append(f"from transformer_engine.common.recipe import {', '.join(names)}")
    if needs_factory(recipe):
        parts.append(_factory(recipe))
    made = _wrapped(own.text) if own else f"CustomRecipe(qfactory={FACTORY})"
    parts.append(f"\nRECIPE = {made}\n")
    return "\n".join(parts) + "\n" + selection(recipe)


def needs_factory(recipe: Recipe) -> bool:
    """Whether the file has a quantizer factory: Megatron has no name for the recipe, and needs one."""
    own = own_recipe(recipe)
    return own is None or not (own.megatron or "Delayed" in own.text)


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
        first, second = quantizers_of(recipe, tensor, row, column)
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
    found = ["Use it as te.autocast(recipe=RECIPE) around the layers that are not in wide_layers(model)."]
    casts = list(recipe.casts.values())
    if any(c.is_random for c in casts):
        found.append(
            "Stochastic rounding has the same two neighbours and other random bits: runs agree on average."
        )
    if any(c.of and not c.is_scaled for c in casts):
        found.append(
            "A tensor that is reused is rounded to the compute format first, which the recipe does not do."
        )
    own = own_recipe(recipe)
    if (own is None or "Delayed" in own.text) and recipe.casts["fprop.x"].element.bits == 8:
        found.append(
            "On sm_90, fprop of FP8 adds up with fast accumulation (module/base.py, _2X_ACC_FPROP), which is "
            "less than fp32."
        )
    if wide_and_other_rules(recipe)[0] and (kept(recipe)[1] or kept(recipe)[2]):
        found.append(
            "Blocks are counted in the model that wide_layers is given: under pipelining, the whole one."
        )
    return found


def read(path: Path, blocks: int | None = None) -> Reading:
    """The recipe object or the quantizer factory of a Python file, which is parsed and not executed.

    Raises:
        UserError: The file makes no recipe of TransformerEngine's, several, or one that no table row has.
    """
    file = python_file(path, {**RECIPES, **QUANTIZERS})
    if FACTORY in file.functions:
        return Reading(casts=_of_factory(file), keep=file.keep(), lost=file.lost)
    made = list(file.calls(*RECIPES.keys() - {"MMParams"}))
    if len(made) != 1:
        known = ", ".join(name for name in RECIPES if name != "MMParams")
        raise UserError(
            f"{path} makes {len(made)} recipes of TransformerEngine's; name a file that makes one of "
            f"{known}, or that has a quantizer factory called {FACTORY}"
        )
    try:
        own, lost = named_recipe(file.call(made[0]))
    except UserError as error:
        raise UserError(f"{path}, line {made[0].lineno}: {error}") from None
    return Reading(casts=own.casts, keep=file.keep(), lost=[*lost, *file.lost])


def _of_factory(file: PythonFile) -> dict[str, Cast]:
    """The casts of the six places, from what a factory returns for each type of tensor."""
    returned: dict[str, ast.expr] = {}
    for node in ast.walk(file.functions[FACTORY]):
        if isinstance(node, ast.If):
            types = [c.value for c in ast.walk(node.test) if isinstance(c, ast.Constant)]
            tensors = [t for t in types if t in [tensor for tensor, _, _ in TENSORS]]
            match tensors, node.body, node.orelse:
                case [tensor], [ast.Return(value=ast.expr() as value)], []:
                    returned[str(tensor)] = value
                case _:
                    raise UserError(
                        f"{file.path}, line {node.lineno}: a branch of {FACTORY} that is not "
                        "'if ... tensor_type == NAME: return QUANTIZER', which no recipe holds; write it so"
                    )
    casts: dict[str, Cast] = {}
    for tensor, row, column in TENSORS:
        if tensor in returned:
            casts |= _directions(file, returned[tensor], tensor, row, column)
    return casts


def _directions(file: PythonFile, node: ast.expr, tensor: str, row: str, column: str) -> dict[str, Cast]:
    """The casts of the two places of a tensor."""
    call = file.call(node)
    if call.name != "HybridQuantizer":
        quantizer = _quantizer(file, call, node, tensor)
        return {p: c for p, c in ((row, quantizer.row), (column, quantizer.column)) if c is not None}
    first = _quantizer(file, call.arguments["rowwise_quantizer"], node, tensor)
    second = _quantizer(file, call.arguments["columnwise_quantizer"], node, tensor)
    if first.row is None or second.column is None:
        raise UserError(f"{file.path}, line {node.lineno}: a quantizer without that direction; name another")
    made = second.column
    if call.arguments["columnwise_source"] != "original":
        of = SEEN_BEFORE[column]
        made = replace(made, of=of) if made.is_scaled else cast_in(column, of)
    return {row: first.row, column: made}


def _quantizer(file: PythonFile, call: Call, node: ast.expr, tensor: str) -> Quantizer:
    """The row of the table of quantizers that a call makes."""
    rows = [q for q in quantizers("bf16") if tensor in q.tensors]
    found = next((q for q in rows if call_of(q.text, QUANTIZERS) == call), None)
    if found is None:
        raise UserError(
            f"{file.path}, line {node.lineno}: {ast.unparse(node)} as the quantizer of {tensor}, which no "
            "recipe holds; take one that `narrowgauge recipes NAME --to te` writes"
        )
    return found
