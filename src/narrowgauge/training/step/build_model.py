"""Builds a run's model on one process, and restores it from a checkpoint."""

from pathlib import Path

import torch

from narrowgauge.checkpoint import Checkpoint, load, newest_valid
from narrowgauge.distributed import ModelSpec
from narrowgauge.errors import UserError
from narrowgauge.guard.raises import raises_of
from narrowgauge.models import Transformer, initialize
from narrowgauge.nn import DTYPES, apply_recipe, recipe_tensors, set_step
from narrowgauge.quantization import stored_tensor
from narrowgauge.training.plan import TrainingPlan


def build_model(spec: ModelSpec, device: torch.device) -> Transformer:
    """The model of one process under its recipe, with its initial weights, on a device."""
    with torch.device("meta" if device.type == "meta" else "cpu"):
        model = Transformer(spec.model, DTYPES[spec.recipe.compute])
    if device.type != "meta":
        initialize(model, spec.seed)
    spec.set_options(model)
    model.to(device)
    apply_recipe(model, spec.recipe, spec.backend)
    return model


def go_to(model: torch.nn.Module, plan: TrainingPlan, step: int, first_sample: int) -> None:
    """Set the position of a run's model (`nn.set_step`)."""
    set_step(model, plan.spec.seed_of_rounding, step, first_sample, plan.steps, plan.decay_start)


def model_of(
    plan: TrainingPlan, checkpoint: Checkpoint, device: torch.device
) -> tuple[TrainingPlan, Transformer]:
    """The full model of a checkpoint on one process, and the plan in effect there."""
    plan = plan.in_force(raises_of(checkpoint.state), checkpoint.step)
    model = build_model(plan.spec, device)
    load_model(model, plan, checkpoint)
    return plan, model.eval()


def load_model(model: torch.nn.Module, plan: TrainingPlan, checkpoint: Checkpoint) -> None:
    """Restore a model from a checkpoint: its weights and the state of its recipe."""
    load_weights(model, checkpoint)
    go_to(model, plan, checkpoint.step, 0)
    saved = checkpoint.tensors.get("recipe", {})
    for name, tensor in recipe_tensors(model).items():
        if name not in saved or saved[name].shape != tensor.shape:
            raise UserError(
                f"the checkpoint of step {checkpoint.step} is of another recipe: it has no {name} as this "
                "one keeps it; use its own, or `train --branch` to continue under another"
            )
        tensor.copy_(saved[name])


@torch.no_grad()
def load_weights(model: torch.nn.Module, checkpoint: Checkpoint) -> None:
    """Copy a checkpoint's weights into a model.

    Raises:
        UserError: the checkpoint belongs to another model; the message names the first difference.
    """
    weights = checkpoint.tensors["model"]
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, parameter in parameters.items():
        if name not in weights or weights[name].shape != parameter.shape:
            found = tuple(weights[name].shape) if name in weights else "nothing"
            raise UserError(
                f"the checkpoint of step {checkpoint.step} is another model's: {name} should be "
                f"{tuple(parameter.shape)}, and it holds {found}; use the configuration it was made with"
            )
        stored = stored_tensor(parameter)
        if weights[name].dtype != stored.dtype:
            raise UserError(
                f"the checkpoint of step {checkpoint.step} stores {name} as {weights[name].dtype}, and this "
                f"recipe as {stored.dtype}; use the recipe it was made with"
            )
        stored.copy_(weights[name])
    if extra := weights.keys() - parameters.keys():
        raise UserError(
            f"the checkpoint of step {checkpoint.step} is another model's: this one has no {min(extra)}; "
            "use the configuration it was made with"
        )


def newest_checkpoint(checkpoints: Path, run_id: str | None) -> tuple[Checkpoint | None, list[str]]:
    """The newest valid checkpoint, if any, and a sentence for each newer one that was refused."""
    path, refused = newest_valid(checkpoints, run_id)
    return (None if path is None else load(path)), refused
