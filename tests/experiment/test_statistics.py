"""Gaps, verdicts, extra tokens and contrasts against what can be computed by hand."""

import io
import math
import random

import pytest
from rich.console import Console

from narrowgauge.system.t_interval import interval
from narrowgauge.trainer.report import print_comparison
from narrowgauge.trainer.report.page.rungs import rungs_section, rungs_svg
from narrowgauge.trainer.report.read.stored import Probe
from narrowgauge.trainer.report.verdict import verdict
from narrowgauge.trainer.report.verdict.verdict import Row, extra_tokens, read_rows, row_verdicts
from publish.contrasts import ratio_interval


def rows_of(gaps, deviation=0.05, seeds=5):
    """Rows of arms whose gap in percent at rungs 1 and 2 is given; the reference's loss falls as D^-0.1."""
    rng, rows = random.Random(3), []
    base = {seed: rng.gauss(0, 0.02) for seed in range(seeds)}
    for arm, at in {"bf16": (0.0, 0.0), **gaps}.items():
        for seed in base:
            for rung, tokens in ((1, 1000), (2, 4000)):
                gap = at[rung - 1] + (rng.gauss(0, deviation) if arm != "bf16" else 0.0)
                loss = (4 + base[seed]) * tokens**-0.1 * (1 + gap / 100)
                rows.append(Row(arm, seed, rung, tokens, loss, loss, "done"))
    return rows


def verdicts(rows, rung=2, **options):
    return {result.name: result.conclusion for result in row_verdicts(rows, **options) if result.rung == rung}


def test_verdicts_of_arms_that_are_equal_worse_unknown_or_diverged():
    rows = rows_of({"same": (0, 0), "worse": (1, 1.5), "little": (0.15, 0.15)}, deviation=0.02)
    rows += rows_of({"noisy": (0.3, 0.3)}, deviation=1.0)[10:] + rows_of({"fragile": (0.5, 0.5)})[10:]
    rows[-1] = Row("fragile", 4, 2, 4000, math.nan, math.nan, "diverged")
    assert verdicts(rows) == {
        "same": "equal within 0.25 %",
        "worse": "worse",
        "little": "worse, within 0.25 %",
        "noisy": "no difference seen",
        "fragile": "diverges",
    }
    last = row_verdicts(rows)[-1]
    assert (last.diverged, len(last.gaps)) == (1, 4), "its seed is no gap"


def test_a_control_is_no_arm_of_the_family_and_widens_no_interval():
    """Two verdicts of the first page hung on the null arm, which was counted among the arms."""
    gaps = {"mxfp8": (0.1, 0.1), "nvfp4": (0.5, 0.5), "bf16-again": (0, 0), "null-dither": (0, 0)}
    found = {one.name: one.judgement for one in row_verdicts(rows_of(gaps)) if one.rung == 2}
    sizes = {"mxfp8": 2, "nvfp4": 2, "bf16-again": 1, "null-dither": 1}
    assert {arm: one.family for arm, one in found.items()} == sizes
    assert len({one.spread for one in found.values()}) == 1
    planned = row_verdicts(rows_of(gaps), family=["mxfp8", "nvfp4", "fp4"])
    assert planned[0].judgement.family == 3, "the plan fixes the family, whatever was run"


def test_two_seeds_of_a_ladder_that_agree_by_luck_prove_nothing():
    rows = rows_of({"mxfp8": (0.01, 0.01)}, deviation=0.001, seeds=2)
    assert verdicts(rows, parameters=1000) == {"mxfp8": "no difference seen"}
    assert verdicts(rows, parameters=1000, undecided="open") == {"mxfp8": "open"}
    assert verdicts(rows[:2] + rows[4:6]) == {"mxfp8": "open"}, "one seed"


def test_a_share_has_fiellers_interval():
    """For every ratio inside it, Student's t does not refuse that part - ratio x whole is zero."""
    part, whole = [0.9, 1.2, 1.0, 1.4], [1.1, 1.3, 1.3, 1.4]
    share = ratio_interval(part, whole)
    for end in (share.low, share.high):
        rest = [x - end / 100 * y for x, y in zip(part, whole, strict=True)]
        found = interval(rest)
        assert min(abs(found.low), abs(found.high)) == pytest.approx(0, abs=1e-9)
    assert share.low < share.mean < share.high
    assert math.isnan(ratio_interval(part, [0.1, -0.1, 0.2, -0.1]).low), "a whole that may be zero"


def test_extra_tokens_follow_the_references_own_curve():
    curve = [(1000, 2.0), (4000, 1.0)]
    for tokens in (500, 1000, 2000, 4000, 8000):  # inside the rungs, and along the line beyond them
        loss = 2.0 * (tokens / 1000) ** -0.5
        assert extra_tokens(loss, 4000, curve) == pytest.approx(100 * (4000 / tokens - 1))
    assert math.isnan(extra_tokens(1.0, 4000, [(4000, 1.0)]))
    results = row_verdicts(rows_of({"late": (1.0, 1.0)}, deviation=0.0))
    assert results[-1].extra[0] == pytest.approx(100 * (1.01**10 - 1))


def test_a_csv_comes_back_and_another_file_is_refused(tmp_path):
    rows = rows_of({"mxfp4": (1.0, 2.0)})
    rows.append(Row("mxfp4", 9, 1, 1000, math.nan, math.nan, "diverged"))
    file = tmp_path / "runs.csv"
    file.write_text(verdict.rows_text(rows))
    assert verdict.rows_text(read_rows(file)) == file.read_text()
    assert file.read_text().splitlines()[-1] == "mxfp4,9,1,1000,,,diverged"
    file.write_text(",".join(verdict.COLUMNS) + "\nbf16,0,1\n")
    with pytest.raises(Exception, match="line 2"):
        read_rows(file)


def test_the_reference_of_a_ladder_at_work_is_that_of_its_plan():
    """Its runs may end later than other arms', which then stand in the first rows."""
    rows = [row for row in rows_of({"fp8": (0.1, 0.1), "mxfp4": (1.0, 1.0)}) if row.arm != "bf16"]
    assert row_verdicts(rows, "bf16") == []


def test_a_page_escapes_names_and_a_narrow_terminal_shows_every_figure():
    rows = rows_of({"<b>": (1.0, 2.0), "far": (20.0, 30.0)})
    probed = Probe(recipes={"far": {"effective_bits": {"mean": 3.1}}})
    page = rungs_section(rows, row_verdicts(rows), 500, probed)
    assert "&lt;b&gt;" in page
    assert "<b>" not in page
    assert "3.1" in page
    svg = rungs_svg(row_verdicts(rows), 500, "bf16")
    assert svg == rungs_svg(row_verdicts(rows), 500, "bf16")
    assert "+30.0 % →" in svg
    assert "← -20.0 %" in rungs_svg(row_verdicts(rows_of({"low": (-20.0, -20.0)}, 0.001)), 500, "bf16")
    assert "nan" not in svg
    text = io.StringIO()
    print_comparison([], Console(file=text, width=50), row_verdicts(rows_of({"mxfp8": (0.1, 0.1)})))
    lines = {line.split("  ")[0]: line.split() for line in text.getvalue().splitlines()}
    assert lines["tokens"][1:] == ["1.00", "k", "4.00", "k"]
    assert {"95 % interval", "bf16 forward", "extra tokens", "verdict"} <= set(lines)
