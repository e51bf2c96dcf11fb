"""Best and expected come from one count, of the path that a recipe takes on a device."""

import json
import subprocess
import sys
from functools import cache

import pytest

import narrowgauge as ng
from narrowgauge.trainer.cluster.plan.cluster_spec import load_cluster
from narrowgauge.trainer.cluster.plan.plan import make_plan
from narrowgauge.trainer.training import make_config

MODELS = {"small": {"name": "gpt2-124m", "layers": 2}, "long": {"name": "qwen2.5-7b", "layers": 2}}


@cache
def plan(recipe, cluster, devices=1, model="small", **training):
    """Each plan is counted once for all tests."""
    base = {"batch_size": 8, "micro_batch_size": 4}
    values = {"model": MODELS[model], "data": {"sequence_length": 128}, "training": base | training}
    return make_plan(make_config(values | {"recipe": {"name": recipe}}), devices, load_cluster(cluster))


# one of each path: high precision, native, kernels, plain operations
@pytest.mark.tier("nightly", keep=("fp32", "fp8", "nvfp4", "fp4"))
@pytest.mark.parametrize("recipe", ng.recipe_names())
def test_the_best_is_the_floor_of_the_same_count(recipe):
    """Of every part of the step; nothing is cut off at 100 %."""
    found = plan(recipe, "h200")
    count = found.time.count
    assert found.time.expected.is_counted
    assert found.time.seconds == pytest.approx(count.seconds_at_best, rel=1e-12)
    assert count.seconds == count.expected.seconds > count.seconds_at_best
    for part in ("first", "further", "update"):
        for of in ("product_seconds", "attention_seconds", "cast_seconds", "seconds"):
            best, expected = (getattr(getattr(step, part), of) for step in (count.best, count.expected))
            assert best <= expected, (part, of)


@pytest.mark.tier("thorough")
def test_a_step_of_one_micro_batch_casts_its_weights():
    """The first micro-batch of a step casts weights, which the further ones read: fp8's largest and codes."""
    one, two, four = (plan("msamp-o2", "h200", batch_size=4 * n).time.count for n in (1, 2, 4))
    assert one.best.first.cast_seconds > one.best.further.cast_seconds
    assert four.seconds_at_best - two.seconds_at_best == pytest.approx(2 * two.best.further.seconds)
    assert one.seconds_at_best == pytest.approx(one.best.first.seconds + one.best.update.seconds)


FORMATS = {("fp4", "h100"): "bf16", ("fp32", "h200"): "fp32", ("fp16", "v100"): "fp16"}
FORMATS[("bf16", "v100")] = "fp32"


@pytest.mark.tier("thorough")
def test_products_are_those_that_the_device_multiplies():
    """The forward matmuls of `fp4` are by rows, whose scales are applied afterwards: bf16, and not fp32."""
    assert {key: plan(*key).time.formats[0] for key in FORMATS} == FORMATS
    assert plan("fp4", "h100").time.causes.products < 2 * plan("bf16", "h100").time.causes.products
    half, wide = (plan(name, "v100").time.count for name in ("fp16", "bf16"))
    assert half.seconds < wide.seconds, "counted with torch's own operations"


@pytest.mark.tier("thorough", keep=("nvfp4-b200", "fp4-h100"))
@pytest.mark.parametrize(("recipe", "cluster"), [("fp8", "rtx4090"), ("nvfp4", "b200"), ("fp4", "h100")])
def test_mfu_is_of_the_formats_that_are_multiplied(recipe, cluster):
    """MFU divides by the peak of the formats multiplied: over bf16's peak, FP8 and FP4 would exceed 1."""
    assert 0 < plan(recipe, cluster, model="long", micro_batch_size=8).time.mfu < 1


WITHOUT = "import sys; sys.modules['triton'] = None; from narrowgauge.trainer.cli.main import main; main()"
LINE = "--data.sequence_length 128 --model.layers 2 --training.batch_size 8 --training.micro_batch_size 4"


@pytest.mark.tier("thorough")
def test_a_plan_does_not_need_triton(narrowgauge):
    """Kernels are declared without it, so memory and the counted step equal a machine's that has it."""
    line = ["plan", "--model", "gpt2-124m", *LINE.split(), "--recipe", "nvfp4", "--cluster", "h200", "--json"]
    here = narrowgauge(*line)
    command = [sys.executable, "-c", WITHOUT, *line]
    told = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert "counted" in told["expect"]
    assert told == json.loads(here.out)
