"""The result in sentences: nothing is claimed that the seeds do not show, and a failure comes first."""

import math

import pytest

from narrowgauge.trainer.report import read_runs, summary

BASE = [4.0, 5.0, 3.0]
MANY = {f"r{i}": [4.0 + i / 100] for i in range(9)}
DIVERGED = ("failed", "Diverged: the loss went up")


def told(make_run, **losses):
    """The sentences on runs of these final losses, a run for each seed."""
    return " ".join(summary(read_runs([p for r, of in losses.items() for p in make_run.seeds(r, of)])))


@pytest.mark.parametrize(
    ("losses", "sentence"),
    [
        (
            {"bf16": BASE, "mxfp4": [4.04, 5.1, 3.045], "mxfp8": [4.01, 4.99, 3.003]},
            "mxfp4 ends worse than bf16: +1.50 % validation loss (95 % interval +0.49 .. +2.51 %, 3 seeds). "
            "No difference from bf16 is proven for mxfp8 (+0.05 %, 95 % interval -0.96 .. +1.06 %, 3 seeds).",
        ),
        (
            {"bf16": [4.0], "mxfp4": [3.9], "mxfp8": [4.1]},
            "Open: one seed proves no difference. The gaps in validation loss to bf16: mxfp4 (-2.50 %), "
            "mxfp8 (+2.50 %).",
        ),
        ({"bf16": [4.0]} | MANY, "r8 (+2.00 %), r7 (+1.75 %), r6 (+1.50 %), r5 (+1.25 %), and 5 more."),
        (
            {"bf16": [math.nan], "fp8": [4.0], "mxfp4": [math.nan]},
            "Not compared with bf16: fp8 (bf16's loss is NaN or infinite), mxfp4 (its loss is NaN or "
            "infinite).",
        ),
    ],
    ids=["intervals", "one seed", "many variants", "a lost reference"],
)
def test_sentence_states_a_difference_only_if_its_interval_excludes_zero(make_run, losses, sentence):
    assert told(make_run, **losses).endswith(sentence)


def test_what_failed_is_said_first_and_with_its_reason(make_run):
    good, bad = make_run("bf16", recipe="bf16"), make_run("fp4", recipe="fp4", steps=50)
    make_run.ends(bad, *DIVERGED)
    assert summary(read_runs([good, bad])) == [
        "fp4 failed after step 50 of 50: the loss went up.",
        "Nothing can be compared with bf16.",
    ]


def test_a_failed_run_tells_no_loss_of_weights_that_were_never_trained(make_run):
    path = make_run(recipe="fp16", steps=40)
    make_run.ends(path, "failed", "Diverged: 11 steps in a row")
    lines = ({"step": 0, "val_loss": 10.9}, {"step": 1, "loss": 5.25}, {"step": 2, "loss": math.nan})
    make_run.write(path, lines)
    assert summary(read_runs([path])) == [
        "The run failed after step 2 of 40: 11 steps in a row.",
        "Recipe fp16: the last finite train loss is 5.2500, of step 1.",
    ]


def test_runs_that_have_not_come_to_their_end_are_named(make_run):
    stopped = make_run("stopped", status="preempted")
    assert "It was stopped after step 200 of 200 (signal 15)." in summary(read_runs([stopped]))
    paths = [make_run("bf16", recipe="bf16"), *(make_run(name, status="running") for name in "abcdef")]
    assert summary(read_runs(paths))[-1] == "Not finished: a, b, c, d, and 2 more."
    make_run.write(paths[1], make_run.records(paths[1])[:1])
    text = " ".join(summary(read_runs(paths[:2])))
    assert "Not compared with bf16: a (one of the two has not come far enough)." in text
