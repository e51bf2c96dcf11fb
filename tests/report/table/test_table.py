"""The rows and the notes, and how they look in terminals of several widths."""

import io

import pytest
from rich.console import Console

from narrowgauge.trainer.report import print_comparison, read_run, read_runs, table_notes, table_rows
from narrowgauge.trainer.report.verdict.verdict import gap_to

COLUMNS = "run, val loss, gap, verdict, train loss, tokens/s, memory, MFU, arithmetic, status"


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
