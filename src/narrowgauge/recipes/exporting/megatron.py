"""A recipe for Megatron-LM: the YAML of --te-precision-config-file, which gives modules a recipe by globs.

Megatron names those of TransformerEngine's recipes that it knows. Any other is a quantizer factory, which is
the file that `--to te` writes. Source: Megatron-LM @ d98e8a6, core/extensions/transformer_engine.py
(TEQuantizationRecipe), core/quantization/quant_config.py (matchers, of which the first wins),
core/fp8_utils.py.
"""

from math import ceil

from narrowgauge.recipes.exporting import te
from narrowgauge.recipes.exporting.layers import kept
from narrowgauge.recipes.exporting.refusal import Refusal, other_rules, outside_products
from narrowgauge.recipes.exporting.te_recipes import own_recipe
from narrowgauge.recipes.recipe import Recipe

VERSION = "Megatron-LM 0.20.0 (d98e8a6, 2026-08-22)"
# The output head has no quantization in Megatron, unless --fp8-output-proj asks for it.
HEADS = ("head", "lm_head", "output_layer")


def refusals(recipe: Recipe) -> list[Refusal]:
    """What Megatron cannot say of a recipe."""
    modules, first, last = kept(recipe)
    found = [*outside_products(recipe, "megatron"), *other_rules(recipe, "megatron")]
    products = te.of_products(recipe, "megatron")
    found += products
    for name in modules:
        if name not in HEADS:
            why = f"keep.modules = {name!r}, a name of another model than Megatron's"
            found.append(Refusal("", "keep.modules", why))
    if not set(HEADS) & set(modules) and not products:
        why = "no head is kept, but Megatron's output layer is not quantized"
        found.append(Refusal("", "keep.modules", why))
    own = own_recipe(recipe)
    if own is not None and "Delayed" in own.text and (first or last):
        found.append(
            Refusal("", "keep", "keep with history, but Megatron's delayed scaling holds for all blocks")
        )
    return found


def needs_blocks(recipe: Recipe) -> str:
    """The key of [keep] for which the number of blocks has to be known; "" if there is none."""
    _, first, last = kept(recipe)
    return "last_blocks" if last else "first_blocks" if isinstance(first, float) and first else ""


def text(recipe: Recipe, blocks: int | None) -> str:
    """The YAML file; `blocks` is how many the model has, where the recipe keeps some of its last."""
    own = own_recipe(recipe)
    if own is not None and "Delayed" in own.text:
        return (
            "# Delayed scaling is no matter of this file in Megatron. These arguments say the same:\n"
            f"#   {own.arguments}\nconfigs: {{}}\nmatchers: {{}}\n"
        )
    if own is not None and own.megatron:
        said = dict(own.megatron)
    else:  # te.needs_factory
        module = f"te_{recipe.name.replace('-', '_')}"
        said = {"fp8_quantization_recipe": "custom", "custom_recipe_factory": f"{module}.{te.FACTORY}"}
    kind = '    transformer_engine_config_type: "TEQuantizationParams"\n    training_recipe:'
    lines = ["configs:", "  narrow:", kind]
    lines += [f'      {key}: "{value}"' for key, value in said.items()]
    lines += ["      override_nonquantized_autocast: true", "  wide:", f"{kind} {{}}", "matchers:"]
    for number in _wide_blocks(recipe, blocks):
        lines += _matcher(f"block_{number}", "wide", f"*layers.{number}.*")
    return "\n".join(lines + _matcher("rest", "narrow", "*layers.*")) + "\n"


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
    """The places where the numbers of Megatron differ from the recipe, and what its user has to do."""
    own = own_recipe(recipe)
    found = [
        "Give it as --te-precision-config-file. Layers are numbered from 0 in each pipeline stage: without "
        "pipelining these are the model's."
    ]
    if te.needs_factory(recipe):
        module = f"te_{recipe.name.replace('-', '_')}"
        found.append(
            f"The factory is the file of `narrowgauge recipes {recipe.name} --to te`, kept as {module}.py."
        )
    elif own and own.megatron and own.megatron.get("fp8_quantization_recipe") == "tensorwise":
        found.append(
            "On sm_90, fprop adds up with fast accumulation, which is less than fp32: Megatron has no key."
        )
    te_notes = [
        n for n in te.notes(recipe)[1:] if "other random" in n or "is reused" in n or "FP8 adds up" in n
    ]
    return found + te_notes
