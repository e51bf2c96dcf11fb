"""The runs whose digits are kept, and how they are compared: exactly, or within what other CPUs explain."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import narrowgauge as ng
from golden.runs import Cell, Worker, digits_of

HERE = Path(__file__).parent
DIGITS, BOUNDS = HERE / "digits.json", HERE / "bounds.json"
# A bound is so many times the largest change that other arithmetic was seen to make (`make.py bounds`): five
# kinds of it were seen, and which codes a last bit tips over is chance. None is below FLOOR, a few last bits.
MARGIN, FLOOR = 4, 1e-5


@dataclass(frozen=True)
class Run:
    """One run: a recipe on a grid of processes, with some keys changed."""

    recipe: str
    world: int = 1
    changes: Mapping[str, Any] = field(default_factory=dict)
    products: str = "fp32"


GRIDS: dict[str, tuple[int, dict[str, Any]]] = {
    "alone": (1, {}),
    "replicate 2": (2, {"parallel.replicate": 2}),
    "shard 2": (2, {"parallel.shard": 2}),
    "shard 2 zero 2": (2, {"parallel.shard": 2, "parallel.zero": 2}),
    "shard 2 zero 1": (2, {"parallel.shard": 2, "parallel.zero": 1}),
    "tensor 2": (2, {"parallel.tensor": 2}),
    "context 2": (2, {"parallel.context": 2}),
    "pipeline 2": (2, {"parallel.pipeline": 2}),
    "shard 2 tensor 2": (4, {"parallel.shard": 2, "parallel.tensor": 2}),
}
SHARED_OUT = ("bf16", "fp8", "nvfp4", "msamp-o3")
# Several micro-batches on each process.
SMALL = {"training.steps": 3, "training.batch_size": 4, "training.micro_batch_size": 1}


def all_runs() -> dict[str, Run]:
    """By name: each recipe by itself, some where a CPU multiplies bf16, some on grids."""
    runs = {name: Run(name) for name in ng.recipe_names()}
    runs |= {f"{name}, bf16 products": Run(name, products="bf16") for name in ("bf16", "fp8", "nvfp4")}
    return runs


RUNS = all_runs()


def take(worker: Worker, run: Run, products: str | None = None) -> Cell:
    """The digits of a run, taken now; `products` are the run's own, or other ones."""
    values = worker.values(run.recipe, run.changes)
    return digits_of(worker.train(values, run.world, run.products if products is None else products))


def read(file: Path) -> dict[str, Any]:
    """What a golden file holds."""
    kept: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return kept


def same(kept: Cell, now: Cell) -> Iterator[str]:
    """What differs in any digit, in sentences."""
    for key in ("loss and grad_norm", "val_loss"):
        for i, (a, b) in enumerate(zip(kept[key], now[key], strict=True), 1):
            if a != b:
                yield f"{key} of line {i}: {_readable(a)} was kept, {_readable(b)} is now"
    yield from _state(kept["state"], now["state"], lambda tensor: tensor)


def near(kept: Cell, now: Cell, bounds: Mapping[str, float]) -> Iterator[str]:
    """What differs by more than its bound, or in the names of the state's tensors, in sentences."""
    for figure, change in changes(kept, now).items():
        if not change <= bounds[figure]:
            yield f"{figure} is off by {change:.2g}; another CPU explains {bounds[figure]:.2g}"
    yield from _state(kept["state"], now["state"], lambda tensor: tensor.partition("=")[0])


def changes(kept: Cell, now: Cell) -> dict[str, float]:
    """By how much losses and norms differ at most, as a share of what was kept.

    Those of the first step, which comes from equal weights, are apart: a code that the last bit of a sum tips
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


def _state(kept: Mapping[str, str], now: Mapping[str, str], key: Callable[[str], str]) -> Iterator[str]:
    """The first tensor that differs, and how many do."""
    flat = [
        {f"{owner} {key(tensor)}" for owner, tensors in state.items() for tensor in tensors.split()}
        for state in (kept, now)
    ]
    other = sorted(flat[1] - flat[0])
    gone = sorted(flat[0] - flat[1])
    if other:
        yield f"of {len(flat[1])} tensors {len(other)} are not as they were kept; the first is {other[0]}"
    if gone and len(gone) != len(other):
        yield f"{len(gone)} that were kept are not there or differ; the first is {gone[0]}"
