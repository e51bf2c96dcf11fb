"""Expected figures against published ones: `pytest -s` prints the error of each row.

`docs/plan.md` has the table, and why a row misses. Within 15 per cent is asked of the rows whose program
computes as this one does; the others are held to what they are, so that nothing drifts unseen.
"""

from pathlib import Path

import pytest

from support.published import FITS, LLMQ_ROWS, NARROW, WIDE

# Rows that miss: (least, most) of expected / published. Why is in docs/plan.md.
MISSES = {
    "torchao 8B, 8 H100": (1.10, 1.22),
    "FP8-LM 7B TE": (0.80, 0.90),
    "FP8-LM 13B TE": (0.80, 0.90),
    "FP8-LM 7B FP8": (1.10, 1.20),
    "FP8-LM 175B BF16": (1.20, 1.30),
    "FP8-LM 175B FP8": (1.35, 1.47),
    "FP8-LM 175B FP8, micro-batch 4": (1.73, 1.90),
    "torchtitan 8B, 32K tokens": (0.55, 0.65),
    "torchtitan 8B, 64K tokens": (0.65, 0.77),
    "llmq 7B b16 in 24 GB, all on the host": (1.52, 1.68),
}
PAGE = (Path(__file__).parents[3] / "docs" / "plan.md").read_text().splitlines()


def check(row):
    found = row.expected()
    ratio = found / row.size
    print(line := f"| {row.name} | {row.size:.1f} | {found:.1f} | {100 * (ratio - 1):+.0f} % |")
    assert line in PAGE, "docs/plan.md shows another figure, or leaves this row out"
    return ratio


def test_the_page_shows_every_row_and_no_other():
    rows = [*WIDE, *NARROW, *FITS, *LLMQ_ROWS]
    starts = {f"| {row.name} | {row.size:.1f} " for row in rows}
    assert len(starts) == len(rows)
    first = PAGE.index("| row | published | here | error |") + 2
    shown = PAGE[first : PAGE.index("", first)]
    assert {line.rpartition("|")[0].rpartition("|")[0].rpartition("|")[0] for line in shown} == starts
    assert len(shown) == len(rows)


def test_the_page_has_every_published_row_of_fp8_lm():
    """Table 5 of its paper has four a size; the worst of ours is among them."""
    names = [row.name for row in [*WIDE, *NARROW] if row.name.startswith("FP8-LM")]
    assert len(names) == 12


@pytest.mark.tier("thorough", keep=2)
@pytest.mark.parametrize("row", WIDE, ids=lambda row: row.name)
def test_wide_rows(row):
    least, most = MISSES.get(row.name, (0.85, 1.15))
    assert least <= check(row) <= most


@pytest.mark.parametrize("row", FITS, ids=lambda row: row.name)
def test_what_fitted_fits(row):
    assert check(row) <= 1


@pytest.mark.tier("nightly", keep=1)
@pytest.mark.tier("thorough")
@pytest.mark.parametrize("row", LLMQ_ROWS, ids=lambda row: row.name)
def test_llmq(row):
    """Its activations are bf16 throughout and fused; ours, with a float32 stream, take up to half more."""
    least, most = MISSES.get(row.name, (0.0, 1.5) if row.most else (0.85, 1.15))
    assert least <= check(row) <= most


@pytest.mark.tier("nightly", keep=2)
@pytest.mark.tier("thorough")
@pytest.mark.parametrize("row", NARROW, ids=lambda row: row.name)
def test_narrow_rows(row):
    least, most = MISSES.get(row.name, (0.85, 1.15))
    assert least <= check(row) <= most
