"""The rows of an experiment, read from the run directories that are finished."""

import math
from pathlib import Path

from narrowgauge.experiment.design import Experiment, RungRun
from narrowgauge.experiment.jobs import losses_of, state_of
from narrowgauge.report.verdict.rows import DIVERGED, DONE, Row


def collect_rows(experiment: Experiment, out: Path) -> list[Row]:
    """The rows of the runs that are finished, by arm, seed and rung."""
    rows = []
    for chain in experiment.chains:
        for run in chain.runs:
            if (losses := _losses(out / run.name, run)) is not None:
                status = DIVERGED if math.isnan(losses[0]) else DONE
                rows.append(Row(chain.arm, chain.seed, run.rung, run.tokens, *losses, status))
    order = {arm: number for number, arm in enumerate(experiment.arms)}
    return sorted(rows, key=lambda row: (order[row.arm], row.seed, row.rung))


def _losses(directory: Path, run: RungRun) -> tuple[float, float] | None:
    """Both losses of a run, NaN if it diverged; None if it is not finished."""
    state = state_of(directory)
    if state == "diverged":
        return math.nan, math.nan
    if state != "done" or (losses := losses_of(run, directory)) is None:
        return None
    return losses if all(map(math.isfinite, losses)) else (math.nan, math.nan)
