"""Expected speeds against published ones: docs/plan.md shows every row.

The best of a row is kept in the file of its machine, which these tests hold to the estimate. What is expected
of a row comes from the *other* runs of its machine, because a row cannot confirm itself.
"""

from pathlib import Path

import pytest

from narrowgauge.cluster import cluster_names, load_cluster
from narrowgauge.cluster.plan.expect import expectation
from support.published_speed import ROWS, of_machine

PAGE = (Path(__file__).parents[3] / "docs" / "plan.md").read_text().splitlines()
HEAD = "| published run | tokens/s/device | plan, at best | expect | error |"
QUICK = ("llmq 0.5B, 1 RTX 4090, bf16", "llm.c 124M, 8 A100", "FSDP1 8B, 64 nodes of Frontier, 2024-09-05")


def line(row):
    """The row as docs/plan.md shows it."""
    cluster = load_cluster(row.cluster)
    (of_itself,) = (run for run in cluster.measured if run.run == row.name)
    others = tuple(run for run in cluster.measured if run is not of_itself)
    expected = expectation(others, row.devices, row.parameters, of_itself.format)
    at_best = of_itself.at_best
    told = "| |"
    if expected is not None:
        speed = at_best * expected.share
        told = f"{speed:,.0f} | {100 * (speed / row.tokens_per_s - 1):+.0f} % |"
    return f"| {row.name} | {row.tokens_per_s:,.0f} | {at_best:,.0f} | {told}"


def test_the_page_shows_every_row_and_no_other():
    first = PAGE.index(HEAD) + 2
    assert PAGE[first : PAGE.index("", first)] == [line(row) for row in ROWS]


@pytest.mark.parametrize("name", cluster_names())
def test_the_files_hold_these_runs(name):
    kept = load_cluster(name).measured
    assert [(run.run, run.devices, run.tokens_per_s, run.source) for run in kept] == [
        (row.name, row.devices, row.tokens_per_s, row.source) for row in of_machine(name)
    ]


@pytest.mark.tier("thorough", keep=("llm.c 124M, 8 A100", "llmq 0.5B, 1 RTX 4090, bf16"))
@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, marks=[] if row.name in QUICK else [pytest.mark.tier("nightly")], id=row.name)
        for row in ROWS
    ],
)
def test_the_best_is_what_the_estimate_says(row):
    (kept,) = (run for run in load_cluster(row.cluster).measured if run.run == row.name)
    assert row.at_best == pytest.approx(kept.at_best, rel=0.01)
    assert row.time.format == kept.format
