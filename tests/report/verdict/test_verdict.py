"""Verdicts over seeds: the arithmetic, the message if it cannot be done, and the part of held-out tokens."""

import io
import math
import random
import statistics

import pytest
from rich.console import Console

from narrowgauge.system.t_interval import interval, t_quantile
from narrowgauge.trainer.report import (
    print_comparison,
    read_runs,
    render_report,
    summary,
    table_notes,
    table_rows,
    verdicts,
)
from narrowgauge.trainer.report.table import kind_of
from narrowgauge.trainer.report.verdict.verdict import sampling_error

# two-sided 5 % points as every table prints them
TABLE = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 7: 2.365, 10: 2.228, 29: 2.045, 30: 2.042, 120: 1.980}
PARTS, TOKENS = 8, 16_384  # held out
FOUR = [4.0, 4.1, 4.2, 4.3]
LEFT_OUT = "fp8: seed {} has no equal tokens in bf16, and is left out."


def test_students_quantiles_are_those_of_the_tables():
    assert {degrees: round(t_quantile(degrees), 3) for degrees in TABLE} == TABLE
    widths = [found.high - found.low for found in map(interval, ([0.3, -0.1, 0.25, 0.4], [0.3]))]
    assert widths == pytest.approx([3.182446 * 0.217466, math.nan], rel=1e-5, nan_ok=True)


def test_gaps_are_paired_by_seed(make_run):
    base, gaps = [4.0, 5.0, 3.0], [1.0, 2.0, 1.5]
    paths = make_run.seeds("bf16", base, backend="native")
    paths += make_run.seeds("mxfp4", [b * (1 + g / 100) for b, g in zip(base, gaps, strict=True)])
    for i, path in enumerate(paths):
        speed = {"tokens_per_s": 1000.0 if i < 3 else 500.0}
        make_run.edit(path, lambda line, speed=speed: speed if "tokens_per_s" in line else {})
    reference, other = verdicts(read_runs(paths))
    assert (reference.name, reference.conclusion, [*reference.runs]) == ("bf16", "reference", [0, 1, 2])
    assert (other.name, other.conclusion, other.arithmetic) == ("mxfp4", "worse", "emulated")
    assert other.gap == pytest.approx(1.5)
    assert other.half_width == pytest.approx(4.302653 * statistics.stdev(gaps) / math.sqrt(3), rel=1e-6)
    assert other.tokens_per_s == pytest.approx(reference.tokens_per_s / 2)
    rows = table_rows(read_runs(paths))
    shown = {"gap": "+1.50 %", "95 % interval": "+0.26 .. +2.74 %", "tokens/s": "500* (0.50x)", "seeds": "3"}
    assert shown.items() <= rows[4].items()
    # the losses themselves spread by 25 %, and two means would tell nothing
    assert rows[0]["val loss"] == "4.0000 ± 1.0000"
    # each run is compared with the reference's run of its seed, and the reference's runs with none
    of_seeds = " ".join(row["gap"] for row in rows if kind_of(row) == "seed")
    assert of_seeds == "- - - +1.00 % +2.00 % +1.50 %"


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
def test_the_words_say_what_the_interval_allows(make_run, losses, words):
    runs = read_runs(make_run.seeds("bf16", [4.0, 5.0, 3.0]) + make_run.seeds("fp8", losses))
    assert verdicts(runs)[1].conclusion == words
    assert "nan" not in " ".join(" ".join(row.values()) for row in table_rows(runs))


def test_the_reference_once_more_is_a_control_and_none_of_the_family(make_run):
    """As noise that has no effect: experiment/test_statistics.py."""
    paths = make_run.seeds("bf16", [4.0, 5.0, 3.0]) + make_run.seeds("fp8", [4.04, 5.02, 3.03])
    two, again = (
        verdicts(read_runs([*paths, *make_run.seeds(third, [4.03, 5.01, 3.04])]))
        for third in ("mxfp8", "more/bf16")
    )
    assert [[v.judgement.family for v in found[1:]] for found in (two, again)] == [[2, 2], [1, 1]]
    assert again[1].half_width < two[1].half_width


def test_a_seed_without_a_partner_is_named_and_left_out(make_run):
    runs = read_runs(make_run.seeds("bf16", [4.0, 5.0]) + make_run.seeds("fp8", [4.04, 5.05, 9.0]))
    found = verdicts(runs)[1]
    assert ([*found.gaps], found.gap) == ([0, 1], pytest.approx(1.0))
    assert LEFT_OUT.format(2) in table_notes(runs)
    assert found.pair(2) is None


def test_a_pair_that_is_not_validated_yet_lends_no_train_gap_to_the_mean(make_run):
    paths = [*make_run.seeds("bf16", [4.0, 5.0]), *make_run.seeds("fp8", [4.04, 9.0])]
    for path in (paths[1], paths[3]):  # cut off before the first validation
        make_run.edit(path, lambda line: {} if line["step"] <= 1 else None)
        make_run.ends(path, "running")
    runs = read_runs(paths)
    found = verdicts(runs)[1]
    assert (found.gap, [*found.gaps], found.half_width) == (pytest.approx(1.0), [0], None)
    assert LEFT_OUT.format(1) in table_notes(runs)


def test_runs_of_other_settings_are_other_variants(make_run):
    paths = [*make_run.seeds("fp8", [4.0, 4.1]), make_run("fp8-long", steps=40)]
    found = verdicts(read_runs(paths))
    assert [(group.name, list(group.runs)) for group in found] == [("fp8", [0, 1]), ("fp8-long", [1])]
    again = [group.name for group in verdicts(read_runs([*paths, *make_run.seeds("again/fp8", [4.0])]))]
    assert again == ["runs/fp8", "fp8-long", "again/fp8"]


def test_what_does_not_compare_is_said(make_run):
    short, long = make_run("short", steps=100), make_run("long", steps=200)
    notes = " ".join(table_notes(read_runs([short, long])))
    assert "a gap compares only where both had the same learning rates until then" in notes
    assert "planned for 100, 200 steps" in notes
    make_run.append(short, '{"event": "resume", "step": 100, "corpus": "a1"}\n')
    make_run.append(long, '{"event": "resume", "step": 200, "corpus": "b2"}\n')
    notes = " ".join(table_notes(read_runs([short, long])))
    assert "their losses are of other tokens, and no gap counts" in notes


@pytest.mark.parametrize(
    ("failed", "conclusion", "loss"), [(4, "failed", None), (0, "nothing to compare", pytest.approx(4.04))]
)
def test_a_failed_seed_leaves_no_mean_of_those_that_were_lucky(make_run, failed, conclusion, loss):
    """Of the variant, or of the reference."""
    paths = [*make_run.seeds("bf16", [4.0, 5.0, 3.0]), *make_run.seeds("fp8", [4.04, 5.05, 3.03])]
    make_run.ends(paths[failed], "failed", "Diverged: it went up")
    runs = read_runs(paths)
    found = verdicts(runs)[1]
    assert (found.conclusion, found.gap, found.loss) == (conclusion, None, loss)
    text = " ".join(summary(runs))
    assert "ends worse" not in text
    assert ("Not compared with bf16: fp8 (a run of bf16 failed)." in text) == (failed == 0)
    assert not any("no equal tokens" in note for note in table_notes(runs))


def test_the_page_and_the_terminal_show_the_same_verdicts(make_run):
    runs = read_runs(make_run.seeds("bf16", [4.0, 5.0, 3.0]) + make_run.seeds("fp8", [4.04, 5.0, 3.03]))
    page, said = render_report(runs), io.StringIO()
    print_comparison(runs, Console(file=said, width=200))
    for row in table_rows(runs):
        for value in row.values():
            assert kind_of(row) == "seed" or value in said.getvalue()
            assert value.encode("ascii", "xmlcharrefreplace").decode() in page
    assert page.count('aria-label="All runs"') == 1, "one table"
    assert page.count('<tr class="seed">') == 6
    assert "fp8-seed-1" not in said.getvalue(), "in a terminal the variants are enough"


@pytest.fixture
def validated(make_run):
    """`validated(recipe, parts, seed)`: a run whose last validation had these losses on its parts."""

    def make(recipe, parts, seed=1, tokens=TOKENS):
        (path,) = make_run.seeds(recipe, [statistics.fmean(parts)], seed)
        make_run.set(path, "[validation]\n", "[validation]\nbatches = 8\n")
        make_run.last_validation(path, val_tokens=tokens, val_parts=parts)
        return path

    return make


def of_seeds(validated, count, luck, noise, shift=0.0):
    """Pairs of runs: parts as hard as each other, and the luck of a whole run on every part."""
    draw, paths, gaps = random.Random(1), [], []
    for seed in range(count):
        base = [4.0 + draw.gauss(0, 0.3) for _ in range(PARTS)]  # which parts are hard does not matter
        all_parts = shift + draw.gauss(0, luck)
        other = [loss + all_parts + draw.gauss(0, noise) for loss in base]
        paths += [validated("bf16", base, seed), validated("fp8", other, seed)]
        gaps.append(100 * (statistics.fmean(other) / statistics.fmean(base) - 1))
    return read_runs(paths), gaps


def test_the_error_is_the_deviation_of_seeds_that_differ_in_nothing_else(validated):
    runs, gaps = of_seeds(validated, 40, 0.0, 0.02, shift=0.01)
    found = sampling_error(verdicts(runs))
    assert found == pytest.approx(100 * 0.02 / math.sqrt(PARTS) / 4.0, rel=0.1)
    assert found == pytest.approx(statistics.stdev(gaps), rel=0.3)


def test_runs_on_other_tokens_or_without_parts_have_no_error(validated, make_run):
    other = read_runs([validated("bf16", FOUR), validated("fp8", FOUR[::-1], tokens=2 * TOKENS)])
    bare = read_runs([make_run("a", recipe="bf16", steps=20), make_run("b", steps=20)])
    assert [sampling_error(verdicts(runs)) for runs in (other, bare)] == [None, None]
    assert not any("held-out" in note for note in table_notes(bare))


def test_the_note_of_one_seed_says_what_more_tokens_do(validated):
    runs = [validated("bf16", FOUR), validated("fp8", [4.1, 4.1, 4.2, 4.4])]
    (note,) = [note for note in table_notes(read_runs(runs)) if "held-out" in note]
    assert note.startswith("The 16,384 held-out tokens alone make a gap deviate by 0.7 %; four times as many")


@pytest.mark.parametrize(("luck", "is_told"), [(0.0, True), (0.3, False)])
def test_several_seeds_are_told_only_if_the_tokens_are_most_of_it(validated, luck, is_told):
    runs, _ = of_seeds(validated, 6, luck, 0.1)
    assert any("most of what seeds deviate" in note for note in table_notes(runs)) == is_told
