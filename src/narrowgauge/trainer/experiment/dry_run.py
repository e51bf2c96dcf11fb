"""Estimates an experiment before it starts: runs, tokens, time. Speeds are measured on a few steps."""

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from narrowgauge.system.units import human_count, human_duration
from narrowgauge.trainer.data import open_data
from narrowgauge.trainer.experiment.design import Experiment
from narrowgauge.trainer.experiment.jobs import state_of
from narrowgauge.trainer.models import flops_per_token
from narrowgauge.trainer.report.read.progress import read_progress
from narrowgauge.trainer.runs import choose_device
from narrowgauge.trainer.runs.loop.check_data import check_data
from narrowgauge.trainer.runs.monitor.arithmetic import NO_CHOICE, Arithmetic, AttentionShape
from narrowgauge.trainer.training import Config
from narrowgauge.trainer.training.step.trainer import Trainer

_STEPS = 2  # timed steps, after a first
_LONG_S = 10.0  # a first step that takes this long is timed itself, and not repeated
_FLOP = 2e12  # of a timed step on a CPU, about: ten seconds of two cores. A step of GPT-3 345M has 1.1e15


def recorded_speed(directory: Path) -> float | None:
    """Median tokens/s of the last steps of a run, if it has started."""
    speed = read_progress(directory, time.time()).tokens_per_s
    return speed if math.isfinite(speed) else None


def measured_speed(config: Config, threads: int, products: str = "", attention: str = "") -> float:
    """Tokens/s of a few steps in this process, under the machine's current load.

    On a CPU, which computes one sequence after the other, long steps are cut to `_FLOP`. Then the
    optimizer's part of a step counts too often, by a few percent.

    Raises:
        UserError: The model and the data do not fit, or the data cannot be used.
    """
    dataset = open_data(config.data.source, config.data.tokenizer, config.data.weights)
    check_data(config, dataset)
    device = choose_device(config.training.device)
    config = shortened(config) if device.type == "cpu" else config
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    measured = Arithmetic.of((), AttentionShape.of(config))
    Arithmetic(products or measured.products, attention or measured.attention).choose()
    try:
        trainer = Trainer.begin(config, device)
        with trainer.batches(dataset.train) as batches:
            seconds = _seconds(lambda: trainer.train_step(batches), config.training.compile)
    finally:
        torch.set_num_threads(before)
        NO_CHOICE.choose()
    return config.training.batch_size * config.data.sequence_length / seconds


def _seconds(step: Callable[[], object], is_compiled: bool) -> float:
    """The mean time of a step."""
    start = time.perf_counter()
    step()
    first = time.perf_counter() - start
    if first > _LONG_S and not is_compiled:
        return first
    start = time.perf_counter()
    for _ in range(_STEPS):
        step()
    return (time.perf_counter() - start) / _STEPS


def shortened(config: Config) -> Config:
    """The configuration with at most `_FLOP` a step, or one sequence."""
    training, length = config.training, config.data.sequence_length
    sequences = max(1, int(_FLOP / (length * flops_per_token(config.spec.model, length))))
    size = min(training.micro_batch_size, sequences)
    count = min(training.batch_size // training.micro_batch_size, max(1, sequences // size))
    return config.with_training(micro_batch_size=size, batch_size=size * count)


def arm_speeds(experiment: Experiment, out: Path, say: Callable[[str], object]) -> dict[str, float]:
    """Tokens/s of each arm: recorded if it has started, otherwise measured.

    Args:
        experiment: The plan.
        out: The directory of its runs.
        say: Called with a sentence before each measurement, since compiling a first step takes long.
    """
    speeds: dict[str, float] = {}
    for run in experiment.trunks:
        if (speed := recorded_speed(out / run.name)) is not None:
            speeds.setdefault(run.arm, speed)
    unknown = {run.arm: run.config for run in reversed(experiment.trunks) if run.arm not in speeds}
    for number, arm in enumerate((arm for arm in experiment.arms if arm in unknown), start=1):
        config = unknown[arm]
        first = "; the first is compiled, which may take minutes" if config.training.compile else ""
        say(f"timing {arm}, {number} of {len(unknown)}: at most {1 + _STEPS} steps{first}")
        torch.compiler.reset()  # torch compiles at most eight variants of a function
        speeds[arm] = measured_speed(config, _threads(experiment), experiment.products, experiment.attention)
    return speeds


def _threads(experiment: Experiment) -> int:
    """The CPU threads of a run."""
    pinned = experiment.trunks[0].config.training.threads
    return experiment.threads or pinned or torch.get_num_threads()


def plan_lines(experiment: Experiment, out: Path, speeds: Mapping[str, float]) -> Sequence[str]:
    """The readable plan: a line for each arm, then the total."""
    lines, seconds = [], 0.0
    total = 0
    for arm in experiment.arms:
        runs = [run for run in experiment.compared if run.arm == arm]
        waiting = [run for run in runs if state_of(out / run.name) == "open"]
        left, count = sum(run.tokens_to_train for run in waiting), len(runs)
        took = left / speeds[arm]
        total, seconds = total + left, seconds + took
        done = count - len(waiting)
        lines.append(
            f"{arm:24} {count:4} run{'s'[: count != 1]}, {done} done, {human_count(left):>7} tokens left, "
            f"{speeds[arm]:8,.0f} tokens/s, {human_duration(took):>11}"
        )
    jobs = experiment.jobs
    lines.append(
        f"in all {human_count(total)} tokens left, {human_duration(seconds)} of {_threads(experiment)} "
        f"thread(s), {human_duration(seconds / jobs)} with {jobs} at a time on {os.cpu_count()} cores"
    )
    return lines
