"""narrowgauge: pre-train language models in narrow numbers, and see what the narrow numbers did.

Every tensor of a training step has a place; a recipe says which number format each place is in.

The names below are imported when they are first used (`lazy`), because torch takes seconds to import, and the
command has to answer to signals, and to a torch that does not import, before that (`__main__`).
"""

from typing import TYPE_CHECKING

from narrowgauge.lazy import import_on_use

if TYPE_CHECKING:
    from narrowgauge.distributed import fully_shard, prepare_ddp
    from narrowgauge.formats import Format, format, format_names, round_to
    from narrowgauge.nn import convert, set_step, step
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
    "step",
]

__version__ = "0.1.0"

__getattr__ = import_on_use(
    __name__,
    {
        "distributed": ("fully_shard", "prepare_ddp"),
        "formats": ("Format", "format", "format_names", "round_to"),
        "nn": ("convert", "set_step", "step"),
        "optim": ("AdamW", "Muon", "load_state_dict", "parameter_groups", "state_dict"),
        "quantization": ("QTensor", "quantize"),
        "recipes": ("Recipe", "load_recipe", "recipe", "recipe_names"),
        "training": ("run",),
    },
)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
