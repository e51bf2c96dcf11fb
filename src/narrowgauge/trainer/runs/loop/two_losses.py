"""Two losses of one set of weights: with the run's forward pass, and with that of another recipe.

A low-precision forward pass can raise a loss in two ways: it adds noise to the measured loss, and it led the
training to worse weights. The second loss, usually in bf16, shows the effect of the weights alone. Both are
means over the same held-out batches, so their difference is paired.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from narrowgauge.system.files import write_whole
from narrowgauge.system.json_lines import strict_json
from narrowgauge.trainer.data import Mixture
from narrowgauge.trainer.distributed import Engine
from narrowgauge.trainer.models import Transformer
from narrowgauge.trainer.runs.loop.validation import validation_loss
from narrowgauge.trainer.runs.run_directory import EVALUATION
from narrowgauge.trainer.runs.use.branch import with_recipe
from narrowgauge.trainer.runs.use.trained_model import TrainedRun
from narrowgauge.trainer.training.step.build_model import build_model


@torch.no_grad()
def under_recipe(trained: TrainedRun, recipe: str) -> Transformer:
    """A copy of a run's model that computes with another recipe, its weights read as float32."""
    device = next(trained.model.parameters()).device
    model = build_model(with_recipe(trained.config, recipe).spec, device)
    weights = trained.weights()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        parameter.copy_(weights[name])
    return model.eval()


def two_losses(
    trained: TrainedRun, recipe: str, held_out: Mixture, length: int, batches: int | None
) -> dict[str, float]:
    """The losses in nats per token: `own`, and one under the recipe's name.

    Args:
        trained: The run.
        recipe: The recipe of the other forward pass, such as "bf16".
        held_out: The held-out tokens, in sequences of `length` tokens.
        batches: The number of the run's micro-batches, spread evenly over the tokens; None for all.
    """
    c = trained.config
    sequences = trained.held_out_sequences(batches)
    windows = (c.training.micro_batch_size, length, None, c.data.separate_documents, sequences)
    own = validation_loss(Engine.alone(trained.model), trained.go_to_sample, held_out, *windows).mean
    if trained.config.recipe.name == recipe and not trained.config.recipe.places:
        return {"own": own, recipe: own}
    under = replace(trained, config=with_recipe(c, recipe), model=under_recipe(trained, recipe))
    other = validation_loss(Engine.alone(under.model), under.go_to_sample, held_out, *windows).mean
    return {"own": own, recipe: other}


def keep_losses(run: Path, step: int, losses: Mapping[str, float], asked: Mapping[str, Any]) -> None:
    """Write RUN/evaluation.json with the request and the losses, unless the model is another program's.

    A loss that is not finite is null there.
    """
    if (run / "config.toml").is_file():
        write_whole(run / EVALUATION, json.dumps(strict_json({"step": step, **losses, **asked})) + "\n")
