"""`watch` and `train --watch` in separate processes: what is left after Ctrl-C, a kill, a divergence."""

import re
import signal
import urllib.request
from pathlib import Path

import pytest

from narrowgauge.trainer.laboratory.watch import LIVE

pytestmark = pytest.mark.tier("thorough")  # tests/report/page/test_live.py shows each page without a process


def page_of(process):
    """The page whose address a process has printed, once it has a run."""
    found = []

    def printed():
        found[:] = re.findall(r"live page: (file://\S+)", process.out.read_text())
        return bool(found) and Path(urllib.request.url2pathname(found[0][7:])).exists()

    process.until(printed)
    return Path(urllib.request.url2pathname(found[0][7:]))


@pytest.mark.parametrize("verb", ["train", "compare"])
def test_a_page_beside_a_run_or_a_comparison_outlives_its_sigkill(narrowgauge, line, look, tmp_path, verb):
    out, more = tmp_path / "new" / "out", ["--recipes", "bf16,mxfp4"] if verb == "compare" else []
    process = narrowgauge.start(verb, *line({"training.steps": 100_000})[1:], *more, "--watch", "--out", out)
    page, run = page_of(process), look(out / "bf16" if more else out)
    assert page == out / LIVE
    process.until(run.has_step(3))
    at_work = "2 runs: 1 running, 1 waiting." if more else '<span class="state running">'
    process.until(lambda: at_work in page.read_text())
    process.send(signal.SIGKILL)
    process.wait()
    process.until(lambda: at_work.replace("running", "killed") in page.read_text())
    assert 'id="live"' not in page.read_text()
    assert run.status["status"] == "running", "only the page reports the kill"


def test_ctrl_c_keeps_the_page_of_a_run(narrowgauge, line, look, tmp_path):
    run = tmp_path / "run"
    process = narrowgauge.start(*line({"training.steps": 100_000}), "--watch", "--out", run)
    page = page_of(process)
    assert process.send_when(look(run).has_step(2), signal.SIGINT).code == 75
    kept = page.read_text()
    assert 'id="live"' not in kept, "the watcher has ended before the run"
    assert '<span class="state preempted">' in kept
    assert "It was stopped after step" in kept


def test_watch_ends_with_ctrl_c_and_code_130(narrowgauge, tmp_path):
    later = tmp_path / "later"
    process = narrowgauge.start("watch", later)
    process.until(lambda: "live page: " in process.out.read_text())
    process.send(signal.SIGINT)
    done = process.wait()
    assert (done.code, done.err) == (130, f"{later} does not exist yet; the page waits for it\n")
    assert not later.exists()
