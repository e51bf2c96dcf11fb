"""Selects the layers that stay wide, as Python in the written file, for tools without such a setting."""

from narrowgauge.recipes.describe import wide_and_other_rules
from narrowgauge.recipes.recipe import Recipe

_KEPT = """\
# Layers that stay in {compute}: names or patterns, compared with a layer's whole name and with its last part;
# and blocks from both ends of the model, where a float is a share of them, rounded up. Blocks are the members
# of ModuleLists that lie in no other block.
MODULES = {modules}
FIRST_BLOCKS = {first}
LAST_BLOCKS = {last}
"""
_SELECTION = '''

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
        return next((i for i, block in enumerate(blocks) if f"{name}.".startswith(f"{block}.")), None)

    for name, module in model.named_modules():
        is_list = isinstance(module, torch.nn.ModuleList) and "expert" not in name.rpartition(".")[2].lower()
        if is_list and block_of(name) is None and any(list(member.children()) for member in module):
            blocks += [f"{name}.{i}".lstrip(".") for i in range(len(module))]
    names = [name for name, _ in model.named_modules(remove_duplicate=False)]
    return {name for name in names if is_wide(name, block_of(name), len(blocks))}
'''


def selection(recipe: Recipe) -> str:
    """Python code that selects the layers that stay wide; it needs math, fnmatchcase and torch."""
    modules, first, last = kept(recipe)
    said = _KEPT.format(compute=recipe.compute, modules=list(modules), first=first, last=last)
    return said + _SELECTION


def kept(recipe: Recipe) -> tuple[tuple[str, ...], float, float]:
    """(patterns, first blocks, last blocks) that stay wide.

    Rules are merged as long as each sets different ends of the model; `other_rules` refuses the rest.
    """
    wide, _ = wide_and_other_rules(recipe)
    modules = tuple(dict.fromkeys(m for rule in wide for m in rule.modules))
    first = next((rule.first_blocks for rule in wide if rule.first_blocks), 0)
    last = next((rule.last_blocks for rule in wide if rule.last_blocks), 0)
    return modules, first, last
