"""Verdicts over seeds: the arithmetic, and the message if it cannot be done."""

import io
import json
import math
import statistics

import pytest
from rich.console import Console

from narrowgauge.report import (
    print_comparison,
    read_runs,
    render_report,
    summary,
    table_notes,
    table_rows,
    verdicts,
)
from narrowgauge.report.verdict.groups import groups, references
from narrowgauge.t_interval import half_width, t_quantile

# two-sided 5 % points as every table prints them
TABLE = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 7: 2.365, 10: 2.228, 29: 2.045, 30: 2.042, 120: 1.980}


@pytest.mark.parametrize("degrees", TABLE)
def test_students_quantiles_are_those_of_the_tables(degrees):
    assert round(t_quantile(degrees), 3) == TABLE[degrees]


def test_the_interval_of_a_mean():
    gaps = [0.3, -0.1, 0.25, 0.4]
    assert half_width(gaps) == pytest.approx(3.182446 * 0.217466 / 2, rel=1e-5)
    assert half_width([0.3]) is None


@pytest.fixture
def seeded(make_run):
    """`seeded(recipe, losses)`: directories of a run for each seed, with this final validation loss."""

    def make(recipe, losses, backend="native", speed=1.0, first=0):
        paths = []
        for seed, loss in enumerate(losses, start=first):
            name = recipe if seed == 0 else f"{recipe}-seed-{seed}"
            path = make_run(name, recipe=recipe, backend=backend, steps=20)
            config = (path / "config.toml").read_text()
            assert "seed = 1\n" in config
            (path / "config.toml").write_text(config.replace("seed = 1\n", f"seed = {seed}\n"))
            lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
            for line in lines:
                if "val_loss" in line and line["step"] == 20:
                    line["val_loss"] = loss
                if "tokens_per_s" in line:
                    line["tokens_per_s"] = 1000.0 * speed
            (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
            paths.append(path)
        return paths

    return make


def test_gaps_are_paired_by_seed(seeded):
    base, shift = [4.0, 5.0, 3.0], [1.01, 1.02, 1.015]
    paths = seeded("bf16", base)
    paths += seeded("mxfp4", [b * s for b, s in zip(base, shift, strict=True)], "emulated", speed=0.5)
    reference, other = verdicts(read_runs(paths))
    assert (reference.name, reference.conclusion, reference.seeds) == ("bf16", "reference", (0, 1, 2))
    assert (other.name, other.conclusion, other.arithmetic) == ("mxfp4", "worse", "emulated")
    gaps = [1.0, 2.0, 1.5]
    assert other.gap == pytest.approx(1.5)
    assert other.half_width == pytest.approx(4.302653 * statistics.stdev(gaps) / math.sqrt(3), rel=1e-6)
    # the losses themselves spread by 25 %, and two means would tell nothing
    assert reference.loss_deviation == pytest.approx(1.0)
    assert other.speed == pytest.approx(0.5)
    assert other.memory == pytest.approx(1.0)
    rows = table_rows(read_runs(paths))
    row = rows[4].cells
    assert row["gap"] == "+1.50 %"
    assert row["95 % interval"] == "+0.26 .. +2.74 %"
    assert row["tokens/s"] == "500* (0.50x)"
    assert row["seeds"] == "3"
    # each run is compared with the reference's run of its seed, and the reference's runs with none
    assert [r.cells["gap"] for r in rows if r.is_seed] == ["-", "-", "-", "+1.00 %", "+2.00 %", "+1.50 %"]


@pytest.mark.parametrize(
    ("losses", "words"),
    [
        ([4.02, 4.9, 3.03], "no difference seen"),
        ([3.9, 4.9, 2.93], "better"),
        ([4.0, 5.0, 3.0], "equal"),
        ([4.0, math.nan, 3.0], "not finite"),
        ([4.02], "open"),
    ],
)
def test_the_words_say_what_the_interval_allows(seeded, losses, words):
    runs = read_runs(seeded("bf16", [4.0, 5.0, 3.0]) + seeded("fp8", losses))
    assert verdicts(runs)[1].conclusion == words
    assert "nan" not in " ".join(" ".join(row.cells.values()) for row in table_rows(runs))


def test_two_seeds_that_agree_by_luck_prove_nothing(seeded):
    """The plan of two seeds sees a gap of 6 %, so a gap of 0.01 % gives no verdict."""
    paths = seeded("bf16", [4.0, 5.0]) + seeded("mxfp8", [4.0004, 5.0006])
    runs = read_runs(paths)
    assert verdicts(runs)[1].conclusion == "no difference seen"
    assert "worse" not in " ".join(summary(runs))
    assert any("raised towards what is known" in note for note in table_notes(runs))


def test_intervals_hold_for_all_variants_at_once_and_a_control_is_none_of_them(seeded):
    paths = seeded("bf16", [4.0, 5.0, 3.0]) + seeded("fp8", [4.04, 5.02, 3.03])
    two = verdicts(read_runs([*paths, *seeded("mxfp8", [4.03, 5.01, 3.04])]))
    null = verdicts(read_runs([*paths, *seeded("null-dither", [4.03, 5.01, 3.04])]))
    assert [v.judgement.family for v in two[1:]] == [2, 2]
    assert [v.judgement.family for v in null[1:]] == [1, 1]
    assert null[2].is_control
    assert null[1].half_width < two[1].half_width
    repeated = seeded("more/bf16", [4.03, 5.01, 3.04])
    for path in repeated:
        config = (path / "config.toml").read_text()
        (path / "config.toml").write_text(config.replace("more/bf16", "bf16"))
    again = verdicts(read_runs([*paths, *repeated]))
    assert [v.is_control for v in again] == [False, False, True], "the reference once more"


def test_one_seed_has_a_gap_and_plainly_no_interval(seeded):
    runs = read_runs(seeded("bf16", [4.0]) + seeded("fp8", [4.04]))
    cells = table_rows(runs)[1].cells
    assert (cells["gap"], cells["verdict"]) == ("+1.00 %", "open")
    assert "95 % interval" not in cells
    assert any(note.startswith("A gap of one seed has no confidence interval") for note in table_notes(runs))


def test_a_seed_without_a_partner_is_named_and_left_out(seeded):
    runs = read_runs(seeded("bf16", [4.0, 5.0]) + seeded("fp8", [4.04, 5.05, 9.0]))
    found = verdicts(runs)
    assert found[1].paired == (0, 1)
    assert found[1].gap == pytest.approx(1.0)
    assert "fp8: seed 2 has no equal tokens in bf16, and is left out." in table_notes(runs)
    assert id(runs[4]) not in references(groups(runs))


def test_runs_of_other_settings_are_other_variants(seeded, make_run):
    paths = [*seeded("fp8", [4.0, 4.1]), make_run("fp8-long", recipe="fp8", steps=40)]
    assert [(group.name, list(group.runs)) for group in groups(read_runs(paths))] == [
        ("fp8", [0, 1]),
        ("fp8-long", [1]),
    ]
    again = [group.name for group in groups(read_runs([*paths, *seeded("again/fp8", [4.0])]))]
    assert again == ["runs/fp8", "fp8-long", "again/fp8"]


def until(path, step):
    """Cut the record of a run off after a step, as of one that is at work."""
    lines = (path / "metrics.jsonl").read_text().splitlines(keepends=True)
    kept = [line for line in lines if json.loads(line)["step"] <= step]
    (path / "metrics.jsonl").write_text("".join(kept))
    (path / "status.json").write_text('{"status": "running", "reason": ""}')


def test_a_pair_that_is_not_validated_yet_lends_no_train_gap_to_the_mean(seeded, make_run):
    paths = [*seeded("bf16", [4.0, 5.0]), *seeded("fp8", [4.04, 9.0])]
    for path in (paths[1], paths[3]):
        until(path, 1)  # validated every two steps
    runs = read_runs(paths)
    found = verdicts(runs)[1]
    assert (found.gap, found.paired, found.half_width) == (pytest.approx(1.0), (0,), None)
    assert "fp8: seed 1 has no equal tokens in bf16, and is left out." in table_notes(runs)


def test_verdict_without_validation_compares_train_losses_and_reports_it(make_run):
    bare, other = make_run("bf16", recipe="bf16"), make_run("fp8", worse=0.4)
    lines = [json.loads(line) for line in (bare / "metrics.jsonl").read_text().splitlines()]
    kept = [{k: v for k, v in line.items() if k != "val_loss"} for line in lines]
    (bare / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept))
    runs = read_runs([bare, other])
    assert any(note.startswith("Gap: train loss in percent") for note in table_notes(runs))
    assert "The gaps in train loss to bf16: fp8" in " ".join(summary(runs))


def test_a_reference_that_is_no_longer_finite_is_not_held_against_the_others(seeded):
    runs = read_runs(seeded("bf16", [math.nan]) + seeded("fp8", [4.0]) + seeded("mxfp4", [math.nan]))
    text = " ".join(summary(runs))
    assert "Not compared, for a loss of bf16 is NaN or infinite: fp8." in text
    assert "No longer finite: mxfp4 (a loss is NaN or infinite)." in text


def test_what_does_not_compare_is_said(make_run):
    short, long = make_run("short", steps=100), make_run("long", steps=200)
    notes = " ".join(table_notes(read_runs([short, long])))
    assert "a gap compares only where both had the same learning rates until then" in notes
    assert "planned for 100, 200 steps" in notes
    make_run.append(short, '{"event": "resume", "step": 100, "corpus": "a1"}\n')
    make_run.append(long, '{"event": "resume", "step": 200, "corpus": "b2"}\n')
    notes = " ".join(table_notes(read_runs([short, long])))
    assert "their losses are of other tokens, and no gap counts" in notes


def test_a_failed_seed_leaves_no_mean_of_those_that_were_lucky(seeded):
    paths = seeded("bf16", [4.0, 5.0]) + seeded("fp8", [4.04, 5.05])
    (paths[3] / "status.json").write_text('{"status": "failed", "reason": "Diverged: it went up"}')
    found = verdicts(read_runs(paths))[1]
    assert (found.conclusion, found.gap, found.loss) == ("failed", None, None)


def test_a_failed_seed_of_the_reference_leaves_no_mean_either(seeded):
    paths = [*seeded("bf16", [4.0, 5.0, 3.0]), *seeded("fp8", [4.04, 5.05, 3.03])]
    (paths[0] / "status.json").write_text('{"status": "failed", "reason": "Diverged: it went up"}')
    runs = read_runs(paths)
    found = verdicts(runs)[1]
    assert (found.conclusion, found.gap) == ("nothing to compare", None)
    assert found.loss == pytest.approx(4.04)
    text = " ".join(summary(runs))
    assert "ends worse" not in text
    assert "Not compared with bf16, of which a run failed: fp8." in text
    assert not any("no equal tokens" in note for note in table_notes(runs))


def test_the_page_and_the_terminal_show_the_same_verdicts(seeded):
    runs = read_runs(seeded("bf16", [4.0, 5.0, 3.0]) + seeded("fp8", [4.04, 5.0, 3.03]))
    page, said = render_report(runs), io.StringIO()
    print_comparison(runs, Console(file=said, width=200))
    for row in table_rows(runs):
        for value in row.cells.values():
            assert row.is_seed or value in said.getvalue()
            assert value.encode("ascii", "xmlcharrefreplace").decode() in page
    assert page.count('<table class="runs">') == 1, "one table"
    assert page.count('<tr class="seed">') == 6
    assert "fp8-seed-1" not in said.getvalue(), "in a terminal the variants are enough"
