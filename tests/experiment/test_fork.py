"""Arms that fork from one run, and results that outlive the machine of their runs."""

import io
import math
import tomllib

import pytest
from rich.console import Console

from narrowgauge.system.errors import UserError
from narrowgauge.trainer.experiment.arms import take_arms, take_experiment
from narrowgauge.trainer.experiment.design import make_experiment
from narrowgauge.trainer.experiment.jobs import collect_rows, next_job, remaining
from narrowgauge.trainer.laboratory.compare import run_comparison
from narrowgauge.trainer.report.verdict.rungs import Row, read_rows, rows_text
from support.in_process import train

__all__ = ["train"]

FILE = """
[schedule]
kind = "wsd"
warmup_steps = 5
[experiment]
rungs = [20, 40]
seeds = [3, 4]
fork = 8
[arms.bf16]
recipe.name = "bf16"
[arms.mxfp4]
recipe.name = "mxfp4"
"""


def experiment_of(**changes):
    values, arms = take_arms(tomllib.loads(FILE))
    values, table = take_experiment(values)
    return make_experiment(values, arms, (3, 4), table | changes)


def test_arms_of_a_seed_start_from_one_run_of_the_reference(tmp_path):
    experiment = experiment_of()
    assert [run.name for run in experiment.runs[:2]] == ["fork-seed-3", "fork-seed-4"]
    assert [run.sources[-1] for run in experiment.trunks] == [(f"fork-seed-{n}", 8) for n in (3, 3, 4, 4)]
    fork, trunk = experiment.runs[0].config, experiment.trunks[1]
    assert fork.spec.recipe.name == "bf16"
    assert (fork.training.seed, fork.training.steps) == (3, 8)
    assert [fork.learning_rate(step) for step in range(1, 9)] == [
        trunk.config.learning_rate(step) for step in range(1, 9)
    ]
    assert trunk.tokens_to_train == trunk.tokens * 32 // 40
    assert next_job(experiment, [trunk], tmp_path, tmp_path) is None, "it waits for the fork"
    (tmp_path / "fork-seed-3" / "checkpoints" / "step-8").mkdir(parents=True)
    (tmp_path / "fork-seed-3" / "status.json").write_text('{"status": "done"}')
    job = next_job(experiment, [trunk], tmp_path, tmp_path)
    assert job.command[-2:] == ("--branch", f"{tmp_path / 'fork-seed-3'}@8")


def test_a_fork_after_the_rate_has_begun_to_fall_is_refused():
    with pytest.raises(UserError, match=r"rate of bf16,steps=20-seed-3 falls from step 17"):
        experiment_of(fork=17)


def rows_file(folder, *rows):
    """A file of rows (arm, seed, rung, loss) at the lengths of the rungs."""
    made = [Row(arm, seed, rung, 256 * 8 * (20, 40)[rung - 1], x, x, "done") for arm, seed, rung, x in rows]
    (folder / "rows.csv").write_text(rows_text(made))
    return str(folder / "rows.csv")


def test_what_a_file_of_rows_has_is_not_trained_again_and_all_of_it_is_kept(tmp_path):
    file = rows_file(tmp_path, ("bf16", 3, 1, 3.0), ("bf16", 3, 2, 3.0), ("mxfp4", 3, 1, 3.5))
    other = Row("an-arm-of-before", 3, 1, 7, math.nan, math.nan, "diverged")
    (tmp_path / "rows.csv").write_text(rows_text([*read_rows(tmp_path / "rows.csv"), other]))
    left = remaining(experiment_of(rows=file), tmp_path)
    trunks = [(run.arm, run.seed) for run in left if run.rung == 2]
    assert trunks == [("mxfp4", 3), ("bf16", 4), ("mxfp4", 4)]
    assert [run.name for run in left if run.rung == 0] == ["fork-seed-3", "fork-seed-4"]
    kept = collect_rows(experiment_of(rows=file), tmp_path)
    assert rows_text(kept) == (tmp_path / "rows.csv").read_text()
    (tmp_path / "rows.csv").write_text(rows_text([Row("bf16", 3, 1, 999, 3.0, 3.0, "done")]))
    with pytest.raises(UserError, match="bf16, seed 3, rung 1 after 999 tokens"):
        remaining(experiment_of(rows=file), tmp_path)


def test_an_experiment_whose_runs_are_all_rows_prints_its_results(tmp_path):
    arms = (("bf16", 3.0), ("mxfp4", 3.5))
    file = rows_file(tmp_path, *((a, seed, rung, x) for a, x in arms for seed in (3, 4) for rung in (1, 2)))
    shown = io.StringIO()
    found = run_comparison(experiment_of(rows=file, probe=False), tmp_path / "out", Console(file=shown))
    assert found.passes
    assert found.rows() == []
    assert file in shown.getvalue()
    assert "report" not in shown.getvalue(), "a page needs the directories of runs"


@pytest.mark.tier("thorough")  # runs/use/test_branch.py: a branch has the digits of the run from scratch
def test_a_rounding_seed_changes_the_random_bits_and_nothing_else(train, look):
    keys = {"training.steps": 2, "recipe.name": "bf16-sr", "training.seed": 5}
    plain, same, other = (
        look(train(str(seed), keys | {"training.rounding_seed": seed})).column("loss") for seed in (-1, 5, 7)
    )
    assert plain == same
    assert plain[0] == other[0], "the same weights and tokens"
    assert plain[1] != other[1]
