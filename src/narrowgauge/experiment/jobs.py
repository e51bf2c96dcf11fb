"""The remaining commands of a chain, derived from the files on disk, and their results.

    train       the trunk; each branch, made from the trunk's checkpoint by `--branch`
    (first, with a fork: the shared steps of the seed)
    eval        for a measured experiment: two losses on the held-out tokens, `eval --forward`

A run that has diverged is a result. There is no other memory: the next command follows from the run
directories, so an experiment continues after any kill.
"""

import json
import math
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from narrowgauge.checkpoint import steps
from narrowgauge.errors import UserError
from narrowgauge.experiment.design import Chain, Experiment, RungRun
from narrowgauge.files import write_whole
from narrowgauge.report.read.records import read_status
from narrowgauge.report.verdict.rungs import DIVERGED, DONE, Row, read_rows
from narrowgauge.runs.run_directory import EVALUATION, RunDirectory
from narrowgauge.training import to_toml

FORWARD = "bf16"  # the recipe of the second loss


@dataclass(frozen=True)
class Job:
    """A command, the run directory that it works in, and the tokens that it trains on (0 to evaluate)."""

    name: str
    command: tuple[str, ...]
    directory: Path
    tokens: int


def state_of(directory: Path) -> str:
    """The state of a run: "done", "diverged", or "open" if it has to be continued or started."""
    status, _, has_diverged = read_status(directory / "status.json")
    return "diverged" if has_diverged else "done" if status == "done" else "open"


def require_same(run: RungRun, out: Path) -> None:
    """Check that an existing run, if any, started with the same values, by `train`'s rule.

    Raises:
        UserError: it started with other values.
    """
    directory = RunDirectory(out / run.name)
    if not (directory.path / "config.toml").is_file():
        return
    for key, (old, new) in directory.changes(run.config).items():
        change = f"{key} = {old!r}, and now it is {new!r}" if old != new else f"another text of {new!r}"
        raise UserError(
            f"{directory.path} holds a run with {change}; restore the old value, or name another "
            "directory with --out"
        )


def is_complete(chain: Chain, out: Path) -> bool:
    """Whether a chain of a measured experiment is complete."""
    return all(_is_measured(run, out / run.name) for run in chain.runs)


def remaining(experiment: Experiment, out: Path) -> list[Chain]:
    """The chains of a measured experiment that have no result yet, here or in its file of rows."""
    known = {(row.arm, row.seed, row.rung) for row in _rows_before(experiment)}
    return [
        chain
        for chain in experiment.chains
        if not is_complete(chain, out)
        and not all((chain.arm, chain.seed, run.rung) in known for run in chain.runs)
    ]


def forks_of(chains: Sequence[Chain]) -> list[Chain]:
    """The forks that chains share, each as a separate chain, to be trained before them."""
    forks = {c.fork.name: Chain("fork", c.seed, c.fork, ()) for c in chains if c.fork is not None}
    return list(forks.values())


def _rows_before(experiment: Experiment) -> list[Row]:
    """The rows of the experiment that its file holds.

    Raises:
        UserError: the file holds a run of this name with another number of tokens.
    """
    if experiment.rows is None or not experiment.rows.exists():
        return []
    tokens = {(c.arm, c.seed, run.rung): run.tokens for c in experiment.chains for run in c.runs}
    rows = read_rows(experiment.rows)
    for row in rows:
        if (row.arm, row.seed, row.rung) in tokens and tokens[row.arm, row.seed, row.rung] != row.tokens:
            raise UserError(
                f"{experiment.rows} has {row.arm}, seed {row.seed}, rung {row.rung} after {row.tokens:,} "
                f"tokens, and now it is {tokens[row.arm, row.seed, row.rung]:,}; name another file of rows"
            )
    return rows


def _is_measured(run: RungRun, directory: Path) -> bool:
    state = state_of(directory)
    return state == "diverged" or (state == "done" and losses_of(run, directory) is not None)


def losses_of(run: RungRun, directory: Path) -> tuple[float, float] | None:
    """Both losses of a run, from its evaluation.json; None if there are none.

    Losses that a user measured differently, on other text or another number of batches, do not count.
    """
    config = run.config
    wanted = {"data": None, "batches": config.validation.batches}
    wanted["sequence_length"] = config.data.sequence_length
    try:
        found = json.loads((directory / EVALUATION).read_text(encoding="utf-8"))
        is_other = any(found.get(key, value) != value for key, value in wanted.items())
        if is_other or found["step"] != config.training.steps:
            return None
        own, other = (math.nan if found[key] is None else float(found[key]) for key in ("own", FORWARD))
        return own, other
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def collect_rows(experiment: Experiment, out: Path) -> list[Row]:
    """The rows of the finished runs, by arm, seed and rung; rows already in its file stay there."""
    rows = []
    for chain in experiment.chains:
        for run in chain.runs:
            if (losses := _losses(out / run.name, run)) is not None:
                status = DIVERGED if math.isnan(losses[0]) else DONE
                rows.append(Row(chain.arm, chain.seed, run.rung, run.tokens, *losses, status))
    here = {(row.arm, row.seed, row.rung) for row in rows}
    rows += [row for row in _rows_before(experiment) if (row.arm, row.seed, row.rung) not in here]
    order = {arm: number for number, arm in enumerate(experiment.arms)}
    return sorted(rows, key=lambda row: (order.get(row.arm, len(order)), row.arm, row.seed, row.rung))


def _losses(directory: Path, run: RungRun) -> tuple[float, float] | None:
    """Both losses of a run, NaN if it diverged; None if it is not finished."""
    state = state_of(directory)
    if state == "diverged":
        return math.nan, math.nan
    if state != "done" or (losses := losses_of(run, directory)) is None:
        return None
    return losses if all(map(math.isfinite, losses)) else (math.nan, math.nan)


def jobs_of(chain: Chain, out: Path, files: Path, is_measured: bool) -> Iterator[Job]:
    """The remaining commands, each determined when it is requested.

    A branch whose checkpoint the trunk no longer has, or never reached, is trained from the fork or from
    the beginning, with the same digits. At the end of a measured chain only the last checkpoint of each run
    is kept.

    Args:
        chain: One arm with one seed.
        out: The directory of the runs.
        files: Where the configurations of the runs are written: `out`, or elsewhere on ranks other than 0.
        is_measured: Whether each run is evaluated at its end.
    """
    for run in (chain.trunk, *chain.branches):
        directory = out / run.name
        if state_of(directory) == "open":
            yield Job(run.name, tuple(_train(run, chain, out, files)), directory, run.tokens_to_train)
        if is_measured and not _is_measured(run, directory):
            yield Job(run.name, tuple(_evaluate(run, directory)), directory, 0)
    for run in chain.runs if is_measured else ():
        _remove_checkpoints(out / run.name, run.config.training.steps)


def _train(run: RungRun, chain: Chain, out: Path, files: Path) -> Iterator[str]:
    """The arguments of the command that starts or continues a run."""
    file = files / f"{run.name}.toml"
    write_whole(file, to_toml(run.config))
    yield from (sys.executable, "-m", "narrowgauge", "train", str(file), "--out", str(out / run.name))
    sources = [] if run is chain.trunk else [(chain.trunk, run.branch)]
    sources += [] if chain.fork is None else [(chain.fork, chain.fork.config.training.steps)]
    for source, step in sources:
        if step in steps(out / source.name / "checkpoints"):
            yield from ("--branch", f"{out / source.name}@{step}")
            return


def _evaluate(run: RungRun, directory: Path) -> Iterator[str]:
    batches = str(run.config.validation.batches)
    yield from (sys.executable, "-m", "narrowgauge", "eval", str(directory))
    yield from ("--batches", batches, "--forward", FORWARD, "--device", run.config.training.device)


def _remove_checkpoints(directory: Path, last: int) -> None:
    """Remove all checkpoints of a finished run except the last."""
    for step in steps(directory / "checkpoints"):
        if step != last and state_of(directory) == "done":
            shutil.rmtree(directory / "checkpoints" / f"step-{step}")
