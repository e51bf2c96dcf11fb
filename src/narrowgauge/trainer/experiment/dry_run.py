"""Estimates an experiment before it starts: runs, tokens, time. Speeds are measured on a few steps."""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from narrowgauge.system.units import human_count, human_duration
from narrowgauge.trainer.bench.worker import own_step, random_batches
from narrowgauge.trainer.data import open_data
from narrowgauge.trainer.experiment.design import Experiment
from narrowgauge.trainer.experiment.jobs import state_of
from narrowgauge.trainer.models import flops_per_token
from narrowgauge.trainer.report.read.listing import look_at
from narrowgauge.trainer.runs import choose_device
from narrowgauge.trainer.runs.loop.check_data import check_data
from narrowgauge.trainer.runs.monitor.arithmetic import NO_CHOICE, Arithmetic, AttentionShape
from narrowgauge.trainer.runs.monitor.yardstick import seconds
from narrowgauge.trainer.training import Config

_STEPS = 2  # timed steps, after a first
_LONG_S = 10.0  # a first step that takes this long is timed itself, and not repeated
_FLOP = 2e12  # of a timed step on a CPU, about: ten seconds of two cores. A step of GPT-3 345M has 1.1e15


def measured_speed(config: Config, threads: int, products: str = "", attention: str = "") -> float:
    """Tokens/s of a few steps on random tokens in this process, under the machine's current load.

    On a CPU, which computes one sequence after the other, long steps are cut to `_FLOP`. Then the
    optimizer's part of a step counts too often, by a few percent.

    Raises:
        UserError: The model and the data do not fit, or the data cannot be used.
    """
    check_data(config, open_data(config.data.source, config.data.tokenizer, config.data.weights))
    device = choose_device(config.training.device)
    config = shortened(config) if device.type == "cpu" else config
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    measured = Arithmetic.of((), AttentionShape.of(config))
    Arithmetic(products or measured.products, attention or measured.attention).choose()
    try:
        step = own_step(config, device, random_batches(config, device))
        took = seconds(step, device)
        if took < _LONG_S or config.training.compile:
            took = sum(seconds(step, device) for _ in range(_STEPS)) / _STEPS
    finally:
        torch.set_num_threads(before)
        NO_CHOICE.choose()
    return config.training.batch_size * config.data.sequence_length / took


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
    design = experiment.design
    for run in experiment.trunks:
        if (speed := look_at(out / run.name).tokens_per_s) is not None:
            speeds.setdefault(run.arm, speed)
    unknown = {run.arm: run.config for run in reversed(experiment.trunks) if run.arm not in speeds}
    for number, arm in enumerate((arm for arm in experiment.arms if arm in unknown), start=1):
        config = unknown[arm]
        first = "; the first is compiled, which may take minutes" if config.training.compile else ""
        say(f"timing {arm}, {number} of {len(unknown)}: at most {1 + _STEPS} steps{first}")
        torch.compiler.reset()  # torch compiles at most eight variants of a function
        speeds[arm] = measured_speed(config, _threads(experiment), design.products, design.attention)
    return speeds


def _threads(experiment: Experiment) -> int:
    """The CPU threads of a run."""
    pinned = experiment.trunks[0].config.training.threads
    return experiment.design.threads or pinned or torch.get_num_threads()


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
    jobs = experiment.design.jobs
    lines.append(
        f"in all {human_count(total)} tokens left, {human_duration(seconds)} of {_threads(experiment)} "
        f"thread(s), {human_duration(seconds / jobs)} with {jobs} at a time on {os.cpu_count()} cores"
    )
    return lines
