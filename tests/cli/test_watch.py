"""`watch` and `train --watch` in separate processes: what is left after Ctrl-C, a kill, a divergence."""

import re
import signal
import urllib.request
from pathlib import Path

import pytest

import narrowgauge as ng
from narrowgauge.trainer.laboratory.watch import LIVE, live_page, write_pages

pytestmark = pytest.mark.tier("thorough")  # tests/report/page/test_live.py shows each page without a process


def page_of(process):
    """The page whose address a process has printed, once it has a run."""
    found = []

    def printed():
        found[:] = re.findall(r"live page: (file://\S+)", process.out.read_text())
        return bool(found) and Path(urllib.request.url2pathname(found[0][7:])).exists()

    process.until(printed)
    return Path(urllib.request.url2pathname(found[0][7:]))


def test_a_page_beside_a_run_outlives_its_sigkill_and_is_kept(narrowgauge, line, look, tmp_path):
    run = tmp_path / "run"
    changes = {"training.steps": 100_000}
    process = narrowgauge.start(*line(changes), "--watch", "--out", run)
    page = page_of(process)
    assert page == run / LIVE
    process.until(look(run).has_step(3))
    process.until(lambda: '<span class="state running">' in page.read_text())
    assert re.search(r"[\d,]+ of 100,000", page.read_text())
    process.send(signal.SIGKILL)
    process.wait()
    process.until(lambda: 'id="live"' not in page.read_text())
    assert '<span class="state killed">' in page.read_text()
    assert look(run).status["status"] == "running", "only the page reports the kill"


def test_ctrl_c_keeps_the_page_of_a_run(narrowgauge, line, look, tmp_path):
    run = tmp_path / "run"
    process = narrowgauge.start(*line({"training.steps": 100_000}), "--watch", "--out", run)
    page = page_of(process)
    assert process.send_when(look(run).has_step(2), signal.SIGINT).code == 75
    kept = page.read_text()
    assert 'id="live"' not in kept, "the watcher has ended before the run"
    assert '<span class="state preempted">' in kept
    assert "It was stopped after step" in kept
    assert "Reproduce" in kept


def test_a_page_beside_a_comparison_outlives_its_sigkill(narrowgauge, line, look, tmp_path):
    out = tmp_path / "new" / "compared"
    words = [*line({"training.steps": 100_000})[1:], "--recipes", "bf16,mxfp4", "--watch", "--out", out]
    process = narrowgauge.start("compare", *words)
    page = page_of(process)
    process.until(look(out / "bf16").has_step(2))
    process.until(lambda: "2 runs: 1 running, 1 waiting." in page.read_text())
    process.send(signal.SIGKILL)
    process.wait()
    process.until(lambda: "2 runs: 1 killed, 1 waiting." in page.read_text())
    assert 'id="live"' not in page.read_text()


def test_watch_ends_with_ctrl_c_and_code_130(narrowgauge, tmp_path):
    later = tmp_path / "later"
    process = narrowgauge.start("watch", later)
    process.until(lambda: "live page: " in process.out.read_text())
    process.send(signal.SIGINT)
    done = process.wait()
    assert (done.code, done.err) == (130, f"{later} does not exist yet; the page waits for it\n")
    assert not later.exists()


def test_a_comparison_of_three_arms_is_followed_from_its_folder(tiny, tmp_path):
    out = tmp_path / "compared"
    sections = {name: table for name, table in tiny({"training.steps": 2}).items() if name != "recipe"}
    result = ng.compare(recipes=["bf16", "mxfp8", "mxfp4"], out=out, quiet=True, **sections)
    assert len(result.runs) == 3
    assert not write_pages([out], out / LIVE, is_live=True), "all runs have ended"
    seen = (out / LIVE).read_text()
    assert "3 runs compared" in seen
    assert "3 runs: 3 done." in seen
    assert "One seed proves no gap; --seeds 3 detects a gap of" in seen
    assert "without spikes in the warm-up: " in seen, "the plan that compare printed"
    assert "interim" not in seen
    assert 'id="live"' not in seen
    assert seen.count("narrowgauge train reproduced/") == 3


def test_a_path_that_cannot_be_watched_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is a file; name a run"):
        live_page([tmp_path / "file"])
    with pytest.raises(ValueError, match="does not exist; name a run directory"):
        live_page([tmp_path / "no" / "run"])
