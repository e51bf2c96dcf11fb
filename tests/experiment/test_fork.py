"""Arms that fork from one run, and results that outlive the machine of their runs."""

import io
import math
import tomllib

import pytest
from rich.console import Console

from narrowgauge.errors import UserError
from narrowgauge.experiment.arms import take_arms, take_experiment
from narrowgauge.experiment.design import make_measured
from narrowgauge.experiment.jobs import collect_rows, forks_of, jobs_of, remaining
from narrowgauge.laboratory.compare import run_comparison
from narrowgauge.report.verdict.rungs import Row, rows_text
from narrowgauge.runs import branch_run, run
from narrowgauge.training import make_config
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
    return make_measured(values, arms, "3,4", table | changes)


def test_arms_of_a_seed_start_from_one_run_of_the_reference(tmp_path):
    chains = experiment_of().chains
    assert [chain.fork.name for chain in chains] == [
        "fork-seed-3",
        "fork-seed-3",
        "fork-seed-4",
        "fork-seed-4",
    ]
    assert [fork.trunk.name for fork in forks_of(chains)] == ["fork-seed-3", "fork-seed-4"]
    fork = chains[1].fork.config
    assert fork.spec.recipe.name == "bf16"
    assert (fork.training.seed, fork.training.steps) == (3, 8)
    assert [fork.plan.learning_rate(step) for step in range(1, 9)] == [
        chains[1].trunk.config.plan.learning_rate(step) for step in range(1, 9)
    ]
    assert chains[1].trunk.tokens_to_train == chains[1].trunk.tokens * 32 // 40
    (tmp_path / "fork-seed-3" / "checkpoints" / "step-8").mkdir(parents=True)
    job = next(jobs_of(chains[1], tmp_path, tmp_path, is_measured=True))
    assert job.command[-2:] == ("--branch", f"{tmp_path / 'fork-seed-3'}@8")


def test_a_fork_after_the_rate_has_begun_to_fall_is_refused():
    with pytest.raises(UserError, match=r"rate of bf16,steps=20-seed-3 falls from step 17"):
        experiment_of(fork=17)


def test_what_a_file_of_rows_has_is_not_trained_again(tmp_path):
    tokens = [20 * 8 * 256, 40 * 8 * 256]
    file = tmp_path / "rows.csv"
    rows = [Row("bf16", 3, rung, tokens[rung - 1], 3.0, 3.0, "done") for rung in (1, 2)]
    other = Row("an-arm-of-before", 3, 1, 7, math.nan, math.nan, "diverged")
    file.write_text(rows_text([*rows, Row("mxfp4", 3, 1, tokens[0], 3.5, 3.4, "done"), other]))
    experiment = experiment_of(rows=str(file))
    left = remaining(experiment, tmp_path)
    assert [(chain.arm, chain.seed) for chain in left] == [("mxfp4", 3), ("bf16", 4), ("mxfp4", 4)]
    kept = collect_rows(experiment, tmp_path)
    assert [(row.arm, row.rung) for row in kept] == [
        ("bf16", 1), ("bf16", 2), ("mxfp4", 1), ("an-arm-of-before", 1),
    ]  # fmt: skip
    assert rows_text(kept) == rows_text([*rows, kept[2], other])


def test_an_experiment_whose_runs_are_all_rows_prints_its_results(tmp_path):
    tokens = [20 * 8 * 256, 40 * 8 * 256]
    file = tmp_path / "rows.csv"
    arms = [("bf16", 3.0), ("mxfp4", 3.5)]
    runs = [(arm, seed, rung, loss) for arm, loss in arms for seed in (3, 4) for rung in (1, 2)]
    rows = [Row(arm, seed, rung, tokens[rung - 1], loss, loss, "done") for arm, seed, rung, loss in runs]
    file.write_text(rows_text(rows))
    shown = io.StringIO()
    found = run_comparison(experiment_of(rows=str(file), probe=False), tmp_path / "out", Console(file=shown))
    assert found.passes
    assert found.rows() == []
    assert str(file) in shown.getvalue()
    assert "report" not in shown.getvalue(), "a page needs the directories of runs"


def test_rows_of_another_length_are_refused(tmp_path):
    file = tmp_path / "rows.csv"
    file.write_text(rows_text([Row("bf16", 3, 1, 999, 3.0, 3.0, "done")]))
    with pytest.raises(UserError, match="bf16, seed 3, rung 1 after 999 tokens"):
        remaining(experiment_of(rows=str(file)), tmp_path)


@pytest.mark.tier("thorough")  # quick: that the rates agree, above, and the branches of tests/runs/use
def test_a_fork_of_the_same_recipe_has_the_digits_of_the_run_from_scratch(train, tiny, look, tmp_path):
    keys = {
        "training.steps": 8,
        "schedule.kind": "wsd",
        "schedule.warmup_steps": 2,
        "schedule.decay_fraction": 0.5,
    }
    whole, out = train("whole", keys), tmp_path / "out"
    first = {"training.steps": 3, "schedule.kind": "constant", "checkpoint.every": 3}
    branch_run(train("fork", keys | first), 3, make_config(tiny(keys)), out)
    run(tiny(keys), out)
    ends = [[(step["loss"], step["grad_norm"]) for step in look(path).steps] for path in (out, whole)]
    assert len(ends[0]) == 8
    assert ends[0] == ends[1]


@pytest.mark.tier("thorough")  # quick: tests/training/config, where the key has its default
def test_a_rounding_seed_changes_the_random_bits_and_nothing_else(train, look):
    keys = {"training.steps": 2, "recipe.name": "bf16-sr", "training.seed": 5}
    plain, same, other = (
        look(train(name, keys | {"training.rounding_seed": seed})).steps
        for name, seed in (("plain", -1), ("same", 5), ("other", 7))
    )
    losses = [[step["loss"] for step in steps] for steps in (plain, same, other)]
    assert losses[0] == losses[1]
    assert losses[0][0] == losses[2][0], "the same weights and tokens"
    assert losses[0][1] != losses[2][1]
