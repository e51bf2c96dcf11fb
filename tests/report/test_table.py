"""Rows, notes and sentences: nothing is claimed that the seeds do not show, and a failure comes first."""

import io
import math

import pytest
from rich.console import Console

from narrowgauge.trainer.report import (
    print_comparison,
    read_run,
    read_runs,
    summary,
    table_notes,
    table_rows,
)
from narrowgauge.trainer.report.verdict.verdict import gap_to

COLUMNS = "run, val loss, gap, verdict, train loss, tokens/s, memory, MFU, arithmetic, status"
BASE = [4.0, 5.0, 3.0]
MANY = {f"r{i}": [4.0 + i / 100] for i in range(9)}
DIVERGED = ("failed", "Diverged: the loss went up")


@pytest.fixture
def runs(make_run):
    return read_runs(
        [
            make_run("bf16", recipe="bf16", backend="native", mfu=0.41),
            make_run("fp8", worse=0.05, mfu=0.2),
            make_run("mxfp4", recipe="mxfp4", worse=0.3, status="preempted"),
        ]
    )


def printed(runs, width):
    console = Console(file=io.StringIO(), width=width)
    print_comparison(runs, console)
    return console.file.getvalue()


def test_rows_hold_what_the_runs_say(runs):
    rows, (first, second, third) = table_rows(runs), runs
    assert ", ".join(rows[0]) == COLUMNS, "the gap beside the loss"
    assert [row["train loss"] for row in rows] == [f"{run.final_train_loss:.4f}" for run in runs]
    excess = 100 * (second.final_val_loss / first.final_val_loss - 1)
    assert [row["gap"] for row in rows[:2]] == ["reference", f"{excess:+.2f} %"]
    assert [row["memory"] for row in rows[:2]] == ["2.8 GiB", "2.8 GiB (1.00x)"]
    assert [row["verdict"] for row in rows] == ["reference", "open", "open (unfinished)"]
    assert (rows[2]["status"], third.status) == ("preempted", "preempted")
    assert "Each run saw 13.1 M tokens." in table_notes(runs)
    assert table_rows(runs[:1])[0]["tokens"] == "13.1 M"


def test_emulated_arithmetic_has_a_star_at_its_speed_and_no_mfu(runs):
    """It is not that of its formats, so no share of a peak means anything."""
    rows, notes = table_rows(runs), table_notes(runs)
    assert [row["MFU"] for row in rows] == ["41.0 %", "-", "-"]
    assert "*" not in rows[0]["tokens/s"]
    assert rows[1]["tokens/s"].endswith("* (1.00x)")
    assert any(note.startswith("* Emulated") for note in notes)
    assert "MFU is a share of 989 TFLOP/s, dense BF16 of an H100 SXM." in notes
    assert "mxfp4 was stopped: signal 15" in notes


def test_a_warm_up_with_a_spike_is_said_to_begin_in_chaos(make_run):
    """Otherwise only the width of the intervals shows it, after the seeds have been trained."""
    path = make_run("bf16", recipe="bf16")
    runs = read_runs([path, make_run("fp8")])
    assert not any("spikes" in note for note in table_notes(runs))
    make_run.edit(path, lambda line: {"grad_norm": 90.0} if line["step"] == 8 else {})
    (note,) = [note for note in table_notes([read_run(path), runs[1]]) if "spikes" in note]
    assert note.startswith("The gradient norm spikes in the warm-up of bf16, up to 30 times the median")
    assert "This comparison begins in chaos: pairs deviate by about 0.5 % whatever the format" in note
    assert "chaos" not in " ".join(table_notes([read_run(path)]))


@pytest.fixture
def curve(make_run, tmp_path):
    """`curve(name, losses)`: a run that recorded these and nothing else."""

    def write(name, losses, key="loss", every=100):
        (tmp_path / name).mkdir()
        make_run.write(
            tmp_path / name, [{"step": i, key: v, "tokens": every * i} for i, v in enumerate(losses, 1)]
        )
        return read_run(tmp_path / name)

    return write


def test_the_gap_is_taken_where_both_have_seen_equal_tokens(curve):
    first = curve("first", [5.0, 4.0, 3.0, 2.0], "val_loss")
    behind = curve("behind", [5.0, 4.4], "val_loss")
    elsewhere = curve("elsewhere", [5.0, 4.4], "val_loss", every=73)
    gap = gap_to(behind, first, by_validation=True)
    assert (gap.percent, gap.tokens, gap.is_final) == (pytest.approx(10.0), 200, False)
    assert [row["gap"] for row in table_rows([first, behind, elsewhere])[1:]] == ["+10.00 % at 200", "-"]


def test_without_validation_the_gap_is_of_mean_train_losses(curve):
    first = curve("first", [100.0] * 5 + [2.0] * 10)
    other = curve("other", [50.0] * 5 + [1.0] * 5 + [2.0] * 5)
    assert gap_to(other, first, by_validation=False).percent == pytest.approx(-25.0)
    assert any("train loss in percent" in note for note in table_notes([first, other]))


def test_a_lost_run_says_so_instead_of_a_number(curve):
    row = table_rows([curve("first", [2.0] * 12), curve("lost", [2.0] * 11 + [float("nan")])])[1]
    assert (row["train loss"], row["gap"]) == ("not finite", "not finite")


def test_columns_that_nobody_fills_are_left_out(make_run):
    young, untrained = make_run("young"), make_run("untrained")
    (young / "metrics.jsonl").unlink()
    assert table_rows([read_run(young)]) == [{"run": "young", "recipe": "fp8", "status": "done"}]
    make_run.write(untrained, [{"step": 0, "val_loss": 10.9}, {"step": 1, "loss": float("nan")}])
    run = read_run(untrained)
    assert run.final_val_loss is None, "the validation before training is no result"
    assert "val loss" not in table_rows([run])[0]


@pytest.mark.parametrize("width", [60, 80, 200])
def test_a_terminal_of_any_width_shows_every_number_unbroken(runs, width):
    text = printed(runs, width)
    for row in table_rows(runs):
        assert all(value in text for value in row.values()), text
    assert max(map(len, text.splitlines())) <= width


def test_a_name_that_looks_like_markup_is_printed_as_it_is(make_run):
    assert "[bold]x" in printed([read_run(make_run("[bold]x"))], 200)


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
