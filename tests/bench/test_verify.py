"""`bench --verify`: any difference is found, and reported with advice; its file is read anywhere."""

import importlib
import json
import os
import subprocess
import sys
import time

import pytest
import torch
from rich.console import Console

from narrowgauge.bench import answer as module
from narrowgauge.bench.answer import Answer
from narrowgauge.bench.read import in_words, is_right, read
from narrowgauge.bench.verify import loss_checks as losses
from narrowgauge.bench.verify import operations
from narrowgauge.bench.verify.check import Check, Disagreement, Finding, close, near, same
from narrowgauge.bench.verify.collective_checks import collective_checks
from narrowgauge.bench.verify.determinism_checks import determinism_checks
from narrowgauge.bench.verify.layer_checks import product_checks
from narrowgauge.bench.verify.verify import Verdict, all_checks
from narrowgauge.bench.verify.worker import run_all
from narrowgauge.cli.main import main
from narrowgauge.errors import UserError
from narrowgauge.training import make_config

CPU = torch.device("cpu")
DO = "use another one"
AGREES = Finding("matmuls", "FP8 with a scale per tensor", "agrees", "bit for bit")
DIFFERS = Finding("kernels", "RMSNorm", "differs", "3 of 4 <values> are wrong", DO)


def fails(compare, got, expected, **options):
    with pytest.raises(Disagreement) as error:
        compare({"y": got}, {"y": expected}, **options)
    return str(error.value)


def test_bits_are_the_same_or_not():
    x = torch.tensor([1.0, -0.0, float("nan"), 3.0])
    assert same({"y": x, "z": None}, {"y": x.clone(), "z": None}) == "bit for bit"
    for i, other in enumerate((torch.nextafter(x[0], x[1]), 0.0, 1.0, float("nan"))):
        wrong = x.clone()
        wrong[i] = other
        assert fails(same, wrong, x) == "1 of 4 values of y are wrong"
    assert "is missing" in fails(same, None, x)
    assert "torch.float64 [4] and not torch.float32 [4]" in fails(same, x.double(), x)


@pytest.mark.parametrize("wrong", [1.02, 1.5, float("nan"), float("inf")])
def test_sums_may_differ_by_a_rounding_and_no_more(wrong):
    x = torch.randn(100, generator=torch.Generator().manual_seed(0)).bfloat16()
    x[7] = 2.0
    neighbour, off = x.clone(), x.clone()
    neighbour[7], off[7] = 2.0 + 2.0**-6, 2.0 * wrong
    assert near({"y": neighbour}, {"y": x}).startswith("within ")
    assert fails(near, off, x) == "1 of 100 values of y are wrong"
    if wrong != 1.02:
        assert "of its norm" in fails(close, off, x, share=0.01)


def agrees(device):
    return "bit for bit"


def differs(device):
    raise Disagreement("3 of 4 values are wrong")


def raises(device):
    raise RuntimeError("an illegal address\nwas read")


def ends(device):
    os._exit(9)


def hangs(device):
    time.sleep(600)


def some_checks(device):
    own = [Check("kernels", run.__name__, run, DO) for run in (agrees, differs, raises, ends, hangs)]
    elsewhere = Check("matmuls", "elsewhere", ends, DO, "it takes a GPU")
    return [*own, elsewhere, Check("kernels", "last", agrees, DO)]


@pytest.mark.tier("thorough")  # real processes; other tests look at the checks, the file and the page without
def test_a_check_that_breaks_its_process_stops_no_other():
    """One that fails in any way costs itself alone; and two processes exchange what they should."""
    told = []
    found = run_all(some_checks, CPU, told.append, most_s=4.0)
    assert {f.name: (f.outcome, f.found) for f in found} == {
        "agrees": ("agrees", "bit for bit"),
        "differs": ("differs", "3 of 4 values are wrong"),
        "raises": ("differs", "RuntimeError: an illegal address"),
        "ends": ("differs", "its process ended with code 9"),
        "hangs": ("differs", "it did not end within 4 seconds"),
        "elsewhere": ("not here", "it takes a GPU"),
        "last": ("agrees", "bit for bit"),
    }
    advice = [f.do for f in found if f.outcome == "differs"]
    assert advice[:2] == [DO] * 2
    assert all("nothing was compared" in do for do in advice[2:]), "it may only be busy"
    assert told[1::2] == found
    (check,) = collective_checks(CPU)
    assert check.run(CPU) == "by gloo, exact"


def test_checks_that_would_begin_too_late_are_skipped_and_listed():
    found = run_all(some_checks, CPU, lambda _: None, all_s=-1.0)
    assert [f.outcome for f in found] == ["skipped"] * 5 + ["not here", "skipped"]
    verdict = Verdict("a GPU", "compute capability 9.0", found)
    assert verdict.is_right
    assert verdict.sentence() == "0 of 0 checks agree on a GPU; 1 needs another device; 6 skipped"
    lines = "\n".join(in_words(Answer({"device": "a GPU"}, verdict).as_json()))
    assert "skipped for lack of time: kernels, agrees; kernels, differs;" in lines


def few_checks(device):
    names = ("FP8 with a scale per row", "MXFP8", "fp8-row")
    return [check for check in all_checks(device) if check.name in names]


@pytest.mark.tier("thorough")
@pytest.mark.skipif(torch.cuda.is_available(), reason="asks what a CPU lacks")
def test_the_command_writes_one_file_and_one_page(tmp_path, monkeypatch, capsys):
    """With few of its checks, which it really runs; and no step is timed."""
    verify = importlib.import_module("narrowgauge.bench.verify.verify")  # a function has this name as well
    monkeypatch.setattr(verify, "all_checks", few_checks)
    file = tmp_path / "found.json"
    words = ["bench", "--verify", "--rounds", "0", "--json", str(file), "--device", "cpu"]
    assert main(words) == 0
    found = json.loads(file.read_text())
    assert found["measured"] is None
    outcomes = {check["name"]: check["outcome"] for check in found["verify"]["checks"]}
    assert outcomes["MXFP8"] == "not here"
    assert set(outcomes.values()) <= {"agrees", "not here"}
    assert "not here: MXFP8 (it takes compute capability 10.0 or later)" in capsys.readouterr().out
    assert "matmuls: MXFP8" in file.with_suffix(".html").read_text()


def test_a_cpu_says_which_checks_need_a_gpu():
    lacks = {check.name: check.lacks for check in product_checks(CPU)}
    assert lacks["FP8 with a scale per tensor"] == ""
    assert lacks["NVFP4"] == "it takes compute capability 10.0 or later"
    assert all(check.do for check in all_checks(CPU))


def test_another_loss_is_seen_and_the_way_that_agrees_is_named(monkeypatch):
    right = losses.trained

    def with_a_fault(config, device):
        is_faulty = os.environ.get("NARROWGAUGE_KERNELS") != "0"  # as a wrong kernel
        return [loss * (1.05 if is_faulty else 1.0) for loss in right(config, device)]

    monkeypatch.setattr(losses, "trained", with_a_fault)
    (check,) = [check for check in losses.loss_checks(CPU, "") if check.name == "bf16"]
    with pytest.raises(Disagreement) as error:
        check.run(CPU)
    assert str(error.value) == (
        "native: the loss is off by 0.05, 0.01 is allowed; "
        "with NARROWGAUGE_KERNELS=0 it agrees, so train with that"
    )


def test_a_backward_pass_that_does_not_repeat_is_seen(monkeypatch):
    """A GPU whose attention adds its parts in any order: the second time a bit differs."""
    found = {check.name: check for check in determinism_checks(CPU)}
    for name in ("attention", "a model under fp8"):
        assert found[name].run(CPU) == "twice, bit for bit"
    right, calls = operations.attend, []

    def attend(q, k, v):
        calls.append(q)
        q.register_hook(lambda g: g * (1 + 2**-7 * (len(calls) - 1)))
        return right(q, k, v)

    monkeypatch.setattr(operations, "attend", attend)
    with pytest.raises(Disagreement, match="values of the gradient of q are wrong"):
        found["attention"].run(CPU)
    assert not torch.are_deterministic_algorithms_enabled()


MEASURED = {
    **{"model": "qwen2.5-1.5b", "recipe": "fp8", "backend": "native", "tokens_per_step": 1000},
    "seconds": {"narrowgauge": [0.4, 0.5, 0.9]},
    "memory": {"allocated": 50 * 2**30, "reserved": 52 * 2**30},
    "device_is_busy": 0.62,
    "in_words": {"torchao": "faster, 1.38x [1.37, 1.40]"},
}
WHOLE = {
    "complete": True,
    "machine": {"device": "NVIDIA H200", "torch": "2.13.0", "narrowgauge": "0.4"},
    "measured": MEASURED,
    "counted": {"step_seconds": {"at_speeds": 0.3, "calibrated": 0.4}, "peak_bytes": 53.9 * 2**30},
    "verify": {"checks": [vars(AGREES), vars(DIFFERS)]},
    "errors": [{"part": "peers", "error": "no memory", "traceback": "Traceback ..."}],
}


def test_a_file_that_was_sent_is_judged_and_its_page_says_what_to_do(tmp_path, capsys):
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
        "differs: kernels, RMSNorm: 3 of 4 <values> are wrong; use another one",
        "failed: peers: no memory",
    ]
    all_agree = WHOLE | {"verify": {"checks": [vars(AGREES)]}}
    assert not is_right(all_agree), "a part failed"
    assert is_right(all_agree | {"errors": []})
    page = Answer({"device": "a GPU"}, Verdict("a GPU", "compute capability 9.0", [DIFFERS, AGREES])).page()
    assert "The run is incomplete: still going, or stopped early" in page
    assert page.index("What differs") < page.index(DO) < page.index("All checks")
    assert "3 of 4 &lt;values&gt; are wrong" in page


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"complete": true}', "\0"])
def test_what_is_no_such_file_is_a_sentence(text, tmp_path):
    file = tmp_path / "other.json"
    file.write_text(text)
    with pytest.raises(UserError, match=r"--read takes a file of --verify|is not a file of bench --verify"):
        read(file)


def test_the_file_is_written_after_each_check_and_after_an_error_of_the_own_step(tmp_path, monkeypatch, tiny):
    """`find` with parts that are quick."""
    file, states = tmp_path / "answer.json", []

    def verified(device, console, note):
        for n in (1, 2):
            note(Verdict("a CPU", "cpu", [AGREES, DIFFERS][:n]))
            states.append(read(file))
        return Verdict("a CPU", "cpu", [AGREES, DIFFERS])

    def breaks(*_):
        states.append(read(file))
        raise RuntimeError("CUDA error: an illegal address")

    monkeypatch.setattr(module, "verify", verified)
    monkeypatch.setattr(module, "bench", breaks)
    answer = module.find(make_config(tiny()), [], 1, file, Console(quiet=True))
    last = read(file)
    assert [len((state["verify"] or {"checks": []})["checks"]) for state in (*states, last)] == [0, 1, 2, 2]
    assert [state["complete"] for state in (*states, last)] == [False] * 3 + [True]
    assert list(in_words(states[1]))[1] == "the run was stopped early: these are its findings until then"
    (error,) = last["errors"]
    assert (error["part"], error["error"]) == ("the step", "CUDA error: an illegal address")
    assert "raise RuntimeError" in error["traceback"]
    assert "the step failed" in answer.page()
    told = {"narrowgauge", "commit", "command", "python", "system", "torch", "device", "memory"}
    assert told <= set(last["machine"])


@pytest.mark.tier("nightly", keep=1)
@pytest.mark.tier("thorough")
@pytest.mark.parametrize("checks", [1, -1, 3])
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
