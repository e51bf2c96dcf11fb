"""Megatron-LM: the YAML file of --te-precision-config-file, which assigns recipes to modules by globs.

Megatron has names for some of TransformerEngine's recipes. Any other recipe needs a quantizer factory, which
is the file that `--to te` writes. Source: Megatron-LM @ d98e8a6, core/extensions/transformer_engine.py
(TEQuantizationRecipe), core/quantization/quant_config.py (matchers; the first match wins), core/fp8_utils.py.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from narrowgauge.exchange import te
from narrowgauge.exchange.table import Layers, Reading, Refusal, read_file, yaml_documents
from narrowgauge.exchange.te import choices, delayed_scaling, own_recipe, own_recipes
from narrowgauge.quantization import Cast
from narrowgauge.recipes.places import GEMM_PLACES, number_of_blocks
from narrowgauge.recipes.recipe import Recipe
from narrowgauge.system.errors import UserError

#: Megatron compares a pattern with the whole name, a rule also with the last part of a name: they agree on a
#: pattern that begins so.
PATTERN = "*"
__all__ = ["choices"]  # TransformerEngine's
VERSION = "Megatron-LM 0.20.0 (d98e8a6, 2026-08-22)"
# Megatron does not quantize the output head without --fp8-output-proj.
HEADS = ("head", "lm_head", "output_layer")
_TYPE, _PARAMS = "transformer_engine_config_type", "TEQuantizationParams"
_ALL = "*layers.*"
_REST = (_ALL, "*")  # patterns of all modules
_BLOCK = re.compile(r"\*?layers\.(\d+)\.\*")
_DELAYED = re.compile(
    r"--fp8-format (hybrid|e4m3) --fp8-recipe delayed --fp8-margin (\d+)\s+(?:#\s+)?"
    r"--fp8-amax-history-len (\d+) --fp8-amax-compute-algo (max|most_recent)"
)
#: Fields of a training recipe that do not change the values of the GEMMs.
_NO_VALUES = ("override_nonquantized_autocast", "override_quantized_autocast", "tp_only_amax_red")


_FILE = f"""\
configs:
  narrow:
    {_TYPE}: "{_PARAMS}"
    training_recipe:
{{fields}}      override_nonquantized_autocast: true
  wide:
    {_TYPE}: "{_PARAMS}"
    training_recipe: {{{{}}}}
matchers:
"""
_MATCHER = """\
  {}:
    config: "{}"
    type: "glob"
    pattern: "{}"
    enabled: true
"""


def others(recipe: Recipe, layers: Layers, found: Sequence[Refusal]) -> list[Refusal]:
    """TransformerEngine's, and layers that Megatron cannot select, or not with these casts."""
    only, modules, *ends = layers
    of_te, others = te.others(recipe, layers, found), []
    fits = not of_te and not any(refusal.place in GEMM_PLACES for refusal in found)
    for name in modules:
        if name not in HEADS and not (only and name.startswith(PATTERN)):
            why = f"keep.modules = {name!r}, which is not a module of Megatron's models"
            others.append(("keep.modules", why))
    if not only and not set(HEADS) & set(modules) and fits:
        why = "the head is quantized, but Megatron does not quantize its output layer"
        others.append(("keep.modules", why))
    if only and te.needs_factory(recipe) and fits:
        why = "[[rule]] with casts that Megatron has no name for, and a factory is for all layers"
        others.append(("rule", why))
    if (own := own_recipe(recipe)) and own.name == "DelayedScaling" and (only or any(ends)):
        others.append(("keep", "keep with a history, but Megatron's delayed scaling applies to all blocks"))
    return of_te + [Refusal("", key, why) for key, why in others]


def write(recipe: Recipe, layers: Layers, blocks: int | None) -> tuple[Sequence[str], str]:
    """The notes, and the YAML file; `blocks` is needed if the recipe keeps some of the last blocks."""
    only, modules, first, last = layers
    key = "last_blocks" if last else "first_blocks" if isinstance(first, float) and first else ""
    if key and blocks is None:
        raise UserError(
            f"recipe {recipe.name!r} for megatron: keep.{key} counts the blocks of a model, but Megatron's "
            "file needs their indices; give the number of blocks with --blocks N"
        )
    notes = [
        "Pass it as --te-precision-config-file. Layers are numbered from 0 in each pipeline stage; without "
        "pipelining these are the layers of the model."
    ]
    own, module = own_recipe(recipe), f"te_{recipe.name.replace('-', '_')}"
    said = own.above if own else {}
    if te.needs_factory(recipe):
        said = {"fp8_quantization_recipe": "custom", "custom_recipe_factory": f"{module}.{te.FACTORY}"}
        file = f"the file of `narrowgauge recipes {recipe.name} --to te`, saved as {module}.py."
        notes.append(f"The factory is {file}")
    elif own and own.name == "Float8CurrentScaling":
        fast = "On sm_90, fprop uses fast accumulation, which is less than fp32; Megatron has no key for it."
        notes.append(fast)
    notes += te.notes_of_values(recipe)
    if own and own.name == "DelayedScaling":
        arguments = " ".join(f"{key} {value}" for key, value in said.items())
        return notes, (
            "# Megatron does not set delayed scaling in this file. These arguments are equivalent:\n"
            f"#   {arguments}\nconfigs: {{}}\nmatchers: {{}}\n"
        )
    total = blocks or 0
    ends = number_of_blocks(first, total), total - number_of_blocks(last, total)
    wide = sorted({*range(ends[0]), *range(ends[1], total)})
    matchers = [(f"block_{n}", "wide", f"*layers.{n}.*") for n in wide]
    if only:
        for config, patterns in (("wide", modules), ("narrow", only)):
            matchers += [(f"{config}_{n}", config, pattern) for n, pattern in enumerate(patterns)]
    matchers.append(("rest", "wide", "*") if only else ("rest", "narrow", _ALL))
    fields = "".join(f'      {key}: "{value}"\n' for key, value in said.items())
    return notes, _FILE.format(fields=fields) + "".join(_MATCHER.format(*matcher) for matcher in matchers)


def read(text: str, path: Path, blocks: int | None) -> Reading:
    """Read the YAML of --te-precision-config-file: one low-precision configuration and wide blocks.

    A factory that the file names is read from a Python file in the same folder. The number of blocks of the
    model is needed if some of the last stay wide.
    """
    file = yaml_documents(text)[0]
    if not isinstance(file, Mapping) or not {"configs", "matchers"} <= set(file):
        raise UserError("it has no configs and matchers; name a file for --te-precision-config-file")
    configs = file["configs"]
    if not configs and (said := _DELAYED.search(text)):
        word, margin, history, algorithm = said.groups()
        own = delayed_scaling(word.upper(), int(history), algorithm, int(margin))
        return Reading(casts=own.casts, layers=Layers(modules=HEADS[:2]))
    wide, narrow, config, has_rest = _matched(configs, file["matchers"])
    casts, lost = _casts(path, config, configs[config])
    found = {pattern: _BLOCK.fullmatch(pattern) for pattern in wide}
    others = tuple(pattern for pattern, block in found.items() if not block)
    first, last = _ends(sorted({int(block[1]) for block in found.values() if block}), blocks)
    if narrow[-1] in _REST:
        if others:
            raise UserError(
                f"{', '.join(others)} stay wide and all other modules are narrow, but [keep] takes "
                "whole blocks of such a file; name the narrow modules, or write a [[rule]]"
            )
        return Reading(casts=casts, layers=Layers((), HEADS[:2], first, last), lost=lost)
    if not has_rest:
        lost.append("modules that no matcher names: the file leaves them to Megatron's other arguments")
    return Reading(casts=casts, layers=Layers(tuple(narrow), others, first, last), lost=lost)


def _matched(
    configs: Mapping[str, Any], matchers: Mapping[str, Any]
) -> tuple[list[str], list[str], str, bool]:
    """The patterns of the wide matchers above the narrow ones; those of the narrow ones, and their
    configuration; whether a matcher is for the rest. The first matcher that fits a module wins.
    """
    found: list[tuple[str, str, str]] = []
    for name, matcher in matchers.items():
        if matcher.get("enabled", False) and not (found and found[-1][1] in _REST):
            found.append((name, str(matcher.get("pattern")), config := str(matcher.get("config"))))
            if matcher.get("type") != "glob" or config not in configs:
                raise UserError(
                    f"matcher {name!r} is not a glob with one of the configurations "
                    f"{', '.join(configs)}; correct it"
                )
    kinds = "".join("n" if _fields(configs[config] or {}) else "w" for *_, config in found)
    parts = re.match("(w*)(n+)w*", kinds)
    if parts is None:
        raise UserError(f"no enabled matcher has a narrow configuration; give one to {_ALL}, or to modules")
    above, narrow = (found[slice(*parts.span(part))] for part in (1, 2))
    of_narrow = narrow[0][2]
    if wrong := [m for m in narrow if m[2] != of_narrow] + found[parts.end() :]:
        name, pattern, config = wrong[0]
        raise UserError(
            f"matcher {name!r} gives {pattern!r} the configuration {config!r}; a recipe of "
            "such a file has one narrow configuration, and wide modules above or below all narrow ones; "
            "write other rules into a recipe file"
        )
    return [m[1] for m in above], [m[1] for m in narrow], of_narrow, found[-1][1] in _REST


def _fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a configuration that change values; none for one that is wide."""
    recipe = config.get("training_recipe") or {}
    return {key: value for key, value in recipe.items() if key not in _NO_VALUES}


def _casts(path: Path, name: str, config: Mapping[str, Any]) -> tuple[Mapping[str, Cast], list[str]]:
    """The casts of a configuration, and the parts that a recipe does not hold."""
    if config.get(_TYPE) != _PARAMS:
        raise UserError(f"configuration {name!r} has no {_TYPE}: {_PARAMS}; add it")
    fields = _fields(config)
    lost = [
        f"{key} of configuration {name!r}: a recipe is for training"
        for key in config
        if key not in (_TYPE, "training_recipe")
    ]
    if factory := fields.pop("custom_recipe_factory", ""):
        module, _, function = str(factory).rpartition(".")
        beside = path.with_name(f"{module.rpartition('.')[2]}.py")
        if not beside.is_file() or function != te.FACTORY:
            raise UserError(
                f"configuration {name!r} takes its casts from {factory}, a Python function; write "
                f"it with `narrowgauge recipes NAME --to te`, as {beside.name} in the same folder"
            )
        reading = read_file(beside, lambda text: te.read(text, beside, None))
        return reading.casts, [*lost, *(w for w in reading.lost if "which layers" not in w)]
    given = {key: str(value) for key, value in fields.items()}
    if "fp8_quantization_recipe" in given:
        given.setdefault("fp8_format", "e4m3")  # Megatron's default
    own = next((own for own in own_recipes() if own.above == given), None)
    if own is None:
        said = ", ".join(f"{key}: {value}" for key, value in fields.items()) or "nothing"
        raise UserError(
            f"configuration {name!r} has {said}, which narrowgauge does not know as a recipe of "
            "TransformerEngine; name tensorwise, blockwise, mxfp8 or nvfp4"
        )
    return own.casts, lost


def _ends(numbers: list[int], blocks: int | None) -> tuple[int, int]:
    """The numbers of wide blocks, in order, as counts from both ends of the model."""
    first = next((i for i, number in enumerate(numbers) if i != number), len(numbers))
    rest = numbers[first:]
    said = ", ".join(map(str, rest))
    if rest and blocks is None:
        raise UserError(
            f"blocks {said} stay wide, and a recipe counts them from the end of "
            "the model; give the number of blocks with --blocks N"
        )
    if rest and blocks is not None and rest != list(range(blocks - len(rest), blocks)):
        raise UserError(
            f"blocks {said} of {blocks} stay wide, but a recipe counts blocks "
            "from the ends of the model; name these blocks in a [[rule]]"
        )
    return first, len(rest)
