"""Where a run begins: with the weights of another one, for fine-tuning or to go on with other text.

    narrowgauge import Qwen2.5-0.5B/ --out base
    narrowgauge train --model.weights base --data my-texts/ --recipe fp8 --out tuned

The weights are plain numbers in between, so the two runs may have any two recipes.
"""

from collections.abc import Mapping
from pathlib import Path

import torch

from narrowgauge.data import Tokenizer, load_tokenizer
from narrowgauge.errors import UserError
from narrowgauge.models import Transformer
from narrowgauge.nn import Linear
from narrowgauge.optim import local, part_of
from narrowgauge.training.config.config import Config
from narrowgauge.training.run_directory import RunDirectory
from narrowgauge.training.use.trained_model import open_run


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
    with torch.device("meta"):
        whole = Transformer(config.resolved_model())
    ours = {name: p.shape for name, p in whole.named_parameters(remove_duplicate=False)}
    for name in sorted(ours.keys() | weights.keys()):
        found = tuple(weights[name].shape) if name in weights else "nothing"
        needed = tuple(ours[name]) if name in ours else "nothing"
        if found != needed:
            raise UserError(
                f"model.weights = {config.model.weights!r} is another model: {name} is {found} there and "
                f"{needed} here; leave the dimensions out, and they are taken from it"
            )
    _take(model, weights)


@torch.no_grad()
def _take(model: Transformer, weights: Mapping[str, torch.Tensor]) -> None:
    """Give a model what lies here of these weights."""
    layers = {name: m for name, m in model.named_modules() if isinstance(m, Linear)}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        part = part_of(parameter)
        numbers = weights[name] if part is None else part.local_of(weights[name])
        layer = layers.get(name.removesuffix(".weight"))
        if layer is not None and layer.state_at_rest is not None:
            layer.state_at_rest.write(numbers)
        else:
            local(parameter).copy_(numbers)
