"""`bench --verify`: any difference is found, and reported with advice."""

import importlib
import json
import os
import time

import pytest
import torch

from narrowgauge.bench.answer import Answer
from narrowgauge.bench.read import in_words
from narrowgauge.bench.verify import operations
from narrowgauge.bench.verify.check import Check, Disagreement, Finding, close, near, same
from narrowgauge.bench.verify.collective_checks import collective_checks
from narrowgauge.bench.verify.determinism_checks import determinism_checks
from narrowgauge.bench.verify.layer_checks import product_checks
from narrowgauge.bench.verify.loss_checks import loss_checks, trained
from narrowgauge.bench.verify.verify import Verdict, all_checks
from narrowgauge.bench.verify.worker import run_all
from narrowgauge.cli.main import main

CPU = torch.device("cpu")
DO = "use another one"


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
    runs = {"agrees": agrees, "differs": differs, "raises": raises, "ends": ends, "hangs": hangs}
    own = [Check("kernels", name, run, DO) for name, run in runs.items()]
    return [
        *own,
        Check("matmuls", "elsewhere", ends, DO, "it takes a GPU"),
        Check("kernels", "last", agrees, DO),
    ]


# real processes; other tests look at the checks, the file and the page without one
@pytest.mark.tier("thorough")
def test_a_check_that_breaks_its_process_stops_no_other():
    """Real processes: one that fails in any way costs itself alone."""
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


def test_checks_that_would_begin_too_late_are_skipped_and_listed():
    def checks(device):
        own = [Check("losses", name, agrees, DO) for name in ("one", "two")]
        return [*own, Check("matmuls", "elsewhere", ends, DO, "it takes a GPU")]

    found = run_all(checks, CPU, lambda _: None, all_s=-1.0)
    assert [f.outcome for f in found] == ["skipped", "skipped", "not here"]
    verdict = Verdict("a GPU", "compute capability 9.0", found)
    assert verdict.is_right
    assert verdict.sentence() == "0 of 0 checks agree on a GPU; 1 needs another device; 2 skipped"
    lines = list(in_words(Answer({"device": "a GPU"}, verdict).as_json()))
    assert "skipped for lack of time: losses, one; losses, two" in lines


@pytest.mark.tier("thorough")  # real processes
def test_two_processes_exchange_what_they_should():
    (check,) = collective_checks(CPU)
    assert check.run(CPU) == "by gloo, exact"


def few_checks(device):
    return [
        check
        for check in all_checks(device)
        if check.name in ("FP8 with a scale per row", "MXFP8", "fp8-row")
    ]


# real processes; other tests look at the checks, the file and the page without one
@pytest.mark.tier("thorough")
@pytest.mark.skipif(torch.cuda.is_available(), reason="asks what a CPU lacks")
def test_the_command_writes_one_file_and_one_page(tmp_path, monkeypatch, capsys):
    """With few of its checks, which it really runs; and no step is timed."""
    module = importlib.import_module("narrowgauge.bench.verify.verify")  # a function has this name as well
    monkeypatch.setattr(module, "all_checks", few_checks)
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


def test_the_page_says_what_differs_and_what_to_do():
    findings = [
        Finding("kernels", "RMSNorm", "differs", "3 of 4 <values> are wrong", DO),
        Finding("layers", "fp8", "agrees", "off by 0"),
        Finding("matmuls", "MXFP8", "not here", "it takes a GPU"),
    ]
    verdict = Verdict("a GPU", "compute capability 9.0", findings)
    assert not verdict.is_right
    assert verdict.sentence() == "1 of 2 checks agree on a GPU; 1 needs another device"
    page = Answer({"device": "a GPU", "torch": "2.13"}, verdict).page()
    assert "The run is incomplete: still going, or stopped early" in page
    assert page.index("What differs") < page.index(DO) < page.index("All checks")
    assert "3 of 4 &lt;values&gt; are wrong" in page


def test_a_cpu_says_which_checks_need_a_gpu():
    checks = product_checks(CPU)
    lacks = {check.name: check.lacks for check in checks}
    assert lacks["FP8 with a scale per tensor"] == ""
    assert lacks["NVFP4"] == "it takes compute capability 10.0 or later"
    assert all(check.do for check in all_checks(CPU))


def test_another_loss_is_seen_and_the_way_that_agrees_is_named(monkeypatch):
    from narrowgauge.bench.verify import loss_checks as losses

    def with_a_fault(config, device):
        found = trained(config, device)
        is_faulty = os.environ.get("NARROWGAUGE_KERNELS") != "0"  # as a wrong kernel
        return [loss * (1.05 if is_faulty else 1.0) for loss in found]

    monkeypatch.setattr(losses, "trained", with_a_fault)
    (check,) = [check for check in loss_checks(CPU, "") if check.name == "bf16"]
    with pytest.raises(Disagreement) as error:
        check.run(CPU)
    assert str(error.value) == (
        "native: the loss is off by 0.05, 0.01 is allowed; "
        "with NARROWGAUGE_KERNELS=0 it agrees, so train with that"
    )


def test_a_backward_pass_that_does_not_repeat_is_seen(monkeypatch):
    """A GPU whose attention adds its parts in any order: the second time a bit differs."""
    found = {check.name: check for check in determinism_checks(CPU)}
    assert found["attention"].run(CPU) == "twice, bit for bit"
    assert found["a model under fp8"].run(CPU) == "twice, bit for bit"
    right, calls = operations.attend, []

    def attend(q, k, v):
        calls.append(q)
        q.register_hook(lambda g: g * (1 + 2**-7 * (len(calls) - 1)))
        return right(q, k, v)

    monkeypatch.setattr(operations, "attend", attend)
    with pytest.raises(Disagreement, match="values of the gradient of q are wrong"):
        found["attention"].run(CPU)
    assert not torch.are_deterministic_algorithms_enabled()
