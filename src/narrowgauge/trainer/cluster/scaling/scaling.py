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
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from narrowgauge.distributed import ParallelDims
from narrowgauge.nn.self_test import verified_backend
from narrowgauge.system.errors import UserError
from narrowgauge.system.files import make_directory, write_whole
from narrowgauge.system.units import human_bytes, human_count, human_duration
from narrowgauge.trainer.cluster.scaling.statistics import (
    Row,
    against,
    bandwidth,
    compared,
    of_rounds,
    processes,
    verdict,
    warnings,
)
from narrowgauge.trainer.cluster.scaling.worker import WARMUP_STEPS, on_processes
from narrowgauge.trainer.data import open_data
from narrowgauge.trainer.data.preparation.workers import usable_cores
from narrowgauge.trainer.distributed.launch.world import processes_started
from narrowgauge.trainer.models import count_parameters
from narrowgauge.trainer.runs import choose_device, lay_out
from narrowgauge.trainer.runs.loop.resolve import check_data
from narrowgauge.trainer.runs.monitor.machine import device_name
from narrowgauge.trainer.training import Config

FILE = "scaling.json"
_TITLES = {"strong": "strong: the same batch in all", "weak": "weak: the same batch for each process"}


def as_json(found: Mapping[str, Any]) -> str:
    """The text of scaling.json."""
    return json.dumps({**found, "rows": [row.as_json() for row in found["rows"]]}, indent=2) + "\n"


def scaling(
    config: Config, sizes: Sequence[int], seconds: float, rounds: int, out: Path, console: Console
) -> dict[str, Any]:
    """Measure a configuration on each number of processes, and write OUT/scaling.json.

    The result has the keys of the file: facts of the model and the machine, the measured rows (`Row`), those
    of the all-reduce (bytes, milliseconds and bytes/s), and sentences about them.

    The configuration's `batch_size` is the total (strong) or per process (weak). `sizes` ascend. `seconds`
    are measured for each number and mode, without start and warm-up; the rounds share them.
    """
    refuse_several(os.environ)
    device = choose_device(config.training.device)
    _check_gpus(sizes, device)
    plans = {size: _plans(config, size) for size in sizes}
    backend = verified_backend(config.spec.recipe, device, config.spec.backend)
    try:
        make_directory(out)
    except OSError as error:
        raise UserError(f"{out} cannot be written: {error.strerror}; name another with --out") from None
    console.print("preparing the data", highlight=False)
    check_data(config, open_data(config.data.source, config.data.tokenizer, config.data.weights))
    rows, reduced = _rows(plans, seconds, rounds, console)
    cores, on_cpu = usable_cores(), device.type == "cpu"
    same_cores = on_cpu and len({min(cores, row.processes * row.threads) for row in rows}) == 1
    found = {
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
        "rows": rows,
        "all_reduce": reduced,
        "compared": compared(rows, cores, on_cpu, same_cores),
        "verdict": verdict(rows, same_cores),
        "warnings": warnings(rows, cores, on_cpu),
    }
    write_whole(out / FILE, as_json(found))
    return found


def _rows(
    plans: dict[int, dict[str, Config]], seconds: float, rounds: int, console: Console
) -> tuple[list[Row], list[dict[str, float]]]:
    """Measure every number of processes in both modes, and the bandwidths of its all-reduce."""
    found: dict[int, list[dict[str, Any]]] = {size: [] for size in plans}
    turns = [(number, size) for number in range(1, rounds + 1) for size in plans]
    began = time.monotonic()
    for done, (number, size) in enumerate(turns):
        doing = f"round {number} of {rounds}: {processes(size)}, threads of each: {_threads(size)}"
        if done:
            left = (time.monotonic() - began) / done * (len(turns) - done)
            doing += f", left {human_duration(left)}"
        console.print(doing, highlight=False)
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
    reduced = [bandwidth([one["all_reduce"] for one in found[size]], size) for size in plans if size > 1]
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


def _plans(config: Config, size: int) -> dict[str, Config]:
    """The configurations for a number of processes, by mode, with micro-batches that fit.

    A single process needs only one.
    """
    dims, batch = _dims(config, size), config.training.batch_size
    parallel = config.parallel.model_copy(update={"replicate": dims.replicate, "shard": dims.shard})
    config = config.model_copy(update={"parallel": parallel})
    batches = {"strong": batch, "weak": batch * size} if size > 1 else {"strong": batch}
    return {
        mode: lay_out(config.with_training(batch_size=n, fit_micro_batch=True), size).config
        for mode, n in batches.items()
    }


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


def print_scaling(found: Mapping[str, Any], console: Console) -> None:
    """Print the figures, the verdict and the warnings."""
    say = partial(console.print, highlight=False, markup=False)
    star = "*" if found["backend"] == "emulated" else ""
    say(
        f"{found['model']}, {found['parameters']:,} parameters, recipe {found['recipe']} "
        f"({found['backend']}), sequences of {found['sequence_length']} tokens, {found['device']}"
    )
    for mode, title in _TITLES.items():
        table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
        rows = [_cells(row, star) for row in found["rows"] if row.mode == mode]
        for column in rows[0]:
            table.add_column(column, justify="right")
        for row in rows:
            table.add_row(*row.values())
        say(f"\n{title}", style="bold")
        say(table)
    say("", *_notes(found), sep="\n")
    say(found["verdict"], style="bold")
    for warning in found["warnings"]:
        say(f"WARNING {warning}", style="yellow")


def _cells(row: Row, star: str) -> dict[str, str]:
    """The cells of a row by column."""
    step, low, high = (
        f"{ms:.{0 if ms >= 100 else 1}f}" for ms in (row.step_ms, min(row.round_ms), max(row.round_ms))
    )
    return {
        "procs": str(row.processes),
        "batch": f"{row.batch_size // row.micro_batch_size} x {row.micro_batch_size}",
        "step, ms": step,
        "rounds": f"{low}-{high}",
        "tokens/s": f"{human_count(row.tokens_per_s)}{star}",
        "speed-up": f"{row.speed_up:.2f}x",
        "efficiency": f"{row.efficiency:.0%}",
        "communication": f"{row.communication:.0%}",
    }


def _notes(found: Mapping[str, Any]) -> list[str]:
    notes = [
        "batch: micro-batches of all processes x sequences of each; communication: the share of a step in "
        "which a process waits for the others, excluding what overlaps with computation",
        found["compared"],
    ]
    if found["backend"] == "emulated":
        notes.append("* emulated arithmetic: not the speed of the format in hardware")
    for one in found["all_reduce"]:
        notes.append(
            f"all-reduce of {human_bytes(one['bytes'])} over {one['processes']:.0f} processes: "
            f"{one['ms']:.1f} ms, "
            f"{one['algorithm_bandwidth'] / 1e9:.2f} GB/s (bus {one['bus_bandwidth'] / 1e9:.2f} GB/s)"
        )
    fewest, *others = (row for row in found["rows"] if row.mode == "weak")
    for row in others:
        when, tokens = "at no batch", row.break_even_tokens
        if tokens is not None:
            about = f"from about {human_count(tokens)} tokens a process and step on"
            when = about if tokens >= 1 else "at any batch"
        notes.append(f"estimate: {row.processes} processes become faster than {fewest.processes} {when}")
    return notes
