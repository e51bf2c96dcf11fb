"""A ladder on the command line: rungs from one trunk, two at a time, and the same numbers after a kill."""

import csv
import re
import signal

import pytest

ARMS = """
[arms.bf16]
recipe.name = "bf16"
[arms.mxfp8-e5m2]
recipe.name = "mxfp8"
recipe.dgrad = { dy = "mxfp8-e5m2" }
[experiment]
rungs = [10, 20]
seeds = [1]
jobs = 2
held_out_tokens = 64
"""


@pytest.fixture
def ladder(line, tmp_path):
    """The words of a ladder into a directory."""
    file = tmp_path / "ladder.toml"
    file.write_text(ARMS)
    keys = {"model.dim": 64, "schedule.kind": "wsd", "checkpoint.every": 2, "recipe.name": "bf16"}

    def words(name):
        return ["compare", file, *line(keys)[1:], "--gauges.every", "0", "--out", tmp_path / name]

    return words


@pytest.mark.tier("thorough")  # experiment/ and runs/use/test_branch.py prove its parts in this process
def test_it_is_the_same_after_a_kill(narrowgauge, ladder, look, tmp_path):
    ended = narrowgauge(*ladder("whole"))
    assert ended.code == 0, ended.err
    assert "One seed proves no gap" in ended.out
    rows = list(csv.DictReader((tmp_path / "whole" / "runs.csv").read_text().splitlines()))
    assert [(row["arm"], row["rung"], row["status"]) for row in rows] == [
        (arm, rung, "done") for arm in ("bf16", "mxfp8-e5m2") for rung in "12"
    ]
    assert rows[0]["own_loss"] == rows[0]["bf16_loss"]
    assert rows[2]["own_loss"] != rows[2]["bf16_loss"]
    last = look(tmp_path / "whole" / "mxfp8-e5m2-seed-1")
    assert rows[3]["own_loss"] == f"{last.steps[-1]['val_loss']:.6f}"
    assert len(look(tmp_path / "whole" / "bf16,steps=10-seed-1").events("branch")) == 1
    assert "<svg" in (tmp_path / "whole" / "report.html").read_text()

    run = look(tmp_path / "killed" / "bf16-seed-1")
    process = narrowgauge.start(*ladder("killed"), forks=False)
    assert process.send_when(run.has_step(4), signal.SIGKILL).code != 0
    again = narrowgauge(*ladder("killed"))
    assert again.code == 0, again.err
    other = narrowgauge(*ladder("killed"), "--optimizer.lr", "0.5")
    assert other.code == 2
    assert "optimizer.lr = 0.002, and now it is 0.5" in other.err
    assert (tmp_path / "killed" / "runs.csv").read_bytes() == (tmp_path / "whole" / "runs.csv").read_bytes()


def test_a_plan_is_said_and_nothing_is_trained(narrowgauge, ladder, tmp_path):
    ended = narrowgauge(*ladder("planned"), "--dry-run")
    assert ended.code == 0, ended.err
    assert "One seed proves no gap" in ended.out
    assert "2 runs, 0 done" in ended.out
    assert "1 of 2: at most 3 steps" in ended.out  # each measurement is announced
    assert re.search(r"[1-9][\d.]* (min|s)\b.* of 1 thread\(s\)", ended.out)  # not "0.0 hours"
    assert not (tmp_path / "planned").exists()


@pytest.mark.tier("thorough")  # experiment/ and runs/use/test_branch.py prove its parts in this process
def test_a_gate_accepts_and_refuses_at_the_highest_rung(narrowgauge, line, tmp_path):
    keys = {"model.dim": 64, "schedule.kind": "wsd", "checkpoint.every": 2, "recipe.name": "bf16"}
    words = ["compare", "--recipes", "bf16,mxfp8", "--seeds", "2", "--rungs", "10,20", "--jobs", "2"]
    words += [*line(keys)[1:], "--out", tmp_path / "gated"]
    accepted = narrowgauge(*words, "--gate", "100%")
    assert accepted.code == 0, accepted.err
    assert re.search(
        r"^gate 100 % at the highest rung, 20 steps: mxfp8 pass; gap .*, 2 seeds$", accepted.out, re.M
    )
    metrics = (tmp_path / "gated" / "mxfp8" / "metrics.jsonl").read_bytes()
    refused = narrowgauge(*words, "--gate", "0.000001%")
    assert refused.code == 1, refused.err
    assert re.search(r"20 steps: mxfp8 (open|fail); gap .*, 2 seeds", refused.out)
    assert (tmp_path / "gated" / "mxfp8" / "metrics.jsonl").read_bytes() == metrics, (
        "nothing is trained again"
    )
    page = (tmp_path / "gated" / "report.html").read_text()
    assert page.count('<tr class="seed">') == 4, "the runs of the highest rung"
    assert 'id="charts"' in page, "curves, as of any comparison"
    assert "Gaps over the lengths of training" in page


@pytest.mark.tier("thorough")  # experiment/ and runs/use/test_branch.py prove its parts in this process
def test_a_run_that_diverges_beside_others_is_a_row_and_fails_the_gate(narrowgauge, line, tmp_path):
    words = ["compare", *line({"recipe.name": "bf16", "training.steps": 2})[1:], "--jobs", "2"]
    words += ["--variant", "cold:optimizer.lr=1e-4", "--variant", "hot:optimizer.lr=1e30,guard.max_skips=0"]
    words += ["--out", tmp_path / "both"]
    ended = narrowgauge(*words)
    assert ended.code == 0, ended.err
    assert re.search(r"^hot: narrowgauge: 1 steps in a row had a non-finite loss", ended.out, re.M), (
        "the last line of its log"
    )
    rows = list(csv.DictReader((tmp_path / "both" / "runs.csv").read_text().splitlines()))
    assert [(row["arm"], row["status"]) for row in rows] == [("cold", "done"), ("hot", "diverged")]
    gated = narrowgauge(*words, "--gate", "1%")
    assert gated.code == 1, gated.err
    assert "gate 1 %: hot fail; hot failed: " in gated.out
