"""What is measured of a machine: free cores, the faster arithmetic, which a resumed run keeps, its peak."""

import json
import os
from types import SimpleNamespace

import pytest
import torch

from narrowgauge.kernels import attention_in_order, choose_attention
from narrowgauge.kernels.attention import attend
from narrowgauge.quantization.passes import build
from narrowgauge.system.errors import UserError
from narrowgauge.system.operating_system import cores_of_others
from narrowgauge.system.torch_compat import cpu_multiplies_bf16
from narrowgauge.trainer.runs.choices import ATTENTION, PRODUCTS
from narrowgauge.trainer.runs.monitor import machine
from narrowgauge.trainer.training import make_config
from support.runs import interrupted

HAS_BF16 = "bf16" if cpu_multiplies_bf16() else "fp32"
CPU = torch.device("cpu")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("NARROWGAUGE_CACHE", str(tmp_path))
    return tmp_path


#: (variable, what is asked for, the lines of the run, what it computes with)
KEPT = [
    (PRODUCTS, "bf16", [{"event": "start", "products": "fp32"}, {"step": 1}], "fp32"),
    (PRODUCTS, "fp32", [{"event": "start", "step": 0}], HAS_BF16),  # from before it was recorded
    (ATTENTION, "torch", [{"event": "start", "attention": "in-order"}, {"step": 1}], "in-order"),
    (ATTENTION, "in-order", [], "in-order"),
    (PRODUCTS, "fp64", [], "must be bf16, fp32 or onednn"),
    (ATTENTION, "fast", [], "must be in-order, fp32 or torch"),
]


@pytest.mark.parametrize(("variable", "asked", "lines", "expected"), KEPT)
def test_a_run_keeps_what_it_began_with_or_takes_what_is_asked_for(
    monkeypatch, variable, asked, lines, expected
):
    monkeypatch.setenv(variable, asked)
    what = "products" if variable == PRODUCTS else "attention"
    if expected.startswith("must"):
        with pytest.raises(UserError, match=expected):
            machine.choice_of(what, lines, pytest.fail)
    else:
        assert machine.choice_of(what, lines, pytest.fail) == expected


def test_the_faster_one_is_chosen_and_kept(monkeypatch, cache):
    monkeypatch.setattr(machine, "cpu_multiplies_bf16", lambda: True)
    for fp32, expected in [(1.0, "fp32"), (3.0, "fp32"), (3.0, "bf16")]:  # the second was kept
        seconds = {torch.bfloat16: 2.0, torch.float32: fp32}
        monkeypatch.setattr(machine, "fastest_tries", lambda n, device, dtype, s=seconds: [s[dtype]] * 3)
        assert machine.measured_products() == expected
        if fp32 == 3.0:
            next((cache / "products").iterdir()).write_text("{torn")


def test_all_ranks_compute_as_the_first_one_chose():
    """The choice travels as JSON; at first it did not, and a run on two processes could not begin."""
    values = {"model": {"dim": 64, "heads": 2}, "data": {"sequence_length": 64}, "training": {"threads": 1}}
    said, config = [], make_config(values)

    def broadcast(value):
        said.append(json.dumps(value))
        return json.loads(said[0])

    ranks = [SimpleNamespace(rank=rank, broadcast=broadcast) for rank in (0, 1)]
    first = machine.choose_arithmetic(config, lambda: [], CPU, ranks[0], print)
    try:
        assert machine.choose_arithmetic(config, lambda: 1 / 0, CPU, ranks[1], print) == first
    finally:
        machine.compute_by({})
    assert first == {"products": HAS_BF16, "attention": "torch"}


@pytest.mark.skipif(not build.compiler(), reason="there is no C compiler")
def test_the_faster_attention_is_chosen_by_head_and_length_and_kept(monkeypatch, cache):
    monkeypatch.delenv(ATTENTION, raising=False)
    assert machine.measured_attention(32, 64) in ("in-order", "torch")  # truly timed
    for shape, in_order_s, fp32_s, expected in (
        ((32, 128), 0.9, 9.0, "in-order"),
        ((32, 128), 9.0, 9.0, "in-order"),  # kept
        ((64, 128), 1.1, 9.0, "in-order"),  # a close race
        ((128, 128), 9.0, 9.0, "torch"),
        ((24, 128), 0.1, 9.0, "torch"),  # which the C does not compute
        ((32, 64, "fp16"), 0.1, 0.2, "fp32"),
    ):
        seconds = {"in-order": in_order_s, "torch": 1.0, "fp32": fp32_s}
        monkeypatch.setattr(machine, "_attention_seconds", lambda way, shape, dtype, s=seconds: s[way])
        assert machine.measured_attention(*shape) == expected, shape


def test_attention_of_fp16_values_is_computed_in_fp32():
    q, k, v = torch.randn(3, 1, 2, 8, 16).half()
    try:
        choose_attention("fp32")
        assert torch.equal(attend(q, k, v), attend(q.float(), k.float(), v.float()).half())
    finally:
        choose_attention("")


#: (variable, recipe, what it asked for at first, and when the run goes on, whether C is there by then)
RESUMED = [
    (PRODUCTS, "bf16", "fp32", "bf16", True),
    (ATTENTION, "mxfp8", "in-order", "torch", False),  # on a machine without C
    # It recorded the attention of bf16 values, which it did not compute.
    (ATTENTION, "fp16", "in-order", "fp32", True),
]


@pytest.mark.tier("thorough")
@pytest.mark.skipif(not build.compiler(), reason="there is no C compiler")
@pytest.mark.parametrize(("variable", "recipe", "first", "then", "has_c"), RESUMED)
def test_a_run_goes_on_in_the_arithmetic_it_began_with(
    train, look, monkeypatch, variable, recipe, first, then, has_c
):
    """It says which; asked for another, a new run has other digits, and a resumed one the same."""
    changes = {"training.steps": 4, "recipe.name": recipe}
    monkeypatch.setenv(variable, then)
    other = look(train("other", changes)).column("loss")
    monkeypatch.setenv(variable, first)
    path = train("run", changes)
    start, whole = look(path).events("start")[0], look(path).column("loss")
    assert start["threads"] == torch.get_num_threads()
    assert start["products" if variable == PRODUCTS else "attention"] == first
    assert whole != other or (variable, HAS_BF16) == (PRODUCTS, "fp32")
    interrupted(path, 4)
    monkeypatch.setenv(variable, then)
    monkeypatch.setenv("NARROWGAUGE_KERNELS", str(int(has_c)))
    assert attention_in_order.has_c() == has_c
    train("run", changes)
    (event,) = look(path).events("resume")
    assert event["products" if variable == PRODUCTS else "attention"] == first
    assert look(path).column("loss") == whole


STARTED = {"event": "start", "step": 0}


@pytest.fixture
def cores(monkeypatch):
    """A machine: its cores, those that others use, and what the user set."""

    def set_up(here, others=0.0, asked=None):
        monkeypatch.setattr(machine, "threads_of_torch", lambda: here)
        monkeypatch.setattr(machine, "cores_of_others", lambda: others)
        if asked is None:
            monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        else:
            monkeypatch.setenv("OMP_NUM_THREADS", asked)

    return set_up


#: (what `cores` sets up, the configured number, the lines of the run) -> the number, and words that tell it.
CASES = [
    ((2, 0.0), 0, [], 2, "threads: 2; the last digits depend on it, and --training.threads N pins it"),
    ((2, 1.0), 0, [], 1, "threads: 1 of 2, since other programs use 1.0 cores; the last digits depend on it"),
    ((2, 1.9), 0, [], 1, "threads: 1 of 2"),
    ((8, 0.3), 0, [], 8, "threads: 8;"),
    # the user decides
    ((2, 1.0, "2"), 0, [], 2, "threads: 2; the last digits depend on it, and --training.threads N pins it"),
    ((1, 0.0, "1"), 0, [STARTED | {"threads": 2}], 1, "the run had 2"),
    # the configuration pins it: its digits matter more than its speed
    ((8, 7.0, "4"), 2, [], 2, "threads: 2, as configured"),
    ((8, 7.0, "4"), 2, [STARTED | {"threads": 2}], 2, "threads: 2, as before"),
    ((1, 0.0), 2, [STARTED | {"threads": 3}], 2, "the run had 3"),
    # a resumed run keeps its number, since the order of sums follows from it, and so last digits
    ((8, 7.0), 0, [STARTED | {"threads": 8}, {"step": 1}], 8, "threads: 8, as before"),
    ((8, 7.0), 0, [STARTED | {"threads": 9}], 8, "last digits may differ"),
    ((8, 7.0), 0, [STARTED], 8, ""),  # from before it was recorded
]


@pytest.mark.parametrize(("setting", "pinned", "lines", "expected", "words"), CASES)
def test_threads_are_the_free_cores_or_those_of_before(cores, setting, pinned, lines, expected, words):
    cores(*setting)
    number, said = machine.threads_of(lines, pinned=pinned)
    assert number == expected
    assert words in said


def test_the_cores_of_other_programs_are_counted():
    assert 0 <= cores_of_others() <= os.cpu_count()


def test_the_peak_is_measured_once_and_the_same_for_every_recipe(cache):
    first = machine.yardstick(CPU, torch.float32)
    assert 1e9 < first.flops < 1e15
    assert f"{first.flops / 1e12:.3g} TFLOP/s, the fastest " in first.source
    assert "matmul (CPU, 1 thread; measured 20" in first.source
    (entry,) = cache.rglob("*.json")
    assert (
        machine.yardstick(CPU, torch.bfloat16) == first == machine.Yardstick(**json.loads(entry.read_text()))
    )
    entry.write_text("{")
    assert machine.yardstick(CPU, torch.float32).flops > 0


def test_a_machine_has_the_peak_of_its_faster_dtype_if_it_can_be_repeated(cache, monkeypatch):
    """A busy machine: the third fastest try takes twice as long as the fastest."""
    seconds = {torch.float32: 0.02, torch.bfloat16: 0.01}
    monkeypatch.setattr(machine, "fastest_tries", lambda n, device, dtype: [seconds[dtype]] * 3)
    faster = machine.measure(CPU, torch.float32)
    assert "bfloat16" in faster.source
    monkeypatch.setattr(machine, "fastest_tries", lambda *_: [0.01, 0.012, 0.02])
    found = machine.yardstick(CPU, torch.float32)
    assert found.flops is None
    assert "the device is busy" in found.source
    assert not list(cache.rglob("*.json")), "and is tried again by the next run"
