"""The file of `bench --verify`: written after each check, and read wherever it is sent."""

import json
import subprocess
import sys
import time

import pytest
from rich.console import Console

from narrowgauge.bench import answer as module
from narrowgauge.bench.read import in_words, is_right, read
from narrowgauge.bench.verify.check import Finding
from narrowgauge.bench.verify.verify import Verdict
from narrowgauge.cli.main import main
from narrowgauge.errors import UserError
from narrowgauge.training import make_config

AGREES = Finding("matmuls", "FP8 with a scale per tensor", "agrees", "bit for bit")
DIFFERS = Finding("kernels", "RMSNorm", "differs", "3 of 4 values are wrong", "use another one")
MEASURED = {
    "model": "qwen2.5-1.5b",
    "recipe": "fp8",
    "backend": "native",
    "tokens_per_step": 1000,
    "seconds": {"narrowgauge": [0.4, 0.5, 0.9]},
    "memory": {"allocated": 50 * 2**30, "reserved": 52 * 2**30},
    "device_is_busy": 0.62,
    "in_words": {"torchao": "faster, 1.38x [1.37, 1.40]"},
}
COUNTED = {"step_seconds": {"at_speeds": 0.3, "calibrated": 0.4}, "peak_bytes": 53.9 * 2**30}
WHOLE = {
    "complete": True,
    "machine": {"device": "NVIDIA H200", "torch": "2.13.0", "narrowgauge": "0.4"},
    "measured": MEASURED,
    "counted": COUNTED,
    "verify": {"checks": [vars(AGREES), vars(DIFFERS)]},
    "errors": [{"part": "peers", "error": "no memory", "traceback": "Traceback ..."}],
}


def test_a_file_that_was_sent_is_judged(tmp_path, capsys):
    file = tmp_path / "theirs.json"
    file.write_text(json.dumps(WHOLE))
    assert main(["bench", "--read", str(file)]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "device NVIDIA H200, torch 2.13.0, narrowgauge 0.4",
        "qwen2.5-1.5b, recipe fp8 (native): 2,000 tokens/s, 1.25 times the counted time",
        "memory: 50.0 GiB measured, 53.9 GiB counted",
        "the device waits for the host: the device computes in 62% of a step",
        "compared with torchao: faster, 1.38x [1.37, 1.40]",
        "1 of 2 checks agree",
        "differs: kernels, RMSNorm: 3 of 4 values are wrong; use another one",
        "failed: peers: no memory",
    ]
    assert is_right(WHOLE | {"verify": {"checks": [vars(AGREES)]}, "errors": []})


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"complete": true}', "\0"])
def test_what_is_no_such_file_is_a_sentence(text, tmp_path):
    file = tmp_path / "other.json"
    file.write_text(text)
    with pytest.raises(UserError, match=r"--read takes a file of --verify|is not a file of bench --verify"):
        read(file)


@pytest.fixture
def found(tmp_path, monkeypatch, tiny):
    """`find` with parts that are quick; the file's content each time it was written."""
    states = []

    def verified(device, console, note):
        for n in (1, 2):
            note(Verdict("a CPU", "cpu", [AGREES, DIFFERS][:n]))
            states.append(read(tmp_path / "answer.json"))
        return Verdict("a CPU", "cpu", [AGREES, DIFFERS])

    def fails(*_):
        states.append(read(tmp_path / "answer.json"))
        raise RuntimeError("CUDA error: an illegal address")

    monkeypatch.setattr(module, "verify", verified)
    monkeypatch.setattr(module, "bench", fails)
    config = make_config(tiny())
    answer = module.find(config, [], 1, tmp_path / "answer.json", Console(quiet=True))
    return states, read(tmp_path / "answer.json"), answer


def test_the_file_is_written_after_each_check(found):
    states, last, _ = found
    assert [len((state["verify"] or {"checks": []})["checks"]) for state in states] == [0, 1, 2]
    assert not any(state["complete"] for state in states)
    assert last["complete"]
    assert list(in_words(states[1]))[1] == "the run was stopped early: these are its findings until then"


def test_an_error_of_the_own_step_is_kept_and_the_checks_go_on(found):
    _, last, answer = found
    (error,) = last["errors"]
    assert (error["part"], error["error"]) == ("the step", "CUDA error: an illegal address")
    assert "raise RuntimeError" in error["traceback"]
    assert len(last["verify"]["checks"]) == 2
    assert "the step failed" in answer.page()


def test_versions_and_the_command_are_in_it(found):
    machine = found[1]["machine"]
    assert {"narrowgauge", "commit", "command", "python", "system", "torch", "device", "memory"} <= set(
        machine
    )


@pytest.mark.tier("thorough")
@pytest.mark.parametrize("checks", [-1, 0, 3])
def test_a_killed_run_leaves_what_it_had_found(checks, tmp_path, line):
    """The real command, killed as soon as its file has n checks; -1: before the first."""
    file = tmp_path / "answer.json"
    rounds = "1" if checks < 0 else "0"
    words = ["bench", *line()[1:], "--verify", "--rounds", rounds, "--peers", "none", "--json", file]
    process = subprocess.Popen([sys.executable, "-m", "narrowgauge", *map(str, words)])
    try:
        deadline = time.monotonic() + 300
        while not (file.exists() and len((read(file)["verify"] or {"checks": []})["checks"]) >= checks):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)
    finally:
        process.kill()
        process.wait()
    left = read(file)
    assert not left["complete"]
    assert not is_right(left)
    assert any("the run was stopped early" in words for words in in_words(left))
    assert file.with_suffix(".html").exists()
