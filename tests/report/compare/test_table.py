"""The rows and the notes, and how they look in terminals of several widths."""

import io

import pytest
from rich.console import Console

from narrowgauge.report import comparison_notes, comparison_rows, print_comparison, read_run, read_runs
from narrowgauge.report.compare.table import gap_to


@pytest.fixture
def runs(make_run):
    return read_runs(
        [
            make_run("bf16", recipe="bf16", backend="native", mfu=0.41),
            make_run("fp8", worse=0.05),
            make_run("mxfp4", recipe="mxfp4", worse=0.3, status="preempted"),
        ]
    )


def printed(runs, width):
    console = Console(file=io.StringIO(), width=width)
    print_comparison(runs, console)
    return console.file.getvalue()


def test_rows_hold_what_the_runs_say(runs):
    rows = comparison_rows(runs)
    columns = "run, recipe, arithmetic, tokens, train loss, val loss, gap, tokens/s, memory, MFU, status"
    assert list(rows[0]) == columns.split(", ")
    first, second, third = rows
    assert first["train loss"] == f"{runs[0].final_train_loss:.4f}"
    assert first["gap"] == "reference"
    assert first["MFU"] == "41.0 %"
    assert second["MFU"] == "-"
    excess = 100 * (runs[1].final_val_loss / runs[0].final_val_loss - 1)
    assert second["gap"] == f"{excess:+.2f} %"
    assert first["memory"] == "2.8 GiB"
    assert first["tokens"] == "13.1 M"
    assert third["status"] == "preempted"


def test_an_emulated_speed_carries_a_star_and_the_star_a_note(runs):
    rows = comparison_rows(runs)
    assert not rows[0]["tokens/s"].endswith("*")
    assert rows[1]["tokens/s"].endswith("*")
    assert any(note.startswith("* Emulated") for note in comparison_notes(runs))
    assert not any("Emulated" in note for note in comparison_notes(runs[:1]))


def test_notes_name_the_peak_and_the_reason(runs):
    notes = comparison_notes(runs)
    assert "MFU is a share of 989 TFLOP/s, dense BF16 of an H100 SXM." in notes
    assert "mxfp4 preempted: signal 15" in notes
    assert not any("different numbers of tokens" in note for note in notes)


def test_runs_with_different_peaks_are_named_with_theirs(make_run):
    a, b = make_run("a", mfu=0.2), make_run("b", mfu=0.3)
    make_run.append(b, '{"event": "resume", "step": 200, "peak_source": "another peak"}\n')
    notes = comparison_notes(read_runs([a, b]))
    assert "MFU of a: a share of 989 TFLOP/s, dense BF16 of an H100 SXM." in notes
    assert "MFU of b: a share of another peak." in notes


def test_columns_that_nobody_fills_are_left_out(make_run):
    young = make_run("young")
    (young / "metrics.jsonl").unlink()
    assert comparison_rows([read_run(young)]) == [
        {"run": "young", "recipe": "fp8", "arithmetic": "-", "status": "done"}
    ]


def write_losses(path, losses, key="loss", every=100):
    path.mkdir()
    lines = [f'{{"step": {i}, "{key}": {loss}, "tokens": {every * i}}}' for i, loss in enumerate(losses, 1)]
    (path / "metrics.jsonl").write_text("\n".join(lines))
    return read_run(path)


def test_the_gap_is_taken_where_both_have_seen_equal_tokens(tmp_path):
    first = write_losses(tmp_path / "first", [5.0, 4.0, 3.0, 2.0], "val_loss")
    behind = write_losses(tmp_path / "behind", [5.0, 4.4], "val_loss")
    elsewhere = write_losses(tmp_path / "elsewhere", [5.0, 4.4], "val_loss", every=73)
    gap = gap_to(behind, first)
    assert (gap.percent, gap.tokens, gap.final) == (pytest.approx(10.0), 200, False)
    assert comparison_rows([first, behind, elsewhere])[1]["gap"] == "+10.00 % at 200"
    assert comparison_rows([first, behind, elsewhere])[2]["gap"] == "-"


def test_without_validation_the_gap_is_of_mean_train_losses(tmp_path):
    first = write_losses(tmp_path / "first", [100.0] * 5 + [2.0] * 10)
    other = write_losses(tmp_path / "other", [50.0] * 5 + [1.0] * 5 + [2.0] * 5)
    assert gap_to(other, first).percent == pytest.approx(-25.0)
    assert any("train loss in percent" in note for note in comparison_notes([first, other]))


def test_a_lost_run_says_so_instead_of_a_number(tmp_path):
    first = write_losses(tmp_path / "first", [2.0] * 12)
    lost = write_losses(tmp_path / "lost", [2.0] * 11 + ["NaN"])
    row = comparison_rows([first, lost])[1]
    assert row["train loss"] == "not finite"
    assert row["gap"] == "not finite"


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_a_terminal_of_any_width_shows_every_number_unbroken(runs, width):
    text = printed(runs, width)
    for row in comparison_rows(runs):
        assert all(value in text for value in row.values()), text
    assert max(map(len, text.splitlines())) <= width


def test_a_name_that_looks_like_markup_is_printed_as_it_is(make_run):
    assert "[bold]x" in printed([read_run(make_run("[bold]x"))], 200)
