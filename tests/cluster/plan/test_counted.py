"""Best and expected come from one count, of the path that a recipe takes on a device."""

from dataclasses import replace

import pytest
import torch

import narrowgauge as ng
from narrowgauge.cluster import cluster_names, load_cluster, make_plan
from narrowgauge.cluster.plan.counted import ceilings_of, speeds_of
from narrowgauge.devices import imagine
from narrowgauge.distributed import ParallelDims
from narrowgauge.kernels.cast import emulate
from narrowgauge.quantization import make_cast
from narrowgauge.recipes import named_device
from narrowgauge.simulate import H200
from narrowgauge.simulate.operations import Cost
from narrowgauge.training import make_config

SMALL = {"name": "gpt2-124m", "layers": 2}


def plan(recipe, cluster, devices=1, model=SMALL, **training):
    base = {"batch_size": 8, "micro_batch_size": 4}
    values = {"model": model, "data": {"sequence_length": 128}, "training": base | training}
    return make_plan(make_config(values | {"recipe": {"name": recipe}}), devices, load_cluster(cluster))


# one of each path: high precision, native, kernels, plain operations
@pytest.mark.tier("thorough", keep=("fp32", "fp8", "nvfp4", "fp4"))
@pytest.mark.parametrize("recipe", ng.recipe_names())
def test_the_best_is_the_floor_of_the_same_count(recipe):
    """Of every part of the step; nothing is cut off at 100 %."""
    found = plan(recipe, "h200")
    count = found.expected.counted
    assert count is found.time.count
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


@pytest.mark.tier("thorough")
def test_an_update_is_counted():
    """CoAT's moments are cast by torch's operations, which move many times the bytes of the state."""
    coat, fp8 = (plan(name, "h200").time for name in ("coat", "fp8"))
    assert coat.update > 10 * fp8.update


@pytest.mark.parametrize("cluster", cluster_names())
def test_expected_speeds_are_below_the_ceilings(cluster):
    spec = load_cluster(cluster)
    for compute in ("bf16", "fp16", "fp32"):
        best, expected = ceilings_of(spec, compute), speeds_of(spec, compute).calibrated()
        assert expected.within(best) == replace(expected, lanes_per_s=best.lanes_per_s)


def test_no_rate_exceeds_a_ceiling():
    """A ceiling that lies below a measured speed bounds it, so no operation is faster than at best."""
    low = replace(H200, bytes_per_s=1e12, flops_per_s=H200.flops_per_s | {"fp8": 1e14}, kernel_s=1e-5)
    found = H200.within(low)
    assert (found.bytes_per_s, found.flops_per_s["fp8"], found.kernel_s) == (1e12, 1e14, 1e-5)
    assert found.flops_per_s["bf16"] == H200.flops_per_s["bf16"]


def test_a_cast_is_told_with_its_instructions():
    """82 an element of MXFP4 across the contraction, which take longer than 2 bytes read and 2 written."""
    told = []
    with imagine(named_device("h100"), told.append):
        x = torch.empty(4096, 2048, dtype=torch.bfloat16, device="meta")
        emulate(x, make_cast("mxfp4"), 0, torch.bfloat16)
    (work,) = told
    assert work.lanes == 82 * x.numel()
    moved = sum(t.numel() * t.element_size() for t in (*work.reads, *work.writes))
    ceilings = ceilings_of(load_cluster("h100"), "bf16")
    assert ceilings.seconds(Cost(moved, lanes=work.lanes)) == work.lanes / 33.5e12 > moved / 3.35e12


@pytest.mark.tier("thorough")
@pytest.mark.parametrize("devices", [1, 2])
def test_four_over_six_is_priced_by_its_own_casts(devices):
    """No kernel chooses between candidates. Torch's operations move many times the bytes of NVFP4's."""
    plain, chosen = (plan(name, "h200", devices).time for name in ("nvfp4", "nvfp4-4over6"))
    assert chosen.casts > 10 * plain.casts
    assert chosen.seconds > 2 * plain.seconds


@pytest.mark.tier("thorough")
def test_products_are_those_that_the_device_multiplies():
    """The forward matmuls of `fp4` are by rows, whose scales are applied afterwards: bf16, and not fp32."""
    assert plan("fp4", "h100").time.formats[0] == "bf16"
    assert plan("fp4", "h100").time.products < 2 * plan("bf16", "h100").time.products
    assert plan("fp32", "h200").time.formats == ("fp32",)


@pytest.mark.tier("thorough")
def test_devices_share_what_one_computes():
    one, four = (plan("fp8", "h200", n, micro_batch_size=2).time for n in (1, 4))
    for part in ("products", "casts", "passes"):
        assert getattr(four, part) == pytest.approx(getattr(one, part) / 4)


@pytest.mark.tier("thorough", keep=("nvfp4-b200", "fp4-h100"))
@pytest.mark.parametrize(("recipe", "cluster"), [("fp8", "rtx4090"), ("nvfp4", "b200"), ("fp4", "h100")])
def test_mfu_is_of_the_formats_that_are_multiplied(recipe, cluster):
    """MFU divides by the peak of the formats multiplied: over bf16's peak, FP8 and FP4 would exceed 1."""
    long = plan(recipe, cluster, model={"name": "qwen2.5-7b", "layers": 2}, micro_batch_size=8)
    assert 0 < long.time.mfu < 1


@pytest.mark.tier("thorough")
def test_a_plan_of_a_compiled_step_is_not_called_counted():
    compiled = plan("fp8", "h200", compile=True)
    assert compiled.expected.counted is None
    assert compiled.time.products == plan("fp8", "h200").time.products


@pytest.mark.tier("thorough")
def test_a_cpu_casts_by_plain_operations():
    """A machine without matrix units for narrow formats, and without kernels."""
    cpu = plan("fp8", "cpu").time
    assert cpu.backend.name == "emulated"
    assert cpu.casts > plan("bf16", "cpu").time.casts


@pytest.mark.tier("thorough")
def test_a_v100_is_counted_with_torchs_own_operations():
    half, wide = (plan(name, "v100") for name in ("fp16", "bf16"))
    assert half.time.formats == ("fp16",)
    assert wide.time.formats == ("fp32",)
    assert half.expected.counted.seconds < wide.expected.counted.seconds
    assert ParallelDims() == half.parallel_dims
