"""Builds a run's model and optimizer on one process, and restores the model from a checkpoint.

Whether a run repeats recorded micro-batches is chosen here as well (`training.graph`):

    true    always, or the run is refused with the reason (`graph_gap`)
    false   never
    auto    where `make gpu` has found that recorded steps have the digits of usual ones: on this machine
            and device, with these versions of torch, CUDA, cuDNN and Triton, and with these sources of this
            program, whatever its version. It notes that in the cache (`files.cache_entry`). Nowhere
            else, silently
"""

import platform
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from narrowgauge.guard.raises import raises_of
from narrowgauge.nn import DTYPES, apply_recipe, outline_of, recipe_tensors, set_step
from narrowgauge.nn.step_state import require_same_tensors
from narrowgauge.optim import AdamW, Muon, Optimizer, parameter_groups
from narrowgauge.quantization import ensure_state, stored_tensor
from narrowgauge.quantization.state.parameter_state import is_large
from narrowgauge.recipes import Recipe, resolve
from narrowgauge.system.errors import UserError
from narrowgauge.system.files import cache_entry, package_digest, write_cached
from narrowgauge.system.operating_system import triton_version
from narrowgauge.trainer.checkpoint import Checkpoint
from narrowgauge.trainer.distributed import Engine, ModelSpec
from narrowgauge.trainer.distributed.parallel.micro_batch_graph import CudaGraphs, graph_gap
from narrowgauge.trainer.models import Transformer, initialize
from narrowgauge.trainer.training.config.config import Config
from narrowgauge.trainer.training.config.schema import OptimizerSection


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


def go_to(model: torch.nn.Module, config: Config, step: int, first_sample: int) -> None:
    """Set the position of a run's model (`nn.set_step`)."""
    seed, steps = config.spec.rounding_seed, config.training.steps
    set_step(model, seed, step, first_sample, steps, config.decay_start)


@torch.no_grad()
def model_of(config: Config, checkpoint: Checkpoint, device: torch.device) -> tuple[Config, Transformer]:
    """The full model of a checkpoint on one process, and the configuration in effect there.

    Raises:
        UserError: the checkpoint belongs to another model or recipe; the message names the first difference.
    """
    config = config.in_force(raises_of(checkpoint.state), checkpoint.step)
    model = build_model(config.spec, device)
    weights = {n: stored_tensor(p) for n, p in model.named_parameters(remove_duplicate=False)}
    _fill(weights, checkpoint.tensors["model"])
    go_to(model, config, checkpoint.step, 0)
    of_recipe, saved = recipe_tensors(model), checkpoint.tensors.get("recipe", {})
    _fill(of_recipe, {name: saved[name] for name in of_recipe if name in saved})
    return config, model.eval()


def _fill(tensors: Mapping[str, torch.Tensor], saved: Mapping[str, torch.Tensor]) -> None:
    require_same_tensors(tensors, saved)
    for name, tensor in tensors.items():
        tensor.copy_(saved[name])


def build_optimizer(config: Config, model: torch.nn.Module) -> Optimizer:
    """The optimizer of a model before its first step."""
    o, groups, seed = config.optimizer, _groups(config.optimizer, model), config.spec.rounding_seed
    recipe = replace(config.spec.recipe, rules=())
    rules: dict[str, Callable[..., Optimizer]] = {"adamw": AdamW, "muon": partial(Muon, momentum=o.momentum)}
    optimizer = rules[o.name](groups, recipe, betas=o.betas, eps=o.eps, seed=seed)
    if any(rule.state for rule in config.spec.recipe.rules):
        _follow_rules(optimizer, config.spec.recipe, model)
    return optimizer


def _follow_rules(optimizer: Optimizer, recipe: Recipe, model: torch.nn.Module) -> None:
    """Keep moments in the formats of the recipe's rules for the module of each parameter."""
    plan = resolve(recipe, outline_of(model))
    for name, p in model.named_parameters():
        part = plan.parts[name.rpartition(".")[0]]
        for place, moment in optimizer.moments(p).items():
            if place in ("m", "v") and moment.cast != part[place] and is_large(p):
                optimizer.recast(p, place, part[place])


def number_parameters(config: Config, model: torch.nn.Module) -> None:
    """Set the index of each local parameter within the full model; its random bits depend on it."""
    with torch.device("meta"):
        full_model = Transformer(config.spec.model)
    parameters = (p for group in _groups(config.optimizer, full_model) for p in group["params"])
    indices = {p: i for i, p in enumerate(parameters)}
    of_name = {name: indices[p] for name, p in full_model.named_parameters()}
    for name, parameter in model.named_parameters():
        ensure_state(parameter).index = of_name[name]


def _groups(o: OptimizerSection, model: torch.nn.Module) -> list[dict[str, Any]]:
    return parameter_groups(model, o.weight_decay, o.groups, muon=o.name == "muon")


def require_gpu_for_graph(config: Config, device: torch.device) -> None:
    """Refuse `training.graph = true` where there is no GPU.

    Raises:
        UserError: The device has no graphs.
    """
    if config.training.graph is True and device.type == "cpu":
        raise UserError(
            "training.graph = true, but graphs are recorded on a GPU, and this run is on a CPU; leave it out "
            "to have them wherever they are known to be right"
        )


def graphs_for(config: Config, engine: Engine) -> CudaGraphs | None:
    """What records the micro-batches of a run; None if they are launched as usual.

    Raises:
        UserError: `training.graph` is true, and a graph cannot hold them.
    """
    require_gpu_for_graph(config, engine.device)
    if config.training.graph is False or engine.device.type != "cuda":
        return None
    gap = graph_gap(engine.model, engine.mesh.is_single, config.training.compile)
    if gap and config.training.graph is True:
        raise UserError(
            f"training.graph = true, but a graph cannot hold this run's micro-batches: {gap}; set "
            "--training.graph auto or false"
        )
    if gap or (config.training.graph == "auto" and not verification_file(engine.device).is_file()):
        return None
    return CudaGraphs(engine.device)


def verification_file(device: torch.device) -> Path:
    """The file that is there if `make gpu` has seen equal digits on this machine with these versions."""
    return cache_entry("graphs", *_facts(device).items())


def note_verified(device: torch.device, are_equal: bool) -> None:
    """Note for later runs whether the digits were equal; a cache that cannot be written changes nothing."""
    if are_equal:
        write_cached(verification_file(device), _facts(device))
        return
    with suppress(OSError):
        verification_file(device).unlink(missing_ok=True)


def _facts(device: torch.device) -> Mapping[str, str]:
    """What the digits of recorded and of usual launches may depend on."""
    is_gpu = device.type == "cuda"
    return {
        "machine": platform.node(),
        "device": torch.cuda.get_device_name(device) if is_gpu else device.type,
        "torch": torch.__version__,
        "library": str(torch.version.cuda or torch.version.hip),
        "cudnn": str(torch.backends.cudnn.version()) if is_gpu else "",
        "triton": triton_version(),
        "narrowgauge": package_digest(),
    }
