"""Where a run begins: with the weights of another one, for fine-tuning or to go on with other text.

    narrowgauge import Qwen2.5-0.5B/ --out base
    narrowgauge train --model.weights base --data my-texts/ --recipe fp8 --out tuned

The weights are plain numbers in between, so the two runs may have any two recipes.
"""

from pathlib import Path

from narrowgauge.data import Tokenizer, load_tokenizer
from narrowgauge.errors import UserError
from narrowgauge.models import Transformer
from narrowgauge.training.config import Config
from narrowgauge.training.directory import RunDirectory
from narrowgauge.training.use import open_run


def check_start(config: Config, tokenizer: Tokenizer) -> None:
    """Refuse another tokenizer than that of the run that `model.weights` names, if it names one.

    A run that goes on from its own checkpoint does not need that run any more: it may be gone.
    """
    if not config.model.weights:
        return
    theirs = RunDirectory(Path(config.model.weights)).tokenizer
    if theirs.is_file() and load_tokenizer(theirs).to_json() != tokenizer.to_json():
        raise UserError(
            f"data.tokenizer = {config.data.tokenizer!r} is not the tokenizer that model.weights = "
            f"{config.model.weights!r} was trained with, so its ids mean other text; leave data.tokenizer out"
        )


def start_from_weights(config: Config, model: Transformer) -> None:
    """Give a new model the weights of the run that `model.weights` names, if it names one.

    Raises `UserError` where that run is another model.
    """
    if not config.model.weights:
        return
    there = open_run(Path(config.model.weights), "cpu")
    weights = there.weights()
    ours = {name: p.shape for name, p in model.named_parameters(remove_duplicate=False)}
    for name in sorted(ours.keys() | weights.keys()):
        found = tuple(weights[name].shape) if name in weights else "nothing"
        needed = tuple(ours[name]) if name in ours else "nothing"
        if found != needed:
            raise UserError(
                f"model.weights = {config.model.weights!r} is another model: {name} is {found} there and "
                f"{needed} here; leave the dimensions out, and they are taken from it"
            )
    model.load_state_dict(weights)
