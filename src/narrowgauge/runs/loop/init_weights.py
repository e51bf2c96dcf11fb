"""Initial weights from another run, for fine-tuning or for training on other text.

    narrowgauge import Qwen2.5-0.5B/ --out base
    narrowgauge train --model.weights base --data my-texts/ --recipe fp8 --out tuned

The weights are copied as float32, so the two runs may have different recipes. A resumed run starts from a
checkpoint, so the run in `model.weights` may no longer exist.
"""

from pathlib import Path

import torch

from narrowgauge.data import Tokenizer, load_tokenizer
from narrowgauge.errors import UserError
from narrowgauge.models import Transformer
from narrowgauge.quantization import shard_of, write_weight
from narrowgauge.runs.run_directory import RunDirectory
from narrowgauge.runs.use.trained_model import open_run
from narrowgauge.training.config.config import Config


def check_start(config: Config, tokenizer: Tokenizer) -> None:
    """Check that the tokenizer of the data is that of the run in `model.weights`, if set.

    Raises:
        UserError: the tokenizers differ.
    """
    weights = config.model.weights
    source = RunDirectory(Path(weights)).tokenizer
    if weights and source.is_file() and load_tokenizer(source).to_json() != tokenizer.to_json():
        raise UserError(
            f"data.tokenizer = {config.data.tokenizer!r} is not the tokenizer that model.weights = "
            f"{weights!r} was trained with, so its ids mean other text; leave data.tokenizer out"
        )


def start_from_weights(config: Config, model: Transformer) -> None:
    """Copy the weights of the run in `model.weights`, if set, into a new model, or its shards into a part.

    Raises:
        UserError: that run has a different model.
    """
    if not (run := config.model.weights):
        return
    weights = open_run(Path(run), "cpu").weights()
    with torch.device("meta"):
        full_model = Transformer(config.spec.model)
    shapes = {name: p.shape for name, p in full_model.named_parameters(remove_duplicate=False)}
    for name in sorted(shapes.keys() | weights.keys()):
        shape = tuple(weights[name].shape) if name in weights else "nothing"
        needed = tuple(shapes[name]) if name in shapes else "nothing"
        if shape != needed:
            raise UserError(
                f"model.weights = {run!r} is another model: {name} is {shape} there and "
                f"{needed} here; leave the dimensions out to take them from it"
            )
    for name, parameter in model.named_parameters(remove_duplicate=False):
        shard = shard_of(parameter)
        write_weight(parameter, weights[name] if shard is None else shard.local_of(weights[name]))
