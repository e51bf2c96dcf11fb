"""`watch` and `train --watch` in separate processes: what is left after Ctrl-C, a kill, a divergence."""

import re
import signal
import time
import urllib.request
from pathlib import Path

import pytest

import narrowgauge as ng
from narrowgauge.laboratory.watch import opened_browser, watched, write_page

pytestmark = pytest.mark.tier("thorough")  # tests/report/live/ shows each page without a process


def fetch(url):
    with urllib.request.urlopen(url, timeout=30) as answer:
        return answer.read().decode()


def address_in(process):
    """The address that a process has printed."""
    found = []

    def printed():
        found[:] = re.findall(r"live page: (http://127\.0\.0\.1:\d+/\S+/)", process.out.read_text())
        return bool(found)

    process.until(printed)
    return found[0]


def ended(url):
    """Whether the server is gone, within some seconds."""
    for _ in range(200):
        try:
            fetch(url)
        except OSError:
            return True
        time.sleep(0.05)
    return False


def test_a_page_beside_a_run_outlives_its_sigkill_and_is_kept(narrowgauge, line, look, tmp_path):
    run = tmp_path / "run"
    changes = {"training.steps": 100_000}
    process = narrowgauge.start(*line(changes), "--watch", "--out", run)
    url = address_in(process)
    process.until(look(run).has_step(3))
    page = fetch(url)
    assert re.search(r"[\d,]+ of 100,000", page)
    assert '<span class="state running">' in page
    process.send(signal.SIGKILL)
    process.wait()
    assert ended(url)
    kept = (run / "report.html").read_text()
    assert '<span class="state killed">' in kept
    assert 'id="live"' not in kept
    assert look(run).status["status"] == "running", "only the page reports the kill"


def test_ctrl_c_keeps_the_page_of_a_run(narrowgauge, line, look, tmp_path):
    run = tmp_path / "run"
    process = narrowgauge.start(*line({"training.steps": 100_000}), "--watch", "--out", run)
    url = address_in(process)
    assert process.send_when(look(run).has_step(2), signal.SIGINT).code == 75
    with pytest.raises(OSError, match="refused"):  # the watcher has ended before the run
        fetch(url)
    kept = (run / "report.html").read_text()
    assert '<span class="state preempted">' in kept
    assert "It was stopped after step" in kept
    assert "Reproduce" in kept


def test_a_page_beside_a_comparison_outlives_its_sigkill(narrowgauge, line, look, tmp_path):
    out = tmp_path / "new" / "compared"
    words = [*line({"training.steps": 100_000})[1:], "--recipes", "bf16,mxfp4", "--watch", "--out", out]
    process = narrowgauge.start("compare", *words)
    url = address_in(process)
    process.until(look(out / "bf16").has_step(2))
    page = fetch(url)
    assert "2 runs: 1 running, 1 waiting." in page
    process.send(signal.SIGKILL)
    process.wait()
    assert ended(url)
    kept = (out / "report.html").read_text()
    assert "2 runs: 1 killed, 1 waiting." in kept
    assert 'id="live"' not in kept


def test_watch_ends_with_ctrl_c_and_code_130(narrowgauge, tmp_path):
    process = narrowgauge.start("watch", tmp_path / "later", "--no-browser")
    url = address_in(process)
    assert "waits for the first run" in fetch(url)
    process.send(signal.SIGINT)
    done = process.wait()
    assert (done.code, done.err) == (130, f"{tmp_path / 'later'} does not exist yet; the page waits for it\n")
    process = narrowgauge.start("watch", tmp_path, "--no-browser")
    address_in(process)
    process.send(signal.SIGINT)
    assert process.wait().err == f"{tmp_path} has no runs yet; the page waits for the first\n"


def test_a_comparison_of_three_arms_is_followed_from_its_folder(tiny, tmp_path):
    out = tmp_path / "compared"
    sections = {name: table for name, table in tiny({"training.steps": 2}).items() if name != "recipe"}
    result = ng.compare(recipes=["bf16", "mxfp8", "mxfp4"], out=out, here=True, quiet=True, **sections)
    assert len(result.runs) == 3
    seen = watched([out])("").html()
    assert "3 runs compared" in seen
    assert "3 runs: 3 done." in seen
    assert "One seed proves no gap; --seeds 3 detects a gap of" in seen
    assert "without spikes in the warm-up: " in seen, "the plan that compare printed"
    assert "interim" not in seen
    write_page([out], tmp_path / "page.html")
    kept = (tmp_path / "page.html").read_text()
    assert 'id="live"' not in kept
    assert kept.count("narrowgauge train reproduced/") == 3


def test_a_path_that_cannot_be_watched_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is a file; name a run"):
        watched([tmp_path / "file"])
    with pytest.raises(ValueError, match="does not exist; name a run directory"):
        watched([tmp_path / "no" / "run"])
    with pytest.raises(ValueError, match="choose another file"):
        write_page([tmp_path], tmp_path / "file" / "page.html")


def test_the_browser_gets_a_file_and_not_the_token(monkeypatch):
    monkeypatch.setenv("DISPLAY", ":0")
    given = []
    with opened_browser("http://127.0.0.1:1/token/", given.append):
        (uri,) = given
        path = Path(uri.removeprefix("file://"))
        assert "token" not in uri
        assert "http://127.0.0.1:1/token/" in path.read_text()
        assert path.parent.stat().st_mode & 0o077 == 0
    assert not path.exists()
