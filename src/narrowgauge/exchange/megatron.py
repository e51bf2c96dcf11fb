"""Megatron-LM: the YAML file of --te-precision-config-file, which assigns recipes to modules by globs.

Megatron has names for some of TransformerEngine's recipes. Any other recipe needs a quantizer factory, which
is the file that `--to te` writes. Source: Megatron-LM @ d98e8a6, core/extensions/transformer_engine.py
(TEQuantizationRecipe), core/quantization/quant_config.py (matchers; the first match wins), core/fp8_utils.py.
"""

import re
from collections.abc import Mapping
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple

from narrowgauge.exchange import te
from narrowgauge.exchange.layers import kept, narrowed
from narrowgauge.exchange.reading import Keep, Reading, read_text, yaml_documents
from narrowgauge.exchange.refusal import Refusal, outside_products
from narrowgauge.exchange.te_tables import delayed_scaling, named_fields, own_recipe
from narrowgauge.quantization import Cast
from narrowgauge.recipes.recipe import Recipe
from narrowgauge.system.errors import UserError

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


def _narrowed(recipe: Recipe) -> tuple[Recipe, tuple[str, ...]]:
    """`narrowed`: a matcher for each pattern of the narrow modules, and one that keeps the rest wide.

    Megatron compares a pattern with the whole name, a rule also with the last part of a name: they agree on a
    pattern that begins with *.
    """
    return narrowed(recipe, lambda pattern: pattern.startswith("*"))


def refusals(recipe: Recipe) -> list[Refusal]:
    """The parts of a recipe that Megatron cannot express."""
    recipe, only = _narrowed(recipe)
    modules, first, last = kept(recipe)
    products = te.of_products(recipe, "megatron")
    found = [*outside_products(recipe, "megatron"), *products]
    found += [
        Refusal("", "keep.modules", f"keep.modules = {name!r}, which is not a module of Megatron's models")
        for name in modules
        if name not in HEADS and not (only and name.startswith("*"))
    ]
    if not only and not set(HEADS) & set(modules) and not products:
        why = "the head is quantized, but Megatron does not quantize its output layer"
        found.append(Refusal("", "keep.modules", why))
    own = own_recipe(recipe)
    if only and own is None and not products:
        why = "[[rule]] with casts that Megatron has no name for, and a factory is for all layers"
        found.append(Refusal("", "rule", why))
    if own is not None and own.arguments and (only or first or last):
        why = "keep with a history, but Megatron's delayed scaling applies to all blocks"
        found.append(Refusal("", "keep", why))
    return found


def text(recipe: Recipe, blocks: int | None = None) -> str:
    """The YAML file; `blocks` is the number of blocks, needed if the recipe keeps some of the last.

    Raises:
        UserError: That number is missing.
    """
    modules, first, last = kept(recipe)
    key = "last_blocks" if last else "first_blocks" if isinstance(first, float) and first else ""
    if key and blocks is None:
        raise UserError(
            f"recipe {recipe.name!r} for megatron: keep.{key} counts the blocks of a model, but Megatron's "
            "file needs their indices; give the number of blocks with --blocks N"
        )
    recipe, only = _narrowed(recipe)
    own = own_recipe(recipe)
    if own is not None and own.arguments:
        return (
            "# Megatron does not set delayed scaling in this file. These arguments are equivalent:\n"
            f"#   {own.arguments}\nconfigs: {{}}\nmatchers: {{}}\n"
        )
    if own is not None and own.megatron:
        said = dict(own.megatron)
    else:  # te.needs_factory
        said = {
            "fp8_quantization_recipe": "custom",
            "custom_recipe_factory": f"{_module(recipe)}.{te.FACTORY}",
        }
    kind = f'    {_TYPE}: "{_PARAMS}"\n    training_recipe:'
    lines = ["configs:", "  narrow:", kind]
    lines += [f'      {key}: "{value}"' for key, value in said.items()]
    lines += ["      override_nonquantized_autocast: true", "  wide:", f"{kind} {{}}", "matchers:"]
    for number in _wide_blocks(first, last, blocks or 0):
        lines += _matcher(f"block_{number}", "wide", f"*layers.{number}.*")
    for config, patterns in (("wide", modules), ("narrow", only)) if only else ():
        for number, pattern in enumerate(patterns):
            lines += _matcher(f"{config}_{number}", config, pattern)
    lines += _matcher("rest", "wide", "*") if only else _matcher("rest", "narrow", _ALL)
    return "\n".join(lines) + "\n"


def _module(recipe: Recipe) -> str:
    """The Python module of a recipe's factory."""
    return f"te_{recipe.name.replace('-', '_')}"


def _wide_blocks(first: float, last: float, total: int) -> list[int]:
    def count(requested: float) -> int:
        return requested if isinstance(requested, int) else ceil(round(requested * total, 6))

    return sorted({*range(count(first)), *range(total - count(last), total)})


def _matcher(name: str, config: str, pattern: str) -> list[str]:
    said = {"config": config, "type": "glob", "pattern": pattern}
    return [f"  {name}:", *(f'    {key}: "{value}"' for key, value in said.items()), "    enabled: true"]


def notes(recipe: Recipe) -> list[str]:
    """The places where Megatron's values differ from the recipe, and what its user has to do."""
    recipe, _ = _narrowed(recipe)
    own = own_recipe(recipe)
    found = [
        "Pass it as --te-precision-config-file. Layers are numbered from 0 in each pipeline stage; without "
        "pipelining these are the layers of the model."
    ]
    if te.needs_factory(recipe):
        file = f"the file of `narrowgauge recipes {recipe.name} --to te`, saved as {_module(recipe)}.py."
        found.append(f"The factory is {file}")
    elif own and own.megatron and own.megatron.get("fp8_quantization_recipe") == "tensorwise":
        found.append(
            "On sm_90, fprop uses fast accumulation, which is less than fp32; Megatron has no key for it."
        )
    return found + te.notes_of_values(recipe)


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
    if not file["configs"] and (said := _DELAYED.search(read_text(path))):
        word, margin, history, algorithm = said.groups()
        own = delayed_scaling(word.upper(), int(history), algorithm, int(margin))
        return Reading(casts=own.casts, keep=Keep(HEADS[:2]))
    above, narrow, has_rest = _matched(path, file)
    casts, lost = _casts(path, narrow[0].config, file["configs"][narrow[0].config])
    found = {m.pattern: _BLOCK.fullmatch(m.pattern) for m in above}
    others = tuple(pattern for pattern, block in found.items() if not block)
    first, last = _ends(path, sorted({int(block[1]) for block in found.values() if block}), blocks)
    if narrow[-1].is_rest:
        if others:
            raise UserError(
                f"{path}: {', '.join(others)} stay wide and all other modules are narrow, but [keep] takes "
                "whole blocks of such a file; name the narrow modules, or write a [[rule]]"
            )
        return Reading(casts=casts, keep=Keep(HEADS[:2], first, last), lost=lost)
    if not has_rest:
        lost.append("modules that no matcher names: the file leaves them to Megatron's other arguments")
    only = tuple(m.pattern for m in narrow)
    return Reading(casts=casts, only=only, keep=Keep(others, first, last), lost=lost)


class _Matcher(NamedTuple):
    """An enabled matcher: the modules of a pattern get a configuration, unless one above it fits them."""

    name: str
    pattern: str
    config: str

    @property
    def is_rest(self) -> bool:
        """Whether it fits every module."""
        return self.pattern in (_ALL, "*")


def _matched(path: Path, file: Mapping[str, Any]) -> tuple[list[_Matcher], list[_Matcher], bool]:
    """(the wide matchers above the narrow ones, the narrow ones, whether a matcher is for the rest)."""
    matchers: list[_Matcher] = []
    for name, matcher in file["matchers"].items():
        if not matcher.get("enabled", False) or (matchers and matchers[-1].is_rest):
            continue
        matchers.append(_Matcher(name, str(matcher.get("pattern")), str(matcher.get("config"))))
        if matcher.get("type") != "glob" or matchers[-1].config not in file["configs"]:
            raise UserError(
                f"{path}: matcher {name!r} is not a glob with one of the configurations "
                f"{', '.join(file['configs'])}; correct it"
            )
    narrow = [m for m in matchers if _fields(file["configs"][m.config] or {})]
    if not narrow:
        raise UserError(
            f"{path}: no enabled matcher has a narrow configuration; give one to {_ALL}, or to modules"
        )
    first = matchers.index(narrow[0])
    for m, expected in zip(narrow, matchers[first:], strict=False):
        if m != expected or m.config != narrow[0].config:
            raise UserError(
                f"{path}: matcher {m.name!r} gives {m.pattern!r} the configuration {m.config!r}; a recipe of "
                "such a file has one narrow configuration, and wide modules above or below all narrow ones; "
                "write other rules into a recipe file"
            )
    return matchers[:first], narrow, matchers[-1].is_rest


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


def _ends(path: Path, numbers: list[int], blocks: int | None) -> tuple[int, int]:
    """The numbers of wide blocks, in order, as counts from both ends of the model."""
    first = next((i for i, number in enumerate(numbers) if i != number), len(numbers))
    rest = numbers[first:]
    said = ", ".join(map(str, rest))
    if rest and blocks is None:
        raise UserError(
            f"{path}: blocks {said} stay wide, and a recipe counts them from the end of "
            "the model; give the number of blocks with --blocks N"
        )
    if rest and blocks is not None and rest != list(range(blocks - len(rest), blocks)):
        raise UserError(
            f"{path}: blocks {said} of {blocks} stay wide, but a recipe counts blocks "
            "from the ends of the model; name these blocks in a [[rule]]"
        )
    return first, len(rest)
