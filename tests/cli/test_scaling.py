"""`narrowgauge scaling` with real processes: what it measures, and that none of them outlives it."""

import json
import os
import signal
from pathlib import Path

import pytest


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
