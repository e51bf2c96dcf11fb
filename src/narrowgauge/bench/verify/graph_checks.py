"""Graphs: trains small models and a wide one from recorded launches and one by one, and compares every bit.

If all agree, runs on this machine record their micro-batches from then on (`training.graph = "auto"`).
"""

from functools import partial

import torch

from narrowgauge.bench.verify.check import Check, Tensors, same
from narrowgauge.bench.verify.determinism_checks import strictly
from narrowgauge.bench.verify.loss_checks import small_config
from narrowgauge.bench.worker import random_batches
from narrowgauge.training import Config
from narrowgauge.training.step.trainer import Trainer

GROUP = "graphs"
RECIPES = ("bf16", "fp8", "fp8-delayed", "nvfp4")
DO = "leave training.graph out: runs here then record no graphs; please report it with this file"
_STEPS = 4  # one warms up, the second is recorded
_WIDE = {"name": "qwen2.5-1.5b", "layers": 2, "vocab_size": 4096}


def graph_checks(device: torch.device) -> list[Check]:
    """The checks of a device."""
    lacks = "" if device.type == "cuda" else "graphs are recorded on a GPU"
    configs = {f"a small model under {name}": small_config(name, "auto", False) for name in RECIPES}
    configs["a wide model under fp8"] = _wide(configs["a small model under fp8"])
    return [Check(GROUP, name, partial(_agree, config), DO, lacks) for name, config in configs.items()]


def _wide(config: Config) -> Config:
    """Two layers at the width of Qwen2.5-1.5B, as many tokens as its matrices need to be filled."""
    data = config.data.model_copy(update={"sequence_length": 1024})
    return config.model_copy(update={"model": type(config.model)(**_WIDE), "data": data})


def _agree(config: Config, device: torch.device) -> str:
    with strictly(device):
        found, expected = (_trained(config, device, graph) for graph in (True, False))
    return f"{_STEPS} steps, {same(found, expected)}"


def _trained(config: Config, device: torch.device, graph: bool) -> Tensors:
    """The weights and the losses after a few steps."""
    training = config.training.model_copy(update={"graph": graph})
    plan = config.model_copy(update={"training": training}).plan
    trainer, batches = Trainer.begin(plan, device), random_batches(config, device)
    losses = [trainer.train_step(iter(batches))[:2] for _ in range(_STEPS)]
    weights = {name: p.detach().cpu() for name, p in trainer.model.named_parameters()}
    return {"losses and norms": torch.tensor(losses, dtype=torch.float64)} | weights
