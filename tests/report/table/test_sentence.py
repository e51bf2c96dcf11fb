"""The result in sentences: nothing is claimed that the seeds do not show, and a failure comes first."""

import json

import pytest

from narrowgauge.report import read_runs, summary

BASE = [4.0, 5.0, 3.0]


@pytest.fixture
def told(make_run):
    """`told(recipe=losses, ...)`: the sentences on runs of these final losses, a run for each seed."""

    def tell(**losses_by_recipe):
        paths = []
        for recipe, losses in losses_by_recipe.items():
            for seed, loss in enumerate(losses):
                path = make_run(f"{recipe}-seed-{seed}", recipe=recipe, steps=20)
                config = (path / "config.toml").read_text().replace("seed = 1\n", f"seed = {seed}\n")
                (path / "config.toml").write_text(config)
                make_run.append(path, json.dumps({"step": 20, "val_loss": loss}) + "\n")
                paths.append(path)
        return " ".join(summary(read_runs(paths)))

    return tell


def test_sentence_states_a_difference_only_if_its_interval_excludes_zero(told):
    text = told(bf16=BASE, mxfp4=[4.04, 5.1, 3.045], mxfp8=[4.01, 4.99, 3.003])
    assert (
        "mxfp4 ends worse than bf16: +1.50 % validation loss (95 % interval +0.49 .. +2.51 %, 3 seeds)."
        in text
    )
    assert (
        "No difference from bf16 is proven for mxfp8 (+0.05 %, 95 % interval -0.96 .. +1.06 %, 3 seeds)."
        in text
    )


def test_one_seed_is_called_open_and_no_run_the_lowest(told):
    text = told(bf16=[4.0], mxfp4=[3.9], mxfp8=[4.1])
    assert text == (
        "Open: one seed proves no difference. The gaps in validation loss to bf16: mxfp4 (-2.50 %), "
        "mxfp8 (+2.50 %)."
    )
    assert "lowest" not in text


def test_of_many_variants_the_widest_gaps_are_named(told):
    text = told(bf16=[4.0], **{f"r{i}": [4.0 + i / 100] for i in range(9)})
    assert text.endswith("r8 (+2.00 %), r7 (+1.75 %), r6 (+1.50 %), r5 (+1.25 %), and 5 more.")


def test_what_failed_is_said_first_and_with_its_reason(make_run):
    good, bad = make_run("bf16", recipe="bf16"), make_run("fp4", recipe="fp4", steps=50)
    (bad / "status.json").write_text('{"status": "failed", "reason": "Diverged: the loss went up"}')
    first, second = summary(read_runs([good, bad]))
    assert first == "fp4 failed after step 50 of 50: the loss went up."
    assert second == "Nothing can be compared with bf16."


def test_a_failed_run_tells_no_loss_of_weights_that_were_never_trained(tmp_path):
    path = tmp_path / "run"
    path.mkdir()
    (path / "config.toml").write_text('[training]\nsteps = 40\n[recipe]\nname = "fp16"\n')
    (path / "status.json").write_text('{"status": "failed", "reason": "Diverged: 11 steps in a row"}')
    (path / "metrics.jsonl").write_text(
        '{"step": 0, "val_loss": 10.9}\n{"step": 1, "loss": 5.25}\n{"step": 2, "loss": NaN}\n'
    )
    assert summary(read_runs([path])) == [
        "The run failed after step 2 of 40: 11 steps in a row.",
        "Recipe fp16: the last finite train loss is 5.2500, of step 1.",
    ]


def test_a_run_that_was_stopped_says_where(make_run):
    (text,) = [s for s in summary(read_runs([make_run(status="preempted")])) if "stopped" in s]
    assert text == "It was stopped after step 200 of 200 (signal 15)."


def test_a_run_that_has_not_come_far_enough_lacks_no_seed(make_run):
    good, early = make_run("bf16", recipe="bf16"), make_run("fp8", recipe="fp8", status="preempted")
    (early / "metrics.jsonl").write_text((early / "metrics.jsonl").read_text().splitlines()[0] + "\n")
    text = " ".join(summary(read_runs([good, early])))
    assert "Not compared with bf16 yet, since one of the two has not come far enough: fp8." in text
    assert "seed" not in text


def test_unfinished_runs_are_named(make_run):
    paths = [make_run("bf16", recipe="bf16"), *(make_run(name, status="running") for name in "abcdef")]
    assert summary(read_runs(paths))[-1] == "Not finished: a, b, c, d, and 2 more."
    assert summary(read_runs(paths[:2]))[-1] == "Not finished: a."
