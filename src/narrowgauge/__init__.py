"""narrowgauge: pre-train language models in narrow numbers, and see what the narrow numbers did.

Every tensor of a training step has a place; a recipe says which number format each place is in.

The names below are imported when they are first used, because torch takes seconds to import, and the command
has to answer to signals before that (`__main__`).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from narrowgauge.distributed import fully_shard, prepare_ddp
    from narrowgauge.formats import Format, format, format_names, round_to
    from narrowgauge.nn import convert, set_step
    from narrowgauge.optim import AdamW, Muon, load_state_dict, parameter_groups, state_dict
    from narrowgauge.quantization import QTensor, quantize
    from narrowgauge.recipes import Recipe, load_recipe, recipe, recipe_names
    from narrowgauge.training import run

__all__ = [
    "AdamW",
    "Format",
    "Muon",
    "QTensor",
    "Recipe",
    "convert",
    "format",
    "format_names",
    "fully_shard",
    "load_recipe",
    "load_state_dict",
    "parameter_groups",
    "prepare_ddp",
    "quantize",
    "recipe",
    "recipe_names",
    "round_to",
    "run",
    "set_step",
    "state_dict",
]

_ROOMS = {
    "distributed": ("fully_shard", "prepare_ddp"),
    "formats": ("Format", "format", "format_names", "round_to"),
    "nn": ("convert", "set_step"),
    "optim": ("AdamW", "Muon", "load_state_dict", "parameter_groups", "state_dict"),
    "quantization": ("QTensor", "quantize"),
    "recipes": ("Recipe", "load_recipe", "recipe", "recipe_names"),
    "training": ("run",),
}


def __getattr__(name: str) -> Any:
    for room, names in _ROOMS.items():
        if name in names:
            value = globals()[name] = getattr(import_module(f"narrowgauge.{room}"), name)
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
