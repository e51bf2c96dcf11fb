"""Where a step's time goes: a trace that a viewer of traces reads, and the time by class."""

import gzip
import io
import json

import pytest

from narrowgauge.trainer.runs.monitor.profiler import CLASSES, class_of, covered
from support.in_process import run_here


@pytest.fixture(scope="module")
def profiled(tiny, tmp_path_factory):
    """A run of which two steps were profiled, and what it said."""
    said, path = io.StringIO(), tmp_path_factory.mktemp("profiled") / "run"
    return run_here(tiny({"recipe.name": "mxfp8"}), path, said, profile=2), said.getvalue()


@pytest.mark.tier("thorough")  # a whole run
def test_the_trace_has_the_steps_asked_for_and_the_classes_make_up_a_step(profiled, trained, look):
    path, said = profiled
    with gzip.open(path / "profile" / "trace-rank-0.json.gz", "rt") as file:
        names = [event.get("name", "") for event in json.load(file)["traceEvents"]]
    assert [n for n in dict.fromkeys(names) if n.startswith("step ")] == ["step 3", "step 4"]
    attention = "aten::_scaled_dot_product_flash_attention_for_cpu"
    assert {"aten::mm", "Optimizer.step#AdamW.step", attention} <= set(names)
    (event,) = look(path).events("step time")
    assert event["step"] == 4
    assert set(event["ms"]) == {name for name, _ in CLASSES} | {"idle"}
    assert sum(event["ms"].values()) == pytest.approx(event["step_ms"], rel=0.02)
    for name in ("GEMMs", "casts", "attention", "loss", "optimizer"):
        assert event["ms"][name] > 0
    assert event["ms"]["communication"] == 0
    assert "ms a step while it was profiled: " in said
    assert look(path).trajectory == look(trained({"recipe.name": "mxfp8"})).trajectory


@pytest.mark.parametrize(
    ("callers", "expected"),
    [
        (("aten::copy_", "_LinearFunctionBackward"), "casts"),
        (("aten::addmm", "narrowgauge::scaled_mm", "_LinearFunction"), "GEMMs"),
        (("aten::copy_", "Optimizer.step#AdamW.step"), "optimizer"),
        (("aten::mul",), "norms and the rest"),
        (("aten::copy_", "FSDP::all_gather (blocks.0)"), "communication"),
    ],
)
def test_the_class_is_that_of_the_operation_or_of_whoever_called_it(callers, expected):
    assert class_of(callers) == expected


def test_kernels_at_the_same_time_count_once():
    assert covered([(0.0, 4.0), (1.0, 2.0), (3.0, 6.0), (8.0, 9.0)]) == 7.0
