"""A comparison on a cluster of Ray that runs here: the digits of this machine, whatever is killed."""

import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import pytest

pytestmark = [
    pytest.mark.tier("thorough"),
    pytest.mark.skipif(find_spec("ray") is None, reason="no ray here"),
]


@pytest.fixture
def cluster():
    """The address of a cluster of two cores."""
    ray = Path(sys.executable).with_name("ray")
    with TemporaryDirectory(dir="/tmp") as folder:  # its sockets have short names
        start = [ray, "start", "--head", "--num-cpus=2", "--port=0", "--include-dashboard=false"]
        options = ["--disable-usage-stats", f"--temp-dir={folder}"]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        subprocess.run([*start, *options], env=environment, check=True, capture_output=True)
        yield Path(folder, "ray_current_cluster").read_text().strip()
        subprocess.run([ray, "stop", "--force"], check=True, capture_output=True)


def wait_for(arrived, process):
    """Wait for something to be true; a cluster begins slowly on a busy machine."""
    while not arrived():
        assert process.is_running, process.err.read_text()
        time.sleep(0.05)


def worker_of(run):
    """The worker of Ray whose program trains a run."""
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or ()
        if "train" in words and str(run.path) in words and process.parent().name().startswith("ray::"):
            return process.parent()
    raise AssertionError(f"nothing trains {run.path}")


def test_runs_on_ray_survive_their_worker_and_a_stop_with_the_digits_of_this_machine(
    narrowgauge, line, look, cluster, tmp_path
):
    options = line({"training.steps": 60, "checkpoint.every": 2, "training.threads": 1})[1:]
    at = options.index("--recipe.name")
    del options[at : at + 2]
    here, there = (["compare", "--recipes", "bf16,fp8", *options, "--out", tmp_path / n] for n in ("a", "b"))
    ended = narrowgauge(*here)
    assert ended.code == 0, ended.err
    runs = [look(tmp_path / "b" / name) for name in ("bf16", "fp8")]
    process = narrowgauge.start(*there, "--ray", cluster)
    for run in runs:
        wait_for(run.has_step(5), process)
    worker_of(runs[0]).kill()
    wait_for(lambda: "continuing" in runs[0].path.with_suffix(".log").read_text(), process)
    process.send(signal.SIGTERM)
    assert process.wait().code in (0, 75)
    ended = narrowgauge(*there, "--ray", cluster)
    assert ended.code == 0, ended.err
    for run in runs:
        assert run.column("loss") == look(tmp_path / "a" / run.path.name).column("loss")


def test_a_cluster_that_is_not_there_is_a_sentence(narrowgauge, line, refused, tmp_path):
    variants = ("--variant", "a:lr=1e-3", "--variant", "b:lr=2e-3")
    words = ["compare", *variants, *line()[1:], "--out", tmp_path / "a"]
    refused(narrowgauge(*words, "--ray", "127.0.0.1:1"), "no cluster of Ray answers", "ray start --head")
    assert not (tmp_path / "a" / "a").exists()
