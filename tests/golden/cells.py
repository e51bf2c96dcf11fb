"""The runs whose digits are kept, and how they are compared: exactly, or within what other CPUs explain."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import narrowgauge as ng
from golden.runs import Cell, Worker, digits_of

# A bound is a multiple of the largest change that other arithmetic was seen to make (`make.py bounds`): five
# kinds of it were seen, and which codes a last bit tips over is chance. None is below FLOOR, a few last bits.
MARGIN, FLOOR = 4, 1e-5


@dataclass(frozen=True)
class Run:
    """One run: a recipe on a grid of processes, with some keys changed."""

    recipe: str
    world: int = 1
    changes: Mapping[str, Any] = field(default_factory=dict)
    products: str = "fp32"


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
    """By name: each recipe by itself, some where a CPU multiplies bf16, some on grids."""
    runs = {name: Run(name) for name in ng.recipe_names()}
    steps = {"training.steps": 3}  # torch's own matmuls of bf16 are slow
    runs |= {f"{name}, bf16 products": Run(name, 1, steps, "bf16") for name in ("bf16", "fp8", "nvfp4")}
    gauges = {"gauges.every": 2}
    runs |= {f"{name}, 2 micro-batches": Run(name, 1, FEW | gauges) for name in SHARED_OUT}
    for grid, (world, keys) in GRIDS.items():
        for name in SHARED_OUT:
            runs[f"{name}, {grid}"] = Run(name, world, FEW | keys)
    return runs


RUNS = all_runs()


def run_of(worker: Worker, name: str, products: str | None = None) -> Path:
    """The directory of a run by name; `products` are the run's own, or other ones."""
    run = RUNS[name]
    values = worker.values(run.recipe, run.changes)
    return worker.train(name, values, run.world, run.products if products is None else products)


def take(worker: Worker, name: str, products: str | None = None) -> Cell:
    """The digits of a run, taken now."""
    return digits_of(run_of(worker, name, products))


def same(kept: Cell, now: Cell) -> Iterator[str]:
    """What differs in any digit, in sentences."""
    for key in ("loss and grad_norm", "val_loss"):
        pairs = list(zip(kept[key], now[key], strict=True))
        other = [i for i, (a, b) in enumerate(pairs) if a != b]
        if other:
            first, (a, b) = other[0] + 1, map(_readable, pairs[other[0]])
            yield f"{key}: {len(other)} of {len(pairs)} differ, first number {first}: kept {a}, now {b}"
    yield from _parts(kept, now, lambda part: part)


def near(kept: Cell, now: Cell, bounds: Mapping[str, float]) -> Iterator[str]:
    """What differs by more than its bound, or in the names of the state's tensors, in sentences."""
    for figure, change in changes(kept, now).items():
        if not change <= bounds[figure]:
            yield f"{figure} is off by {change:.2g}; another CPU explains {bounds[figure]:.2g}"
    yield from _parts(kept, now, lambda part: part.partition("=")[0])


def changes(kept: Cell, now: Cell) -> dict[str, float]:
    """By how much losses and norms differ at most, as a share of what was kept.

    The first step, which comes from equal weights, is kept apart: a code that the last bit of a sum tips
    over makes other weights, and what comes of them grows with every step.
    """
    steps = list(zip(_numbers(kept["loss and grad_norm"]), _numbers(now["loss and grad_norm"]), strict=True))
    val = list(zip(_numbers(kept["val_loss"]), _numbers(now["val_loss"]), strict=True))
    losses, norms = ([(a[i], b[i]) for a, b in steps] for i in (0, 1))
    return {
        "first loss": _apart([losses[0], *((a[0], b[0]) for a, b in val[:1])]),
        "first grad_norm": _apart(norms[:1]),
        "loss": _apart([*losses, *((a[0], b[0]) for a, b in val)]),
        "grad_norm": _apart(norms),
    }


def _apart(pairs: list[tuple[float, float]]) -> float:
    return max(abs(a - b) / abs(a) for a, b in pairs)


def _numbers(lines: list[str]) -> list[list[float]]:
    return [[float.fromhex(word) for word in line.split()] for line in lines]


def _readable(line: str) -> str:
    return f"{line} ({' '.join(f'{float.fromhex(word):.9g}' for word in line.split())})"


def _parts(kept: Cell, now: Cell, key: Callable[[str], str]) -> Iterator[str]:
    """The first tensor, and the first reading of a gauge, that differs, and how many do."""
    for what, one in (("state", "tensors"), ("gauges", "readings")):
        there, here = (
            {f"{owner} {key(part)}" for owner, parts in cell.get(what, {}).items() for part in parts.split()}
            for cell in (kept, now)
        )
        if other := sorted(here - there):
            yield f"of {len(here)} {one} {len(other)} are not as they were kept; the first is {other[0]}"
        if len(gone := sorted(there - here)) > len(other):
            yield f"of {len(there)} {one} {len(gone)} were kept and are not there; the first is {gone[0]}"
