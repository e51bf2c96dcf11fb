"""What a micro-batch may cost on other GPUs than the H200 of `test_budgets`: counted, nothing is measured.

Seconds are an H200's, in the proportion of data sheets, for GPUs with a machine file
(`cluster/plan/machines`). An RTX 5090 and an MI355X have none, so their launches and bytes are held.
"""

import pytest

from support.gpu_count import whole

SLACK = 1.0005  # the figures below are rounded
BIG, SMALL = ("qwen2.5-1.5b", 16, 28), ("qwen2.5-0.5b", 4, 24)  # model, sequences of 1024 tokens, blocks


def count(size, recipe, gpu):
    model, sequences, blocks = size
    return whole(model, recipe, sequences, 1024, blocks, gpu=gpu)


@pytest.mark.tier("thorough")
def test_nvfp4_is_faster_than_bf16_on_a_b200():
    """Casts write codes and scales as the hardware reads them; packed by torch, it took 1.9 times as long."""
    nvfp4, bf16 = (count(BIG, recipe, "b200") for recipe in ("nvfp4", "bf16"))
    assert nvfp4.seconds / bf16.seconds <= 0.741 * SLACK
    assert nvfp4.launches <= 2120
    assert nvfp4.waits == 0


@pytest.mark.tier("nightly", keep=1)
@pytest.mark.tier("thorough")  # test_nvfp4_is_faster_than_bf16_on_a_b200 keeps one
@pytest.mark.parametrize(
    ("gpu", "size", "recipe", "wide", "ratio"),
    [
        ("b200", BIG, "mxfp8", "bf16", 0.819),
        ("b200", BIG, "fp8", "bf16", 0.769),
        ("rtx4090", SMALL, "fp8", "bf16", 0.829),
        ("mi300x", BIG, "fp8-fnuz", "bf16", 0.74),
        ("t4", SMALL, "fp16", "fp32", 1.035),  # at plain operations, without kernels
    ],
)
def test_seconds_over_those_of_a_wide_recipe(gpu, size, recipe, wide, ratio):
    narrow, other = (count(size, name, gpu) for name in (recipe, wide))
    assert narrow.seconds / other.seconds <= ratio * SLACK
    assert narrow.waits == 0


@pytest.mark.tier("nightly", keep=1)
@pytest.mark.tier("thorough")
@pytest.mark.parametrize(
    ("gpu", "size", "recipe", "launches", "gigabytes"),
    [
        ("rtx5090", SMALL, "nvfp4", 1836, 50.11),
        ("rtx5090", SMALL, "mxfp8", 1244, 50.93),
        ("mi355x", BIG, "fp8", 1304, 309.3),
        ("mi355x", BIG, "mxfp8", 1668, 432.9),
    ],
)
def test_launches_and_bytes(gpu, size, recipe, launches, gigabytes):
    found = count(size, recipe, gpu)
    assert found.launches <= launches
    assert found.bytes / 1e9 <= gigabytes * SLACK
