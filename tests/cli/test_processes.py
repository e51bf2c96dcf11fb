"""Verbs in separate processes: what they measure and show, and what signals, kills and Ctrl-C leave."""

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from narrowgauge.trainer.laboratory.watch import LIVE

COMMAND = [sys.executable, "-X", "importtime", "-m", "narrowgauge"]


@pytest.fixture
def while_importing():
    """Start the command, deliver a signal as soon as torch is being imported; (exit code, output)."""

    def do(*arguments, number):
        with subprocess.Popen([*COMMAND, *arguments], stderr=subprocess.PIPE, text=True) as p:
            for line in p.stderr:  # one for each module that has been imported
                if line.rstrip().endswith(" torch.types"):
                    break
            p.send_signal(number)
            said = [line for line in p.stderr if not line.startswith("import time:")]
        return p.returncode, "".join(said)

    return do


@pytest.mark.tier("thorough")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT], ids=lambda n: n.name)
def test_a_run_that_is_asked_in_its_first_second_ends_with_75(while_importing, line, tmp_path, number):
    ended = while_importing(*line(), "--out", str(tmp_path / "run"), number=number)
    said = f"narrowgauge: stopped by {number.name} before a step was done; rerun the same command to resume\n"
    assert ended == (75, said)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.tier("thorough")
def test_ctrl_c_in_the_first_second_shows_no_traceback(while_importing):
    assert while_importing("recipes", number=signal.SIGINT) == (1, "narrowgauge: interrupted\n")


def test_a_mistake_is_told_by_one_process_of_a_job(command):
    for rank in ("0", "1"):
        place = {"TORCHELASTIC_RUN_ID": "x", "RANK": rank, "WORLD_SIZE": "2", "LOCAL_RANK": rank}
        ended = command("train", "--model", "gpt3-124", **place)
        assert (ended.code, bool(ended.err)) == (2, rank == "0")


@pytest.fixture
def scaling(line, tmp_path):
    """The words of a measurement into `tmp_path / "out"`."""

    def words(*more):
        return ["scaling", *line({"recipe.name": "bf16"})[1:], "--out", tmp_path / "out", *more]

    return words


@pytest.mark.tier("thorough")
def test_one_and_two_processes(narrowgauge, scaling, tmp_path):
    words = ("--procs", "1,2", "--seconds", "0.2", "--rounds", "2", "--parallel.replicate", "2")
    ended = narrowgauge(*scaling(*words))
    assert ended.code == 0, ended.err
    assert ended.err == ""
    found = json.loads((tmp_path / "out" / "scaling.json").read_text())
    rows = {(row["mode"], row["processes"]): row for row in found["rows"]}
    assert list(rows) == [("strong", 1), ("weak", 1), ("strong", 2), ("weak", 2)]
    assert [row["tokens_a_step"] for row in rows.values()] == [64, 64, 64, 128]
    parameters = found["parameters"]
    for row in rows.values():
        assert 0 < row["step_ms_best"] <= min(row["round_ms"]) <= row["step_ms"] <= max(row["round_ms"])
        assert 0 <= row["communication"] < 1
        if row["processes"] == 2:
            assert row["sent_bytes"]["reduce"] == 4 * parameters, "an all-reduce sends the gradients once"
            low, high = row["speed_up_interval"]
            assert low < row["speed_up"] < high
            assert row["speed_up"] == row["tokens_per_s"] / rows[row["mode"], 1]["tokens_per_s"]
    (reduced,) = found["all_reduce"]
    assert reduced["bytes"] == 4 * parameters
    assert reduced["bus_bandwidth"] == pytest.approx(reduced["bytes"] / reduced["ms"] * 1000)
    assert found["verdict"] in " ".join(ended.out.split())


@pytest.mark.tier("thorough")
@pytest.mark.parametrize("whom", ["Ctrl-C", "the launcher is killed", "a process is killed"])
def test_all_end_together(narrowgauge, scaling, whom):
    process = narrowgauge.start(*scaling("--procs", "2", "--seconds", "60"), forks=False)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")

    def all_run():  # torch is read only when a process has tied its life to its launcher's
        maps = [Path(f"/proc/{child}/maps").read_text() for child in children.read_text().split()]
        return sum("libtorch" in of_one for of_one in maps) == 2

    process.until(all_run)
    pids = children.read_text().split()
    if whom == "Ctrl-C":
        process.send(signal.SIGINT)
        ended = process.wait()
        assert (ended.code, ended.err) == (1, "narrowgauge: interrupted\n")
    elif whom == "the launcher is killed":
        process.send(signal.SIGKILL)
        assert process.wait().code == -signal.SIGKILL
    else:
        os.kill(int(pids[-1]), signal.SIGKILL)  # the first keeps track of semaphores
        ended = process.wait()
        assert (ended.code, ended.err) == (1, "narrowgauge: a process of 2 was killed, or crashed\n")
    process.until(lambda: not any(Path(f"/proc/{pid}/cmdline").exists() for pid in pids))


def page_of(process):
    """The page whose address a process has printed, once it has a run."""
    found = []

    def printed():
        found[:] = re.findall(r"live page: (file://\S+)", process.out.read_text())
        return bool(found) and Path(urllib.request.url2pathname(found[0][7:])).exists()

    process.until(printed)
    return Path(urllib.request.url2pathname(found[0][7:]))


@pytest.mark.tier("thorough")  # tests/report/page/test_live.py shows each page without a process
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


@pytest.mark.tier("thorough")
def test_ctrl_c_keeps_the_page_of_a_run(narrowgauge, line, look, tmp_path):
    run = tmp_path / "run"
    process = narrowgauge.start(*line({"training.steps": 100_000}), "--watch", "--out", run)
    page = page_of(process)
    assert process.send_when(look(run).has_step(2), signal.SIGINT).code == 75
    kept = page.read_text()
    assert 'id="live"' not in kept, "the watcher has ended before the run"
    assert '<span class="state preempted">' in kept
    assert "It was stopped after step" in kept


@pytest.mark.tier("thorough")
def test_watch_ends_with_ctrl_c_and_code_130(narrowgauge, tmp_path):
    later = tmp_path / "later"
    process = narrowgauge.start("watch", later)
    process.until(lambda: "live page: " in process.out.read_text())
    process.send(signal.SIGINT)
    done = process.wait()
    assert (done.code, done.err) == (130, f"{later} does not exist yet; the page waits for it\n")
    assert not later.exists()
