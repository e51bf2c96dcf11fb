"""narrowgauge: pre-train language models in low precision, and see what the formats did to the training.

Every tensor of a training step has a place; a recipe specifies the number format of each place.

The names below are imported on first use (`lazy`): importing torch takes seconds, and before that the command
must already respond to signals, and to a torch that fails to import (`__main__`).
"""

from typing import TYPE_CHECKING

from narrowgauge.system.lazy import import_on_use

if TYPE_CHECKING:
    from narrowgauge.distributed import fully_shard as fully_shard
    from narrowgauge.distributed import prepare_ddp as prepare_ddp
    from narrowgauge.formats import Format as Format
    from narrowgauge.formats import Specials as Specials
    from narrowgauge.formats import format as format
    from narrowgauge.formats import format_names as format_names
    from narrowgauge.formats import register_format as register_format
    from narrowgauge.formats import round_to as round_to
    from narrowgauge.nn import audit as audit
    from narrowgauge.nn import convert as convert
    from narrowgauge.nn import kept_layers as kept_layers
    from narrowgauge.nn import set_step as set_step
    from narrowgauge.nn import step as step
    from narrowgauge.optim import AdamW as AdamW
    from narrowgauge.optim import Muon as Muon
    from narrowgauge.optim import load_state_dict as load_state_dict
    from narrowgauge.optim import parameter_groups as parameter_groups
    from narrowgauge.optim import state_dict as state_dict
    from narrowgauge.quantization import QTensor as QTensor
    from narrowgauge.quantization import quantize as quantize
    from narrowgauge.quantization import register_cast as register_cast
    from narrowgauge.recipes import Recipe as Recipe
    from narrowgauge.recipes import load_recipe as load_recipe
    from narrowgauge.recipes import recipe as recipe
    from narrowgauge.recipes import recipe_names as recipe_names
    from narrowgauge.trainer.experiment.forecast import predict as predict
    from narrowgauge.trainer.laboratory.advise.advise import advise as advise
    from narrowgauge.trainer.laboratory.compare import compare as compare
    from narrowgauge.trainer.laboratory.gauges import gauges as gauges
    from narrowgauge.trainer.laboratory.plan import plan as plan
    from narrowgauge.trainer.laboratory.probe import probe as probe
    from narrowgauge.trainer.laboratory.search import search as search
    from narrowgauge.trainer.laboratory.sensitivity import sensitivity as sensitivity
    from narrowgauge.trainer.laboratory.train import train as train
    from narrowgauge.trainer.runs import run as run
else:
    __all__, __getattr__, __dir__ = import_on_use(__name__)

__version__ = "0.1.0"
