"""Expected memory and speeds against published ones; `docs/plan.md` shows every row, and why one misses.

`pytest -s` prints the error of each row of memory; the page holds it, so that nothing drifts unseen. The best
speed of a row is kept in the file of its machine, which the estimate is held to. What is expected of a row
comes from the *other* runs of its machine, because a row cannot confirm itself.
"""

import pytest

from narrowgauge.trainer.cluster.plan.cluster_spec import cluster_names, load_cluster
from narrowgauge.trainer.cluster.plan.estimate import expectation
from support.published import MEMORY, ROOT, SPEEDS

QUICK = ("FP8-LM 7B BF16", "Frontier 8B, 512 GCDs, 4 x 8192 in 64 GB")
MORE = ("FP8-LM 7B FP8", "torchtitan 8B, 32K tokens", "llmq 0.5B b8, block recompute")
QUICK_SPEEDS = ("llmq 0.5B, 1 RTX 4090, bf16", "llm.c 124M, 8 A100")
MORE_SPEEDS = ("FSDP1 8B, 64 nodes of Frontier, 2024-09-05",)
PAGE = (ROOT / "docs" / "plan.md").read_text().splitlines()


def shown(head):
    """The rows of a table of the page, by their first cells."""
    first = PAGE.index(head) + 2
    return {line.split(" | ")[0][2:]: line for line in PAGE[first : PAGE.index("", first)]}


SHOWN = shown("| row | published | here | error |")


@pytest.mark.tier("thorough", keep=QUICK, nightly=(*QUICK, *MORE))
@pytest.mark.parametrize("row", MEMORY, ids=lambda row: row.name)
def test_published_memory(row):
    published = float(SHOWN[row.name].split(" | ")[1])
    found = row.step.memory.peak / (10**9 if row.name.startswith("FP8-LM") else 2**30)
    print(line := f"| {row.name} | {published} | {found:.1f} | {100 * (found / published - 1):+.0f} % |")
    assert line == SHOWN[row.name]


def test_the_page_shows_every_row_and_no_other():
    """Among them the worst: all twelve rows of table 5 of FP8-LM."""
    assert set(SHOWN) == {row.name for row in MEMORY}
    assert sum(name.startswith("FP8-LM") for name in SHOWN) == 12
    head = "| published run | tokens/s/device | plan, at best | expect | error |"
    assert list(shown(head).values()) == [speed_line(row) for row in SPEEDS]


def speed_line(row):
    """The row as docs/plan.md shows it."""
    own = row.measured
    others = tuple(run for run in load_cluster(row.cluster).measured if run != own)
    expected = expectation(others, own.devices, row.parameters, own.format)
    told = "| |"
    if expected is not None:
        speed = own.at_best * expected.share
        told = f"{speed:,.0f} | {100 * (speed / own.tokens_per_s - 1):+.0f} % |"
    return f"| {row.name} | {own.tokens_per_s:,.0f} | {own.at_best:,.0f} | {told}"


def test_each_run_of_the_machines_files_has_settings():
    kept = {run.run for name in cluster_names() for run in load_cluster(name).measured}
    assert kept == {row.name for row in SPEEDS}


@pytest.mark.tier("thorough", keep=QUICK_SPEEDS, nightly=(*QUICK_SPEEDS, *MORE_SPEEDS))
@pytest.mark.parametrize("row", SPEEDS, ids=lambda row: row.name)
def test_the_best_of_a_published_speed_is_what_the_estimate_says(row):
    assert row.at_best == pytest.approx(row.measured.at_best, rel=0.01)
    assert row.time.formats[0] == row.measured.format
