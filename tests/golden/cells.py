"""The runs whose digits are kept, and how they are compared.

Twelve recipes, which together have every property of a recipe (`support.covering.properties_of`), train four
models in arithmetic that is the same on every CPU (`exact`). The other runs use the arithmetic of training,
and are compared digit for digit where the machine has that of the kept ones.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import narrowgauge as ng
from golden.runs import Cell, Worker, digits_of


@dataclass(frozen=True)
class Run:
    """One run: a recipe on a grid of processes, with some keys changed."""

    recipe: str
    world: int = 1
    changes: Mapping[str, Any] = field(default_factory=dict)
    products: str = "fp32"


RECIPES = (
    *("bf16", "bf16-sr", "fp8-delayed", "fp8-attention", "msamp-o3", "mxfp8", "fp4", "nvfp4", "averis"),
    *("fp4-ue5m3", "quartet2", "tetrajet2-outliers"),
)
LIKE_GPT2 = {
    "model.ffn_dim": 512,
    "model.positions": "learned",
    "model.norm": "layer",
    "model.mlp": "gelu",
    "model.bias": True,
    "model.tied_head": True,
    "model.kv_heads": 4,
    "model.max_sequence_length": 64,
}
MODELS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "GPT-2": LIKE_GPT2,
    "experts": {"model.experts": 4, "model.ffn_dim": 128},
    "narrow attention": {f"recipe.attention.{tensor}": "e4m3" for tensor in ("q", "k", "v", "p", "do", "ds")},
}
# With 1 - beta a power of two no tenth of a whole number lies halfway between two others.
EXACTLY = {"training.steps": 3, "optimizer.betas": (0.875, 0.9375)}

# How many processes, and the keys. Those that share out a batch have two micro-batches each, as others do.
GRIDS: dict[str, tuple[int, dict[str, Any]]] = {
    "replicate 2": (2, {"parallel.replicate": 2, "training.batch_size": 4}),
    "shard 2": (2, {"parallel.shard": 2, "training.batch_size": 4}),
    "shard 2, zero 2": (2, {"parallel.shard": 2, "parallel.zero": 2, "training.batch_size": 4}),
    "shard 2, zero 1": (2, {"parallel.shard": 2, "parallel.zero": 1, "training.batch_size": 4}),
    "tensor 2": (2, {"parallel.tensor": 2}),
    "context 2": (2, {"parallel.context": 2}),
    "pipeline 2": (2, {"parallel.pipeline": 2}),
    "shard 2, tensor 2": (4, {"parallel.shard": 2, "parallel.tensor": 2, "training.batch_size": 4}),
}
SHARED_OUT = ("bf16", "fp8", "nvfp4", "msamp-o3")
FEW = {"training.steps": 2, "training.batch_size": 2, "training.micro_batch_size": 1}


def all_runs() -> dict[str, Run]:
    """By name: recipes on four models, each by itself, some where a CPU multiplies bf16, some on grids."""
    runs = {
        f"{name} on {model}": Run(name, 1, EXACTLY | keys, "fp64")
        for model, keys in MODELS.items()
        for name in RECIPES
    }
    runs |= {name: Run(name) for name in ng.recipe_names()}
    steps = {"training.steps": 3}  # torch's own matmuls of bf16 are slow
    runs |= {f"{name}, bf16 products": Run(name, 1, steps, "bf16") for name in ("bf16", "fp8", "nvfp4")}
    gauges = {"gauges.every": 2}
    runs |= {f"{name}, 2 micro-batches": Run(name, 1, FEW | gauges) for name in SHARED_OUT}
    on_grids = ((grid, name, *GRIDS[grid]) for grid in GRIDS for name in SHARED_OUT)
    return runs | {f"{name}, {grid}": Run(name, n, FEW | keys) for grid, name, n, keys in on_grids}


RUNS = all_runs()
# Each recipe on one of the models, each recipe that shares out a batch on some grids.
THOROUGH = (
    *(f"{name} on {list(MODELS)[i % len(MODELS)]}" for i, name in enumerate(RECIPES)),
    *(f"{name}, 2 micro-batches" for name in ("nvfp4", "msamp-o3")),
    *(f"{SHARED_OUT[i % len(SHARED_OUT)]}, {grid}" for i, grid in enumerate(GRIDS) if i in (1, 3, 5)),
)


def run_of(worker: Worker, name: str) -> Path:
    """The directory of a run by name."""
    run = RUNS[name]
    return worker.train(name, worker.values(run.recipe, run.changes), run.world, run.products)


def take(worker: Worker, name: str) -> Cell:
    """The digits of a run, taken now."""
    return digits_of(run_of(worker, name))
