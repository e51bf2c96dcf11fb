"""The gate on runs with known losses, and the command's exit code."""

import math

import pytest

from narrowgauge.system.errors import UserError
from narrowgauge.trainer.experiment.gate import Gate, gate_results, parse_gate
from narrowgauge.trainer.report import read_runs


@pytest.fixture
def judge(make_run):
    """The word and reason on losses of a variant by seed; the reference has 4.0 for each seed."""

    def judge(gate, losses, **broken):
        paths = make_run.seeds("bf16", [4.0] * len(losses)) + make_run.seeds("fp8", losses, **broken)
        for path in paths:  # of no known model: its size would add a known deviation
            make_run.set(path, "[model]", "[other]")
        (result,) = gate_results(read_runs(paths), parse_gate(gate))
        return result.word, result.reason

    return judge


@pytest.mark.parametrize(
    ("gate", "losses", "word", "reason"),
    [
        ("0.01", (4.001, 4.002, 4.003), "pass", "gap +0.0020 nats (-0.0005 .. +0.0045 nats), 3 seeds"),
        ("0.25%", (4.001, 4.002, 4.003), "pass", "gap +0.050 % ("),
        ("0.01", (4.02, 4.021, 4.022), "fail", "above the gate for every seed"),
        ("0.01", (4.011, 4.013), "fail", "above the gate for every seed"),
        ("0.01", (4.009, 4.03, 4.031, 4.032, 4.03, 4.03), "fail", "6 seeds, above the gate"),
        ("0.01", (4.002,), "open", "one seed has no interval"),
        ("0.01", (4.02,), "fail", "1 seed, above the gate for every seed"),
        ("0.01", (4.0, 4.009, 4.011), "open", "about 15 seeds of this spread would decide"),
        ("0.01", (3.9, 3.901, 3.902), "pass", "better by more than the gate"),
    ],
)
def test_the_interval_decides(judge, gate, losses, word, reason):
    found = judge(gate, losses)
    assert found[0] == word, found
    assert reason in found[1]


def test_a_run_that_diverged_fails(judge):
    word, reason = judge("0.25%", (4.0, 4.0, 4.0), status="failed", reason="11 steps in a row")
    assert (word, reason) == ("fail", "fp8 failed: 11 steps in a row")


def test_a_reference_without_a_finite_loss_fails_nobody(make_run):
    losses = {"bf16": math.nan, "fp8": 4.0, "mxfp4": math.nan}
    paths = [path for name, loss in losses.items() for path in make_run.seeds(name, [loss])]
    fp8, mxfp4 = gate_results(read_runs(paths), parse_gate("1%"))
    assert (fp8.word, fp8.reason) == ("open", "a loss of bf16 is not finite")
    assert (mxfp4.word, mxfp4.reason) == ("fail", "a loss is not finite")


def test_a_gate_is_a_number_of_nats_or_percent():
    assert parse_gate("0.01") == Gate(0.01, in_percent=False)
    assert parse_gate("0.25%") == Gate(0.25, in_percent=True)
    for text in ("", "-1", "0", "nan", "inf%", "1%%", "some"):
        with pytest.raises(UserError, match=r"must be a number above 0"):
            parse_gate(text)


@pytest.mark.tier("thorough")
def test_the_exit_code_is_the_word(narrowgauge, line, tmp_path):
    shared = line({"training.steps": 2})[1:]
    words = [*shared, "--recipes", "bf16,fp8", "--seeds", 2, "--out", tmp_path / "c"]
    wide = narrowgauge("compare", *words, "--gate", "90%")
    assert wide.code == 0, wide.err
    assert "gate 90 %: fp8 pass; gap " in wide.out
    tight = narrowgauge("compare", *words, "--gate", "1e-9")
    assert tight.code == 1
    assert "gate 1e-09 nats: fp8 " in tight.out
    assert narrowgauge("compare", *words, "--gate", "much").code == 2
