"""The next command of an experiment, derived from the files on disk, and the results of its runs.

    train       a run, begun from the first of its sources whose checkpoint is there (`--branch`)
    eval        for a measured experiment: two losses on the held-out tokens, `eval --forward`

A run that has diverged is a result. Nothing else is stored: the next command follows from the run
directories, so an experiment continues after any kill.
"""

import json
import math
import shutil
import sys
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from narrowgauge.system.errors import UserError
from narrowgauge.system.files import write_whole
from narrowgauge.trainer.checkpoint import steps
from narrowgauge.trainer.experiment.design import Experiment
from narrowgauge.trainer.experiment.grid import ArmRun
from narrowgauge.trainer.report.read.run import read_state
from narrowgauge.trainer.report.verdict.verdict import DIVERGED, DONE, Row, read_rows
from narrowgauge.trainer.runs.run_directory import EVALUATION, RunDirectory
from narrowgauge.trainer.training import to_toml

FORWARD = "bf16"  # the recipe of the second loss


@dataclass(frozen=True)
class Job:
    """A command of a run."""

    name: str  # of the run
    command: tuple[str, ...]  # the words of the command
    directory: Path  # of the run
    tokens: int  # the tokens that it trains on; 0 if it evaluates
    is_last: bool = True  # whether the run has its result when it ends

    @property
    def key(self) -> tuple[str, bool]:
        """What tells it from the others of an experiment: the run, and whether it trains."""
        return self.name, self.tokens > 0


def state_of(directory: Path) -> str:
    """The state of a run: "done", "diverged", or "open" if it has to be continued or started."""
    status, _ = read_state(directory)
    return status if status in ("done", "diverged") else "open"


def require_same(run: ArmRun, out: Path) -> None:
    """Check that an existing run, if any, started with the same values, by `train`'s rule."""
    directory = RunDirectory(out / run.name)
    if not (directory.path / "config.toml").is_file():
        return
    for key, (old, new) in directory.changes(run.config).items():
        change = f"{key} = {old!r}, and now it is {new!r}" if old != new else f"another text of {new!r}"
        raise UserError(
            f"{directory.path} holds a run with {change}; restore the old value, or name another "
            "directory with --out"
        )


def remaining(experiment: Experiment, out: Path) -> list[ArmRun]:
    """The runs of each arm and seed that lacks a result, here and in the file of rows, with their forks."""
    known = {row.key for row in _rows_before(experiment)}
    missing = {(r.arm, r.seed) for r in experiment.compared if not is_complete(experiment, r, out)}
    wanted = missing & {(run.arm, run.seed) for run in experiment.compared if run.key not in known}
    sources = {name for run in experiment.runs if (run.arm, run.seed) in wanted for name, _ in run.sources}
    return [run for run in experiment.runs if (run.arm, run.seed) in wanted or run.name in sources]


def _rows_before(experiment: Experiment) -> list[Row]:
    """The rows of the experiment that its file holds."""
    file = experiment.design.rows
    if file is None or not file.exists():
        return []
    tokens = {run.key: run.tokens for run in experiment.compared}
    rows = read_rows(file)
    for row in rows:
        if (now := tokens.get(row.key, row.tokens)) != row.tokens:
            raise UserError(
                f"{file} has {row.arm}, seed {row.seed}, rung {row.rung} after {row.tokens:,} "
                f"tokens, and now it is {now:,}; name another file of rows"
            )
    return rows


def is_complete(experiment: Experiment, run: ArmRun, out: Path) -> bool:
    """Whether a run has ended, and in a measured experiment has both losses."""
    if experiment.is_measured and run.rung:
        return _losses(out / run.name, run) is not None
    return state_of(out / run.name) != "open"


def collect_rows(experiment: Experiment, out: Path) -> list[Row]:
    """The rows of the finished runs, by arm, seed and rung; rows already in its file stay there."""
    rows = {row.key: row for row in _rows_before(experiment)}
    for run in experiment.compared:
        if (losses := _losses(out / run.name, run)) is not None:
            status = DIVERGED if math.isnan(losses[0]) else DONE
            rows[run.key] = Row(*run.key, run.tokens, *losses, status)
    order = {arm: number for number, arm in enumerate(experiment.arms)}
    return sorted(rows.values(), key=lambda row: (order.get(row.arm, len(order)), *row.key))


def _losses(directory: Path, run: ArmRun) -> tuple[float, float] | None:
    """Both losses of a run from its evaluation.json, NaN if it diverged; None if it is not finished.

    Losses that a user measured differently, on other text or another number of batches, do not count.
    """
    if (state := state_of(directory)) != "done":
        return (math.nan, math.nan) if state == "diverged" else None
    wanted = {"data": None, "batches": run.config.validation.batches}
    wanted["sequence_length"] = run.config.data.sequence_length
    try:
        found = json.loads((directory / EVALUATION).read_text(encoding="utf-8"))
        if any(found.get(key, value) != value for key, value in wanted.items()) or found["step"] != run.steps:
            return None
        own, other = (math.nan if found[key] is None else float(found[key]) for key in ("own", FORWARD))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return (own, other) if math.isfinite(own) and math.isfinite(other) else (math.nan, math.nan)


def next_job(
    experiment: Experiment,
    runs: Sequence[ArmRun],
    out: Path,
    files: Path,
    begun: Container[tuple[str, bool]] = (),
) -> Job | None:
    """The first job that can start; None while all that are left wait for others, or have begun.

    Of the experiment's runs, these are to be trained. Their configurations are written to `files`: `out`, or
    elsewhere on ranks other than 0. `begun` has the keys of jobs that have begun, however they ended.
    """
    for run in runs:
        name, directory = run.name, out / run.name
        if state_of(directory) == "open":
            waits = any(state_of(out / source) == "open" for source, _ in run.sources)
            if not waits and (name, True) not in begun:
                is_last = bool(run.rung) and not experiment.is_measured
                return Job(name, tuple(_train(run, out, files)), directory, run.tokens_to_train, is_last)
        elif not is_complete(experiment, run, out) and (name, False) not in begun:
            return Job(name, tuple(_evaluate(run, directory)), directory, 0)
    return None


def _train(run: ArmRun, out: Path, files: Path) -> Iterator[str]:
    """The arguments of the command that starts or continues a run."""
    file = files / f"{run.name}.toml"
    write_whole(file, to_toml(run.config))
    yield from (sys.executable, "-m", "narrowgauge", "train", str(file), "--out", str(out / run.name))
    for source, step in run.sources:
        if step in steps(out / source / "checkpoints"):
            yield from ("--branch", f"{out / source}@{step}")
            return


def _evaluate(run: ArmRun, directory: Path) -> Iterator[str]:
    batches = str(run.config.validation.batches)
    yield from (sys.executable, "-m", "narrowgauge", "eval", str(directory))
    yield from ("--batches", batches, "--forward", FORWARD, "--device", run.config.training.device)


def remove_checkpoints(experiment: Experiment, runs: Sequence[ArmRun], out: Path) -> None:
    """Leave the last checkpoint of each run whose branches have all ended; others were kept for these."""
    waiting = [run for run in runs if not is_complete(experiment, run, out)]
    needed = {run.name for run in waiting} | {source for run in waiting for source, _ in run.sources}
    for run in runs:
        if run.rung and run.name not in needed and state_of(out / run.name) == "done":
            for step in steps(out / run.name / "checkpoints"):
                if step != run.config.training.steps:
                    shutil.rmtree(out / run.name / "checkpoints" / f"step-{step}")
