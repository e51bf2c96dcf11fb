"""Measures scaling: the same training on 1..N processes of this machine, for some seconds each.

In each round, real processes start for each number in turn, so that all numbers share what the machine does
meanwhile. Each process takes timed steps of ordinary training (`worker`), once with the configuration's batch
as the total (strong scaling) and once with that batch per process (weak scaling). `statistics` computes the
figures.

The mesh is that of [parallel], except for its size: `replicate` grows if it exceeds 1, else `shard`.
"""

import json
import os
import re
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from narrowgauge.distributed import ParallelDims
from narrowgauge.nn.self_test import verified_backend
from narrowgauge.system.errors import UserError
from narrowgauge.system.files import make_directory, write_whole
from narrowgauge.system.units import human_duration
from narrowgauge.trainer.cluster.scaling.statistics import (
    Row,
    against,
    bandwidth,
    compared,
    have_same_cores,
    of_rounds,
    processes,
    verdict,
    warnings,
)
from narrowgauge.trainer.cluster.scaling.worker import WARMUP_STEPS, on_processes
from narrowgauge.trainer.data import open_data
from narrowgauge.trainer.data.preparation.worker_pool import usable_cores
from narrowgauge.trainer.distributed.launch.world import processes_started
from narrowgauge.trainer.models import count_parameters
from narrowgauge.trainer.runs import choose_device, lay_out
from narrowgauge.trainer.runs.loop.resolve import check_data
from narrowgauge.trainer.runs.monitor.hardware import device_name
from narrowgauge.trainer.training import Config

FILE = "scaling.json"


@dataclass(frozen=True)
class Scaling:
    """The result of a measurement; `facts` describes the model and the machine."""

    facts: dict[str, Any]
    rows: Sequence[Row]
    all_reduce: Sequence[dict[str, float]]  # milliseconds, bytes a second
    compared: str
    verdict: str
    warnings: Sequence[str]

    def as_json(self) -> str:
        """The text of scaling.json."""
        rest = {**vars(self), "rows": [row.as_json() for row in self.rows]}
        return json.dumps(rest.pop("facts") | rest, indent=2) + "\n"


def scaling(
    config: Config, sizes: Sequence[int], seconds: float, rounds: int, out: Path, console: Console
) -> Scaling:
    """Measure a configuration on each number of processes, and write OUT/scaling.json.

    The configuration's `batch_size` is the total (strong) or per process (weak). `sizes` ascend. `seconds`
    are measured for each number and mode, without start and warm-up; the rounds share them.
    """
    refuse_several(os.environ)
    device = choose_device(config.training.device)
    _check_gpus(sizes, device)
    plans = {size: _plans(config, size, is_first=size == sizes[0]) for size in sizes}
    backend = verified_backend(config.spec.recipe, device, config.spec.backend)
    try:
        make_directory(out)
    except OSError as error:
        raise UserError(f"{out} cannot be written: {error.strerror}; name another with --out") from None
    console.print("preparing the data", highlight=False)
    check_data(config, open_data(config.data.source, config.data.tokenizer, config.data.weights))
    rows, reduced = _rows(plans, seconds, rounds, console)
    cores, on_cpu = usable_cores(), device.type == "cpu"
    facts = {
        "model": config.model.name,
        "parameters": count_parameters(config.spec.model),
        "recipe": config.spec.recipe.name,
        "backend": backend.name,
        "sequence_length": config.data.sequence_length,
        "parallel": {size: asdict(_dims(config, size)) for size in sizes},
        "device": "CPU" if on_cpu else device_name(device),
        "torch": torch.__version__,
        "cores": cores,
        "seconds": seconds,
        "rounds": rounds,
        "warmup_steps": WARMUP_STEPS,
    }
    result = Scaling(
        facts,
        rows,
        reduced,
        compared(rows, cores, on_cpu),
        verdict(rows, same_cores=on_cpu and have_same_cores(rows, cores)),
        warnings(rows, cores, on_cpu),
    )
    write_whole(out / FILE, result.as_json())
    return result


def _rows(
    plans: dict[int, dict[str, Config]], seconds: float, rounds: int, console: Console
) -> tuple[list[Row], list[dict[str, float]]]:
    """Measure every number of processes in both modes, and the bandwidths of its all-reduce."""
    found: dict[int, list[dict[str, Any]]] = {size: [] for size in plans}
    turns = [(number, size) for number in range(1, rounds + 1) for size in plans]
    began = time.monotonic()
    for done, (number, size) in enumerate(turns):
        left = (time.monotonic() - began) / done * (len(turns) - done) if done else 0.0
        console.print(
            f"round {number} of {rounds}: {processes(size)}, threads of each: {_threads(size)}"
            + (f", left {human_duration(left)}" if done else ""),
            highlight=False,
        )
        found[size].append(on_processes(size, plans[size], _threads(size), seconds / rounds))
    rows: list[Row] = []
    for size, modes in plans.items():
        for mode in ("strong", "weak"):
            name = mode if mode in modes else "strong"  # with one process both modes are the same
            t = modes[name].training
            rows.append(
                Row(
                    *(mode, size, _threads(size), t.batch_size, t.micro_batch_size),
                    tokens_a_step=modes[name].tokens_per_step,
                    **of_rounds([one[name] for one in found[size]], size),
                )
            )
    weak = {row.processes: row for row in rows if row.mode == "weak"}
    reduced = []
    for size in (size for size in plans if size > 1):
        rounds_of = [one["all_reduce"] for one in found[size]]
        median = statistics.median(one["seconds"] for one in rounds_of)
        reduced.append(bandwidth(rounds_of[0] | {"seconds": median}, size))
    return [against(row, next(r for r in rows if r.mode == row.mode), weak) for row in rows], reduced


def read_sizes(text: str) -> list[int]:
    """Parse numbers of processes such as "1,2,4": ascending, and at least 1."""
    sizes = [int(word) for word in text.split(",")] if re.fullmatch(r"\d{1,6}(,\d{1,6})*", text) else []
    if not sizes or sizes[0] < 1 or sorted(set(sizes)) != sizes:
        raise UserError(
            f"--procs {text!r}: numbers of processes are whole and ascending with commas between, as in 1,2,4"
        )
    return sizes


def refuse_several(environ: Mapping[str, str]) -> None:
    """Check that no launcher started several processes; the shell of a Slurm batch script counts as one."""
    launcher, size = processes_started(environ)
    is_batch_shell = launcher == "srun" and not environ.get("SLURM_STEP_ID")
    if environ.get("WORLD_SIZE", "1") != "1" or (size > 1 and not is_batch_shell):
        raise UserError("scaling starts its own processes; start it once, without torchrun, srun or mpirun")


def _check_gpus(sizes: Sequence[int], device: torch.device) -> None:
    if device.type == "cuda" and sizes[-1] > torch.cuda.device_count():
        raise UserError(
            f"--procs asks for {sizes[-1]} processes with a GPU each, and torch sees "
            f"{torch.cuda.device_count()} GPU(s) here; ask for fewer, or measure with --device cpu"
        )


def _plans(config: Config, size: int, is_first: bool) -> dict[str, Config]:
    """The configurations for a number of processes, by mode; a single first process needs only one."""
    plans = {"strong": _sized(config, size, config.training.batch_size)}
    if size > 1 or not is_first:
        plans["weak"] = _sized(config, size, config.training.batch_size * size)
    return plans


def _sized(config: Config, size: int, batch: int) -> Config:
    """The configuration for `size` processes and `batch` sequences a step, with fitting micro-batches."""
    dims = _dims(config, size)
    parallel = config.parallel.model_copy(update={"replicate": dims.replicate, "shard": dims.shard})
    config = config.with_training(batch_size=batch, fit_micro_batch=True)
    return lay_out(config.model_copy(update={"parallel": parallel}), size).config


def _dims(config: Config, size: int) -> ParallelDims:
    """The dimensions of [parallel], with `replicate` or `shard` grown to a total of `size` processes."""
    p = config.parallel
    parallel_dims = ParallelDims(**p.model_dump() | {"shard": max(1, p.shard)})
    axis = "replicate" if parallel_dims.replicate > 1 else "shard"
    parallel_dims = replace(parallel_dims, **{axis: 1})
    if size % parallel_dims.size:
        raise UserError(
            f"--procs {size} is not a multiple of the {parallel_dims.size} processes that [parallel] sets "
            f"without {axis}; name multiples of {parallel_dims.size}"
        )
    return replace(parallel_dims, **{axis: size // parallel_dims.size})


def _threads(size: int) -> int:
    """Threads per process: OMP_NUM_THREADS if set, else an equal share of the cores."""
    setting = os.environ.get("OMP_NUM_THREADS", "")
    return int(setting) if setting.isdigit() and int(setting) else max(1, usable_cores() // size)
