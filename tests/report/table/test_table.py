"""The rows and the notes, and how they look in terminals of several widths."""

import io
import json

import pytest
from rich.console import Console

from narrowgauge.report import print_comparison, read_run, read_runs, table_notes, table_rows
from narrowgauge.report.verdict.gap import gap_to
from narrowgauge.units import signed_percent


@pytest.fixture
def runs(make_run):
    return read_runs(
        [
            make_run("bf16", recipe="bf16", backend="native", mfu=0.41),
            make_run("fp8", worse=0.05),
            make_run("mxfp4", recipe="mxfp4", worse=0.3, status="preempted"),
        ]
    )


def rows_of(runs):
    return [row.cells for row in table_rows(runs)]


def printed(runs, width):
    console = Console(file=io.StringIO(), width=width)
    print_comparison(runs, console)
    return console.file.getvalue()


def test_rows_hold_what_the_runs_say(runs):
    rows = rows_of(runs)
    columns = "run, val loss, gap, verdict, train loss, tokens/s, memory, MFU, arithmetic, status"
    assert list(rows[0]) == columns.split(", "), "the gap beside the loss"
    first, second, third = rows
    assert first["train loss"] == f"{runs[0].final_train_loss:.4f}"
    assert first["gap"] == "reference"
    assert first["MFU"] == "41.0 %"
    assert second["MFU"] == "-"
    excess = 100 * (runs[1].final_val_loss / runs[0].final_val_loss - 1)
    assert second["gap"] == f"{excess:+.2f} %"
    assert first["memory"] == "2.8 GiB"
    assert first["memory"] == "2.8 GiB"
    assert second["memory"] == "2.8 GiB (1.00x)"
    assert third["status"] == "preempted"
    assert [row["verdict"] for row in rows] == ["reference", "open", "open (unfinished)"]
    assert "Each run saw 13.1 M tokens." in table_notes(runs)
    assert rows_of(runs[:1])[0]["tokens"] == "13.1 M"


def test_a_warm_up_with_a_spike_is_said_to_begin_in_chaos(make_run):
    """Otherwise only the width of the intervals shows it, after the seeds have been trained."""
    path = make_run("bf16", recipe="bf16")
    lines = (path / "metrics.jsonl").read_text().splitlines()
    at = next(i for i, line in enumerate(lines) if json.loads(line).get("step") == 8)
    spike = json.loads(lines[at]) | {"grad_norm": 90.0}
    runs = read_runs([path, make_run("fp8")])
    assert not any("spikes" in note for note in table_notes(runs))
    (path / "metrics.jsonl").write_text("\n".join([*lines[:at], json.dumps(spike), *lines[at + 1 :], ""]))
    (note,) = [note for note in table_notes([read_run(path), runs[1]]) if "spikes" in note]
    assert note.startswith("The gradient norm spikes in the warm-up of bf16, up to 30 times the median")
    assert "This comparison begins in chaos: pairs deviate by about 0.5 % whatever the format" in note
    assert "chaos" not in " ".join(table_notes([read_run(path)]))


def test_an_emulated_speed_carries_a_star_and_the_star_a_note(runs):
    rows = rows_of(runs)
    assert "*" not in rows[0]["tokens/s"]
    assert rows[1]["tokens/s"].endswith("* (1.00x)")
    assert any(note.startswith("* Emulated") for note in table_notes(runs))
    assert not any("Emulated" in note for note in table_notes(runs[:1]))


def test_an_emulated_run_has_no_mfu(make_run):
    """Its arithmetic is not that of its formats, so no share of a peak means anything."""
    runs = read_runs([make_run("bf16", recipe="bf16", backend="native", mfu=0.4), make_run("fp8", mfu=0.2)])
    assert [row["MFU"] for row in rows_of(runs)] == ["40.0 %", "-"]
    assert not any("MFU is" in note for note in table_notes(runs[1:]))


def test_notes_name_the_peak_and_the_reason(runs):
    notes = table_notes(runs)
    assert "MFU is a share of 989 TFLOP/s, dense BF16 of an H100 SXM." in notes
    assert "mxfp4 was stopped: signal 15" in notes
    assert not any("different numbers of tokens" in note for note in notes)


def test_different_peaks_are_one_note(make_run):
    paths = [make_run(name, backend="native", mfu=0.2) for name in "abc"]
    for path in paths[1:]:
        make_run.append(path, '{"event": "resume", "step": 200, "peak_source": "another peak"}\n')
    (note,) = [note for note in table_notes(read_runs(paths)) if note.startswith("MFU")]
    assert note == (
        "MFU does not compare here, since the runs have different yardsticks: "
        "989 TFLOP/s, dense BF16 of an H100 SXM (a); another peak (b, c)."
    )


def test_columns_that_nobody_fills_are_left_out(make_run):
    young = make_run("young")
    (young / "metrics.jsonl").unlink()
    assert rows_of([read_run(young)]) == [{"run": "young", "recipe": "fp8", "status": "done"}]


def write_losses(path, losses, key="loss", every=100):
    path.mkdir()
    lines = [f'{{"step": {i}, "{key}": {loss}, "tokens": {every * i}}}' for i, loss in enumerate(losses, 1)]
    (path / "metrics.jsonl").write_text("\n".join(lines))
    return read_run(path)


def test_the_gap_is_taken_where_both_have_seen_equal_tokens(tmp_path):
    first = write_losses(tmp_path / "first", [5.0, 4.0, 3.0, 2.0], "val_loss")
    behind = write_losses(tmp_path / "behind", [5.0, 4.4], "val_loss")
    elsewhere = write_losses(tmp_path / "elsewhere", [5.0, 4.4], "val_loss", every=73)
    gap = gap_to(behind, first, by_validation=True)
    assert (gap.percent, gap.tokens, gap.final) == (pytest.approx(10.0), 200, False)
    assert rows_of([first, behind, elsewhere])[1]["gap"] == "+10.00 % at 200"
    assert rows_of([first, behind, elsewhere])[2]["gap"] == "-"


def test_without_validation_the_gap_is_of_mean_train_losses(tmp_path):
    first = write_losses(tmp_path / "first", [100.0] * 5 + [2.0] * 10)
    other = write_losses(tmp_path / "other", [50.0] * 5 + [1.0] * 5 + [2.0] * 5)
    assert gap_to(other, first, by_validation=False).percent == pytest.approx(-25.0)
    assert any("train loss in percent" in note for note in table_notes([first, other]))


def test_a_lost_run_says_so_instead_of_a_number(tmp_path):
    first = write_losses(tmp_path / "first", [2.0] * 12)
    lost = write_losses(tmp_path / "lost", [2.0] * 11 + ["NaN"])
    row = rows_of([first, lost])[1]
    assert row["train loss"] == "not finite"
    assert row["gap"] == "not finite"


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_a_terminal_of_any_width_shows_every_number_unbroken(runs, width):
    text = printed(runs, width)
    for row in rows_of(runs):
        assert all(value in text for value in row.values()), text
    assert max(map(len, text.splitlines())) <= width


def test_a_name_that_looks_like_markup_is_printed_as_it_is(make_run):
    assert "[bold]x" in printed([read_run(make_run("[bold]x"))], 200)


@pytest.mark.parametrize(("percent", "text"), [(-0.0004, "0.00 %"), (0.0, "0.00 %"), (-0.006, "-0.01 %")])
def test_a_gap_that_rounds_to_nothing_has_no_sign(percent, text):
    assert signed_percent(percent) == text


def test_a_loss_that_was_measured_before_the_end_says_where(make_run):
    """A run that failed at step 25 was last validated at step 20."""
    path = make_run("lost", steps=20, status="failed")
    make_run.append(path, "".join(f'{{"step": {i}, "loss": NaN}}\n' for i in range(21, 26)))
    (row,) = rows_of([read_run(path)])
    assert row["val loss"].endswith(" at step 20")
    assert row["train loss"] == "not finite"


def test_the_validation_before_training_is_no_result(tmp_path):
    path = tmp_path / "failed"
    path.mkdir()
    (path / "metrics.jsonl").write_text('{"step": 0, "val_loss": 10.9}\n{"step": 1, "loss": NaN}\n')
    run = read_run(path)
    assert run.final_val_loss is None
    assert "val loss" not in rows_of([run])[0]
