"""Megatron-LM: the YAML file of --te-precision-config-file, which assigns recipes to modules by globs.

Megatron has names for some of TransformerEngine's recipes. Any other recipe needs a quantizer factory, which
is the file that `--to te` writes. Source: Megatron-LM @ d98e8a6, core/extensions/transformer_engine.py
(TEQuantizationRecipe), core/quantization/quant_config.py (matchers; the first match wins), core/fp8_utils.py.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import ceil
from pathlib import Path
from typing import Any

from narrowgauge.errors import UserError
from narrowgauge.quantization import Cast, make_cast
from narrowgauge.recipes.exchange import te
from narrowgauge.recipes.exchange.layers import kept
from narrowgauge.recipes.exchange.reading import Keep, Reading, read_text, yaml_documents
from narrowgauge.recipes.exchange.refusal import Refusal, other_rules, outside_products
from narrowgauge.recipes.exchange.te_recipes import delayed_scaling, named_fields, own_recipe
from narrowgauge.recipes.places import GEMM_PLACES
from narrowgauge.recipes.recipe import Recipe
from narrowgauge.recipes.rule import Rule

VERSION = "Megatron-LM 0.20.0 (d98e8a6, 2026-08-22)"
# Megatron does not quantize the output head without --fp8-output-proj.
HEADS = ("head", "lm_head", "output_layer")
_TYPE, _PARAMS = "transformer_engine_config_type", "TEQuantizationParams"
_ALL, _BLOCK = "*layers.*", re.compile(r"\*?layers\.(\d+)\.\*")
_DELAYED = re.compile(
    r"--fp8-format (hybrid|e4m3) --fp8-recipe delayed --fp8-margin (\d+)\s+(?:#\s+)?"
    r"--fp8-amax-history-len (\d+) --fp8-amax-compute-algo (max|most_recent)"
)
#: Fields of a training recipe that do not change the values of the GEMMs.
_NO_VALUES = ("override_nonquantized_autocast", "override_quantized_autocast", "tp_only_amax_red")


def refusals(recipe: Recipe) -> list[Refusal]:
    """The parts of a recipe that Megatron cannot express."""
    recipe, only = _narrowed(recipe)
    modules, first, last = kept(recipe)
    found = [*outside_products(recipe, "megatron"), *other_rules(recipe, "megatron")]
    products = te.of_products(recipe, "megatron")
    found += products
    for name in modules:
        if name not in HEADS and not (only and name.startswith("*")):
            why = f"keep.modules = {name!r}, which is not a module of Megatron's models"
            found.append(Refusal("", "keep.modules", why))
    if not only and not set(HEADS) & set(modules) and not products:
        why = "the head is quantized, but Megatron does not quantize its output layer"
        found.append(Refusal("", "keep.modules", why))
    own = own_recipe(recipe)
    if only and own is None and not products:
        why = "[[rule]] with casts that Megatron has no name for, and a factory is for all layers"
        found.append(Refusal("", "rule", why))
    if own is not None and "Delayed" in own.text and (only or first or last):
        found.append(
            Refusal("", "keep", "keep with a history, but Megatron's delayed scaling applies to all blocks")
        )
    return found


def _narrowed(recipe: Recipe) -> tuple[Recipe, tuple[str, ...]]:
    """The recipe with the casts of its narrow modules for all, and the patterns of these modules.

    A recipe that is wide but for one rule of modules becomes one matcher for each pattern, and one that keeps
    the rest wide. Megatron compares a pattern with the whole name, a rule also with the last part of a name:
    they agree on a pattern that begins with *. Any other recipe is returned as it is, without patterns.
    """
    first, *rest = recipe.rules or (Rule(casts={}),)
    is_plain = first.modules and first == Rule(casts=first.casts, modules=first.modules)
    is_wide = {recipe.casts[place] for place in GEMM_PLACES} == {make_cast(recipe.compute)}
    if not is_plain or not is_wide or not all(pattern.startswith("*") for pattern in first.modules):
        return recipe, ()
    return replace(recipe, casts={**recipe.casts, **first.casts}, rules=tuple(rest)), first.modules


def needs_blocks(recipe: Recipe) -> str:
    """The key of [keep] that needs the number of blocks; "" if none does."""
    _, first, last = kept(recipe)
    return "last_blocks" if last else "first_blocks" if isinstance(first, float) and first else ""


def text(recipe: Recipe, blocks: int | None) -> str:
    """The YAML file; `blocks` is the number of blocks, needed if the recipe keeps some of the last."""
    recipe, only = _narrowed(recipe)
    own = own_recipe(recipe)
    if own is not None and "Delayed" in own.text:
        return (
            "# Megatron does not set delayed scaling in this file. These arguments are equivalent:\n"
            f"#   {own.arguments}\nconfigs: {{}}\nmatchers: {{}}\n"
        )
    if own is not None and own.megatron:
        said = dict(own.megatron)
    else:  # te.needs_factory
        module = f"te_{recipe.name.replace('-', '_')}"
        said = {"fp8_quantization_recipe": "custom", "custom_recipe_factory": f"{module}.{te.FACTORY}"}
    kind = f'    {_TYPE}: "{_PARAMS}"\n    training_recipe:'
    lines = ["configs:", "  narrow:", kind]
    lines += [f'      {key}: "{value}"' for key, value in said.items()]
    lines += ["      override_nonquantized_autocast: true", "  wide:", f"{kind} {{}}", "matchers:"]
    for number in _wide_blocks(recipe, blocks):
        lines += _matcher(f"block_{number}", "wide", f"*layers.{number}.*")
    if only:
        for config, patterns in (("wide", kept(recipe)[0]), ("narrow", only)):
            for number, pattern in enumerate(patterns):
                lines += _matcher(f"{config}_{number}", config, pattern)
    lines += _matcher("rest", "wide", "*") if only else _matcher("rest", "narrow", _ALL)
    return "\n".join(lines) + "\n"


def _wide_blocks(recipe: Recipe, blocks: int | None) -> list[int]:
    _, first, last = kept(recipe)

    def count(requested: float) -> int:
        return requested if isinstance(requested, int) else ceil(round(requested * (blocks or 0), 6))

    total = blocks or 0
    return sorted({*range(count(first)), *range(total - count(last), total)})


def _matcher(name: str, config: str, pattern: str) -> list[str]:
    return [
        f"  {name}:",
        f'    config: "{config}"',
        '    type: "glob"',
        f'    pattern: "{pattern}"',
        "    enabled: true",
    ]


def notes(recipe: Recipe) -> list[str]:
    """The places where Megatron's values differ from the recipe, and what its user has to do."""
    recipe, _ = _narrowed(recipe)
    own = own_recipe(recipe)
    found = [
        "Pass it as --te-precision-config-file. Layers are numbered from 0 in each pipeline stage; without "
        "pipelining these are the layers of the model."
    ]
    if te.needs_factory(recipe):
        module = f"te_{recipe.name.replace('-', '_')}"
        found.append(
            f"The factory is the file of `narrowgauge recipes {recipe.name} --to te`, saved as {module}.py."
        )
    elif own and own.megatron and own.megatron.get("fp8_quantization_recipe") == "tensorwise":
        found.append(
            "On sm_90, fprop uses fast accumulation, which is less than fp32; Megatron has no key for it."
        )
    te_notes = [
        n for n in te.notes(recipe)[1:] if "other random" in n or "is reused" in n or "FP8 adds up" in n
    ]
    return found + te_notes


def read(path: Path, blocks: int | None = None) -> Reading:
    """Read the YAML of --te-precision-config-file: one low-precision configuration and wide blocks.

    Args:
        path: The file. A factory that it names is read from a Python file in the same folder.
        blocks: The number of blocks of the model; needed if some of the last stay wide.

    Raises:
        UserError: A recipe cannot express a part of the file; the sentence names it.
    """
    (file, *_) = yaml_documents(path) or [None]
    if not isinstance(file, Mapping) or not {"configs", "matchers"} <= set(file):
        raise UserError(f"{path} has no configs and matchers; name a file for --te-precision-config-file")
    heads = Keep(HEADS[:2])
    if not file["configs"] and (said := _DELAYED.search(read_text(path))):
        word, margin, history, algorithm = said.groups()
        own = delayed_scaling(word.upper(), int(history), algorithm, int(margin))
        return Reading(casts=own.casts, keep=heads)
    found = _matched(path, file)
    casts, lost = _casts(path, found.narrow, file["configs"][found.narrow])
    keep = _keep(path, found.blocks, blocks)
    if found.only:
        keep = Keep(tuple(found.wide), keep.first_blocks, keep.last_blocks)
        if not found.has_rest:
            lost.append("modules that no matcher names: the file leaves them to Megatron's other arguments")
    return Reading(casts=casts, only=tuple(found.only), keep=keep, lost=lost)


@dataclass(slots=True)
class _Matched:
    """What the matchers of a file say: the first that fits a module wins.

    Attributes:
        narrow: The one narrow configuration.
        blocks: The numbers of blocks that stay wide.
        wide: Patterns of other modules that stay wide, above the narrow ones.
        only: Patterns of the modules that are narrow; none for all others.
        has_rest: Whether a matcher names all other modules.
    """

    narrow: str = ""
    blocks: list[int] = field(default_factory=list)
    wide: list[str] = field(default_factory=list)
    only: list[str] = field(default_factory=list)
    has_rest: bool = False


def _matched(path: Path, file: Mapping[str, Any]) -> _Matched:
    """The enabled matchers: wide modules first, then narrow ones of one configuration, then the rest."""
    found, is_past = _Matched(), False
    for name, matcher in file["matchers"].items():
        if not matcher.get("enabled", False) or found.has_rest:
            continue
        pattern, config = str(matcher.get("pattern")), str(matcher.get("config"))
        if matcher.get("type") != "glob" or config not in file["configs"]:
            raise UserError(
                f"{path}: matcher {name!r} is not a glob with one of the configurations "
                f"{', '.join(file['configs'])}; correct it"
            )
        number, is_narrow = _BLOCK.fullmatch(pattern), bool(_fields(file["configs"][config] or {}))
        found.has_rest = pattern in (_ALL, "*")
        if is_narrow and (is_past or found.narrow not in ("", config)):
            raise UserError(
                f"{path}: matcher {name!r} gives {pattern!r} the configuration {config!r}; a recipe of "
                "such a file has one narrow configuration, and wide modules above or below all narrow ones; "
                "write other rules into a recipe file"
            )
        if is_narrow:
            found.narrow = config
            found.only = [] if found.has_rest else [*found.only, pattern]
        elif found.narrow:
            is_past = True  # the rest is wide in any case
        elif number:
            found.blocks.append(int(number[1]))
        else:
            found.wide.append(pattern)
    if not found.narrow:
        raise UserError(
            f"{path}: no enabled matcher has a narrow configuration; give one to {_ALL}, or to modules"
        )
    if found.wide and not found.only:
        raise UserError(
            f"{path}: {', '.join(found.wide)} stay wide and all other modules are narrow, but [keep] takes "
            "whole blocks of such a file; name the narrow modules, or write a [[rule]]"
        )
    return found


def _fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a configuration that change values; none for one that is wide."""
    recipe = config.get("training_recipe") or {}
    return {key: value for key, value in recipe.items() if key not in _NO_VALUES}


def _casts(path: Path, name: str, config: Mapping[str, Any]) -> tuple[Mapping[str, Cast], list[str]]:
    """The casts of a configuration, and the parts that a recipe does not hold."""
    if config.get(_TYPE) != _PARAMS:
        raise UserError(f"{path}: configuration {name!r} has no {_TYPE}: {_PARAMS}; add it")
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
                f"{path}: configuration {name!r} takes its casts from {factory}, a Python function; write "
                f"it with `narrowgauge recipes NAME --to te`, as {beside.name} in the same folder"
            )
        reading = te.read(beside)
        return reading.casts, [*lost, *(w for w in reading.lost if "which layers" not in w)]
    own = named_fields(fields)
    if own is None:
        said = ", ".join(f"{key}: {value}" for key, value in fields.items()) or "nothing"
        raise UserError(
            f"{path}: configuration {name!r} has {said}, which narrowgauge does not know as a recipe of "
            "TransformerEngine; name tensorwise, blockwise, mxfp8 or nvfp4"
        )
    return own.casts, lost


def _keep(path: Path, wide: list[int], blocks: int | None) -> Keep:
    """The wide blocks as counts from both ends of the model."""
    numbers = sorted(set(wide))
    first = next((i for i, number in enumerate(numbers) if i != number), len(numbers))
    rest = numbers[first:]
    if rest and blocks is None:
        raise UserError(
            f"{path}: blocks {', '.join(map(str, rest))} stay wide, and a recipe counts them from the end of "
            "the model; give the number of blocks with --blocks N"
        )
    if rest and rest != list(range(blocks - len(rest), blocks or 0)):  # type: ignore[operator]
        raise UserError(
            f"{path}: blocks {', '.join(map(str, rest))} of {blocks} stay wide, but a recipe counts blocks "
            "from the ends of the model; name these blocks in a [[rule]]"
        )
    return Keep(HEADS[:2], first, len(rest))
