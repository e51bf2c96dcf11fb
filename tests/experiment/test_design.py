"""What a ladder consists of: one trunk for all rungs, arms and seeds in order, mistakes reported first."""

import io
import json
import math
import tomllib
from contextlib import nullcontext
from pathlib import Path

import pytest
from rich.console import Console

from narrowgauge.system.errors import UserError
from narrowgauge.trainer.experiment.design import make_experiment
from narrowgauge.trainer.experiment.jobs import (
    collect_rows,
    next_job,
    remaining,
    remove_checkpoints,
    require_same,
)
from narrowgauge.trainer.experiment.run import run_experiment
from narrowgauge.trainer.report.verdict.verdict import Row, read_rows, rows_text
from narrowgauge.trainer.runs.loop.validation import keep_losses
from narrowgauge.trainer.runs.run_directory import RunDirectory
from support.in_process import train

__all__ = ["train"]

ROOT = Path(__file__).parents[2]
FILE = """
[schedule]
kind = "wsd"
warmup_steps = 5
[experiment]
rungs = [20, 40]
seeds = [3, 4]
order = [["bf16", "mxfp4"], ["fp8"]]
[arms.bf16]
recipe.name = "bf16"
[arms.fp8]
recipe.name = "fp8"
[arms.mxfp4]
recipe.name = "mxfp4"
recipe.dgrad = { dy = { cast = "mxfp4", rounding = "stochastic" } }
"""


def ladder_of(text, arms=(), **changes):
    values = tomllib.loads(text)
    values["experiment"] |= changes
    return make_experiment(values, chosen=arms)


def forked(**changes):
    """Two arms whose seeds fork from eight steps of the reference."""
    return ladder_of(FILE, arms=["mxfp4"], **{"fork": 8, "order": []} | changes)


def test_a_group_is_finished_before_the_next_and_a_seed_before_the_next():
    ladder = ladder_of(FILE)
    assert [(run.arm, run.seed) for run in ladder.trunks] == [
        ("bf16", 3), ("mxfp4", 3), ("bf16", 4), ("mxfp4", 4), ("fp8", 3), ("fp8", 4),
    ]  # fmt: skip
    assert ladder.arms == ("bf16", "fp8", "mxfp4")
    assert [run.arm for run in ladder_of(FILE, arms=["fp8"]).trunks] == ["bf16", "bf16", "fp8", "fp8"]


def test_rungs_leave_the_trunk_where_their_rate_begins_to_fall():
    runs = ladder_of(FILE).runs[:2]
    assert [run.name for run in runs] == ["bf16-seed-3", "bf16,steps=20-seed-3"]
    assert [run.config.training.steps for run in runs] == [40, 20]
    assert [run.sources for run in runs] == [(), (("bf16-seed-3", 16),)]
    saves = runs[0].config.checkpoint
    assert 16 % saves.every == 0
    assert (40 - 16) // saves.every < saves.keep
    assert saves.every_minutes == math.inf
    assert [run.tokens_to_train for run in runs] == [40 * 8 * 256, 4 * 8 * 256]
    casts = ladder_of(FILE).trunks[1].config.spec.recipe.casts
    assert casts["dgrad.dy"].rounding == "stochastic"


def ended(ladder, out, *runs, step=0, own=3.0, bf16=2.5, **changes):
    """Runs that are done, with both losses and the checkpoints of every second step."""
    for run in runs:
        for saved in range(2, run.config.training.steps + 1, 2):
            (out / run.name / "checkpoints" / f"step-{saved}").mkdir(parents=True)
        (out / run.name / "status.json").write_text('{"status": "done", "reason": ""}')
        (out / run.name / "config.toml").touch()
        length, batches = run.config.data.sequence_length, run.config.validation.batches
        found = {"data": None, "sequence_length": length, "batches": batches} | changes
        keep_losses(out / run.name, step or run.config.training.steps, {"own": own, "bf16": bf16}, found)


OTHERWISE = [({}, True), ({"own": math.nan}, True)]
OTHERWISE += [
    (found, False) for found in ({"data": "other.txt"}, {"batches": None}, {"step": 20}, {"bf16": "none"})
]


@pytest.mark.parametrize(("changes", "counts"), OTHERWISE)
def test_losses_that_somebody_measured_otherwise_are_no_result(tmp_path, changes, counts):
    """`narrowgauge eval RUN --forward R` writes the same file, on any text. A loss that is not finite is a
    result, and null in JSON."""
    ladder = ladder_of(FILE, rungs=[40])
    run = ladder.trunks[0]
    ended(ladder, tmp_path, run, **changes)
    json.loads((tmp_path / run.name / "evaluation.json").read_text(), parse_constant=pytest.fail)
    rows = [(row.status, row.own_loss) for row in collect_rows(ladder, tmp_path)]
    assert [status for status, _ in rows] == ["diverged" if "own" in changes else "done"] * counts
    assert "own" in changes or rows == [("done", 3.0)] * counts
    job = next_job(ladder, [run], tmp_path, tmp_path)
    assert (job is None) == counts
    if job is not None:
        assert (job.command[3], job.is_last) == ("eval", True)
        assert next_job(ladder, [run], tmp_path, tmp_path, {job.key}) is None, "it is tried once"


def test_a_branch_waits_for_its_trunk_and_the_trunk_keeps_checkpoints_for_it(tmp_path):
    ladder = ladder_of(FILE, seeds=[3])
    trunk, branch, *others = ladder.runs

    def job(*begun):
        found = next_job(ladder, ladder.runs, tmp_path, tmp_path, begun)
        return found and (found.name, found.command[3], found.command[-1])

    assert job()[:2] == (trunk.name, "train")
    assert job((trunk.name, True))[0] == others[0].name, "the branch waits, and another trunk does not"
    ended(ladder, tmp_path, trunk)
    assert job() == (branch.name, "train", f"{tmp_path / trunk.name}@16")
    remove_checkpoints(ladder, ladder.runs, tmp_path)
    assert (tmp_path / trunk.name / "checkpoints" / "step-16").is_dir()
    ended(ladder, tmp_path, branch)
    remove_checkpoints(ladder, ladder.runs, tmp_path)
    left = [
        [path.name for path in (tmp_path / run.name / "checkpoints").iterdir()] for run in (trunk, branch)
    ]
    assert left == [["step-40"], ["step-20"]]


def test_a_diverged_trunk_leaves_its_branches_and_a_failed_one_does_not(tmp_path):
    ladder = ladder_of(FILE, seeds=[3])
    trunk, branch, *_ = ladder.runs
    (tmp_path / trunk.name).mkdir()
    for reason, follows in (("Diverged: 11 steps", True), ("SaveError: no room", False)):
        RunDirectory(tmp_path / trunk.name).set_status("failed", reason)
        job = next_job(ladder, ladder.runs, tmp_path, tmp_path, {(trunk.name, True)})
        assert (job.name == branch.name) == follows
        assert "--branch" not in job.command, "it has no checkpoint, and starts at the beginning"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (FILE.replace('"wsd"', '"cosine"'), "several rungs"),
        (FILE.replace("[20, 40]", "[40, 20]"), "ascending"),
        (FILE.replace("[20, 40]", "[5, 40]"), "warm-up"),
        (FILE.replace('["fp8"]', '["fp9"]'), "fp8"),
        (FILE.replace("seeds = [3, 4]", "sedes = [3, 4]"), "seeds"),
        (FILE.replace("[arms.fp8]\nrecipe.name", "[arms.fp8]\nname"), "recipe.name"),
        (FILE.replace("rungs", "held_out_tokens = 100\nrungs"), "multiple of a micro-batch"),
    ],
)
def test_a_mistake_is_said_before_anything_runs(changed, message):
    with pytest.raises(UserError, match=message):
        ladder_of(changed)


def test_a_rule_that_begins_before_the_branch_is_refused(tmp_path):
    shipped = (ROOT / "src/narrowgauge/recipes/shipped/mxfp8.toml").read_text(encoding="utf-8")
    recipe = tmp_path / "late.toml"
    text = FILE.replace('[arms.fp8]\nrecipe.name = "fp8"', f'[arms.fp8]\nrecipe.name = "{recipe}"')
    for share, is_shared in ((0.3, False), (0.9, True)):
        recipe.write_text(f'{shipped}\n[[rule]]\nfrom_share = {share}\nfprop = "bf16"\n')
        with nullcontext() if is_shared else pytest.raises(UserError, match="share a trunk"):
            ladder_of(text)


def test_a_finished_run_of_other_values_or_another_recipe_text_is_refused(tmp_path):
    run = ladder_of(FILE, rungs=[40]).trunks[0]
    require_same(run, tmp_path)
    RunDirectory(tmp_path / run.name).claim(run.config)
    RunDirectory(tmp_path / run.name).set_status("done", "")
    require_same(run, tmp_path)
    other = ladder_of(FILE.replace("warmup_steps = 5", "warmup_steps = 6"), rungs=[40]).trunks[0]
    with pytest.raises(UserError, match=r"schedule.warmup_steps = 5, and now it is 6; .* --out"):
        require_same(other, tmp_path)
    (tmp_path / run.name / "recipe.toml").write_text('fprop = "bf16"\n')
    with pytest.raises(UserError, match="another text of 'bf16'"):
        require_same(run, tmp_path)


def test_arms_of_a_seed_start_from_one_run_of_the_reference(tmp_path):
    experiment = forked()
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
        forked(fork=17)


def rows_file(folder, *rows):
    """A file of rows (arm, seed, rung, loss) at the lengths of the rungs."""
    made = [Row(arm, seed, rung, 256 * 8 * (20, 40)[rung - 1], x, x, "done") for arm, seed, rung, x in rows]
    (folder / "rows.csv").write_text(rows_text(made))
    return str(folder / "rows.csv")


def test_what_a_file_of_rows_has_is_not_trained_again_and_all_of_it_is_kept(tmp_path):
    file = rows_file(tmp_path, ("bf16", 3, 1, 3.0), ("bf16", 3, 2, 3.0), ("mxfp4", 3, 1, 3.5))
    other = Row("an-arm-of-before", 3, 1, 7, math.nan, math.nan, "diverged")
    (tmp_path / "rows.csv").write_text(rows_text([*read_rows(tmp_path / "rows.csv"), other]))
    left = remaining(forked(rows=file), tmp_path)
    trunks = [(run.arm, run.seed) for run in left if run.rung == 2]
    assert trunks == [("mxfp4", 3), ("bf16", 4), ("mxfp4", 4)]
    assert [run.name for run in left if run.rung == 0] == ["fork-seed-3", "fork-seed-4"]
    kept = collect_rows(forked(rows=file), tmp_path)
    assert rows_text(kept) == (tmp_path / "rows.csv").read_text()
    (tmp_path / "rows.csv").write_text(rows_text([Row("bf16", 3, 1, 999, 3.0, 3.0, "done")]))
    with pytest.raises(UserError, match="bf16, seed 3, rung 1 after 999 tokens"):
        remaining(forked(rows=file), tmp_path)


def test_an_experiment_whose_runs_are_all_rows_prints_its_results(tmp_path):
    arms = (("bf16", 3.0), ("mxfp4", 3.5))
    file = rows_file(tmp_path, *((a, seed, rung, x) for a, x in arms for seed in (3, 4) for rung in (1, 2)))
    shown = io.StringIO()
    found = run_experiment(forked(rows=file, probe=False), tmp_path / "out", Console(file=shown))
    assert found == ([], [], False)
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
