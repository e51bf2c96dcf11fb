"""The layers of a recipe that stay wide, or alone become narrow; and Python that selects them in a file."""

from dataclasses import replace

from narrowgauge.quantization import make_cast
from narrowgauge.recipes.describe import is_wide_rule, wide_and_other_rules
from narrowgauge.recipes.places import GEMM_PLACES
from narrowgauge.recipes.recipe import Recipe
from narrowgauge.recipes.rule import Rule

_SELECTION = '''\
# Layers that stay in {compute}: names or patterns, compared with a layer's whole name and with its last part;
# and blocks from both ends of the model, where a float is a share of them, rounded up. Blocks are the members
# of ModuleLists that lie in no other block.
MODULES = {modules}
FIRST_BLOCKS = {first}
LAST_BLOCKS = {last}


def is_wide(name, block, blocks):
    """Whether the layer called `name`, in block number `block` (or None) of `blocks`, stays wide."""

    def count(requested):
        return requested if isinstance(requested, int) else math.ceil(round(requested * blocks, 6))

    last_part = name.rpartition(".")[2]
    if any(fnmatchcase(name, p) or fnmatchcase(last_part, p) for p in MODULES):
        return True
    return block is not None and (block < count(FIRST_BLOCKS) or block >= blocks - count(LAST_BLOCKS))


def wide_layers(model):
    """The names of a model's modules that stay wide."""
    blocks = []

    def block_of(name):
        return next((i for i, block in enumerate(blocks) if f"{{name}}.".startswith(f"{{block}}.")), None)

    for name, module in model.named_modules():
        is_list = isinstance(module, torch.nn.ModuleList) and "expert" not in name.rpartition(".")[2].lower()
        if is_list and block_of(name) is None and any(list(member.children()) for member in module):
            blocks += [f"{{name}}.{{i}}".lstrip(".") for i in range(len(module))]
    names = [name for name, _ in model.named_modules(remove_duplicate=False)]
    return {{name for name in names if is_wide(name, block_of(name), len(blocks))}}
'''


def selection(recipe: Recipe) -> str:
    """Python code that selects the layers that stay wide; it needs math, fnmatchcase and torch."""
    modules, first, last = kept(recipe)
    return _SELECTION.format(compute=recipe.compute, modules=list(modules), first=first, last=last)


def kept(recipe: Recipe) -> tuple[tuple[str, ...], float, float]:
    """(patterns, first blocks, last blocks) that stay wide.

    Rules are merged as long as each sets different ends of the model; `outside_products` refuses the rest.
    """
    wide, _ = wide_and_other_rules(recipe)
    modules = tuple(dict.fromkeys(m for rule in wide for m in rule.modules))
    first = next((rule.first_blocks for rule in wide if rule.first_blocks), 0)
    last = next((rule.last_blocks for rule in wide if rule.last_blocks), 0)
    return modules, first, last


def narrowed(recipe: Recipe, start: str | None) -> tuple[Recipe, tuple[str, ...]]:
    """The recipe with the casts of its narrow modules for all, and the patterns of these modules.

    That is a recipe that is wide but for its first rule, which is of modules alone; all of its patterns begin
    with `start`. Any other recipe is returned as it is, without patterns.
    """
    first, *rest = recipe.rules or (Rule(places={}),)
    is_by_name = first.modules and first == Rule(places=first.casts, modules=first.modules)
    is_rest_wide = {recipe.casts[place] for place in GEMM_PLACES} == {make_cast(recipe.compute)}
    fits = start is not None and all(pattern.startswith(start) for pattern in first.modules)
    if not (is_by_name and is_rest_wide and fits) or is_wide_rule(first, recipe):
        return recipe, ()
    return replace(recipe, places={**recipe.places, **first.places}, rules=tuple(rest)), first.modules
