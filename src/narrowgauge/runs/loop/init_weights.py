"""Initial weights from another run, for fine-tuning or for training on other text.

    narrowgauge import Qwen2.5-0.5B/ --out base
    narrowgauge train --model.weights base --data my-texts/ --recipe fp8 --out tuned

The weights are copied as float32, so the two runs may have different recipes.
"""

from collections.abc import Mapping
from pathlib import Path

import torch

from narrowgauge.data import Tokenizer, load_tokenizer
from narrowgauge.errors import UserError
from narrowgauge.models import ModelConfig, Transformer
from narrowgauge.quantization import shard_of, write_weight
from narrowgauge.runs.run_directory import RunDirectory
from narrowgauge.runs.use.trained_model import open_run


def check_start(weights: str, named: str, tokenizer: Tokenizer) -> None:
    """Check that a run's tokenizer is that of the run whose weights it starts from.

    A resumed run starts from a checkpoint, so the run in `model.weights` may no longer exist.

    Args:
        weights: `model.weights`; "" for newly initialized weights.
        named: `data.tokenizer`, for the error message.
        tokenizer: The tokenizer of the data.

    Raises:
        UserError: the tokenizers differ.
    """
    if not weights:
        return
    source = RunDirectory(Path(weights)).tokenizer
    if source.is_file() and load_tokenizer(source).to_json() != tokenizer.to_json():
        raise UserError(
            f"data.tokenizer = {named!r} is not the tokenizer that model.weights = "
            f"{weights!r} was trained with, so its ids mean other text; leave data.tokenizer out"
        )


def start_from_weights(run: str, config: ModelConfig, model: Transformer) -> None:
    """Copy the weights of the run in `model.weights`, if set, into a new model.

    Raises:
        UserError: that run has a different model.
    """
    if not run:
        return
    source = open_run(Path(run), "cpu")
    weights = source.weights()
    with torch.device("meta"):
        full_model = Transformer(config)
    shapes = {name: p.shape for name, p in full_model.named_parameters(remove_duplicate=False)}
    for name in sorted(shapes.keys() | weights.keys()):
        shape = tuple(weights[name].shape) if name in weights else "nothing"
        needed = tuple(shapes[name]) if name in shapes else "nothing"
        if shape != needed:
            raise UserError(
                f"model.weights = {run!r} is another model: {name} is {shape} there and "
                f"{needed} here; leave the dimensions out to take them from it"
            )
    _copy_weights(model, weights)


def _copy_weights(model: Transformer, weights: Mapping[str, torch.Tensor]) -> None:
    """Copy the full weights, or their local shards, into a model."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        shard = shard_of(parameter)
        write_weight(parameter, weights[name] if shard is None else shard.local_of(weights[name]))
