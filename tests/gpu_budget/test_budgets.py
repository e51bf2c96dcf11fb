"""What a step may cost on a GPU, counted on one that is not here (an H200): nothing of it is measured.

A figure that has reached its goal is held to the goal. One that has not is held to what it is today, so that
it can only fall; the goal is next to it. Whoever lowers a figure lowers its ceiling.
"""

import pytest

from narrowgauge.simulate.speeds import FUNCTION_S, LAUNCH_S
from support.gpu_count import counted, updated, whole

BIG, SMALL, EIGHT, GPT2 = "qwen2.5-1.5b", "qwen2.5-0.5b", "llama3-8b", "gpt2-124m"
SLACK = 1.0005  # the figures below are rounded


def ceiling(figure, today, goal):
    """The figure is at most today's; a goal that is reached has to take its place."""
    assert figure <= today * SLACK, f"{figure:.5g} is more than {today:.5g}, which it was; the goal is {goal}"
    assert figure > goal or today == goal, f"the goal of {goal} is reached: it is the ceiling from now on"


def big(recipe, **options):
    return whole(BIG, recipe, 16, 1024, 28, options=tuple(options.items()))


@pytest.mark.tier("thorough")
@pytest.mark.parametrize("recipe", ["fp8", "bf16"])
def test_every_layer_costs_the_same_so_that_few_stand_for_all(recipe):
    two, three, five = (counted(BIG, recipe, 16, 1024, layers) for layers in (2, 3, 5))
    expected = two.plus(three.plus(two, -1), 3)
    for figure in ("launches", "functions", "waits"):
        assert getattr(five, figure) == getattr(expected, figure)
    assert five.bytes == expected.bytes
    assert five.seconds == pytest.approx(expected.seconds, rel=1e-9)
    assert five.peak_bytes == pytest.approx(expected.peak_bytes, rel=1e-3)


def test_fp8_at_1_5b():
    count = big("fp8")
    assert count.waits == 0
    ceiling(count.launches, today=1800, goal=1800)
    assert count.functions <= 342
    ceiling(count.bytes / 1e9, today=309.3, goal=290)
    ceiling(1e3 * count.seconds, today=208, goal=208)
    ceiling(count.peak_bytes / 2**30, today=53.94, goal=50)


def test_fp8_with_scales_of_earlier_steps_at_1_5b():
    """Casts lie in SwiGLU's kernels, so delayed scaling moves less than current scaling can."""
    count = big("fp8-delayed")
    assert count.waits == 0
    ceiling(count.launches, today=1800, goal=1800)
    ceiling(count.bytes / 1e9, today=290, goal=290)
    ceiling(1e3 * count.seconds, today=192, goal=192)


STREAM = {"recipe.stream": "bf16"}
BOTH = STREAM | {"recipe.keep": "none"}  # the stream in bf16, the head in FP8


@pytest.mark.tier("thorough")
def test_a_stream_in_bf16_pays():
    """The norms sum it. It took 5 % longer than one in fp32 when a separate module did."""
    fp8, bf16 = (big(recipe, **STREAM) for recipe in ("fp8", "bf16"))
    ceiling(1e3 * fp8.seconds, today=196.9, goal=170)
    ceiling(fp8.bytes / 1e9, today=291.1, goal=290)
    ceiling(1e3 * bf16.seconds, today=268.5, goal=268.5)
    assert fp8.peak_bytes < big("fp8").peak_bytes


@pytest.mark.tier("thorough")
def test_a_head_in_fp8_and_a_stream_in_bf16():
    """The head's three matmuls take 18 ms instead of 33, and its loss writes the codes that two of them
    read; 1.4 times as fast as bf16 at 0.5B."""
    fp8, delayed = (big(recipe, **BOTH) for recipe in ("fp8", "fp8-delayed"))
    ceiling(1e3 * fp8.seconds, today=181.2, goal=170)
    ceiling(fp8.bytes / 1e9, today=284.8, goal=284.8)
    ceiling(1e3 * delayed.seconds, today=170, goal=170)
    ceiling(fp8.peak_bytes / 2**30, today=56.93, goal=50)
    options = tuple(BOTH.items())
    narrow, wide = (
        whole(SMALL, recipe, 16, 1024, 24, options=o).seconds
        for recipe, o in (("fp8", options), ("bf16", ()))
    )
    ceiling(narrow / wide, today=1 / 1.3, goal=1 / 1.3)


@pytest.mark.tier("nightly")
def test_memory_of_fp8_at_1_5b_with_options_that_change_no_number():
    """At most 50 GiB for 3 % of the time, at most 36 GiB for 12 %: GiB, and seconds over those without."""
    chunked, selective = (big("fp8", chunked_loss=True, **o) for o in ({}, {"recompute": "selective"}))
    seconds = big("fp8").seconds
    assert chunked.seconds <= seconds * SLACK
    ceiling(selective.peak_bytes / 2**30, today=36, goal=36)
    ceiling(selective.seconds / seconds, today=1.12, goal=1.12)
    two_blocks = selective.plus(chunked, -1), 2 / 28  # with recompute_every = 14
    few = chunked.plus(*two_blocks)
    ceiling(few.peak_bytes / 2**30, today=50, goal=50)
    ceiling(few.seconds / seconds, today=1.03, goal=1.03)


@pytest.mark.tier("thorough")
def test_fp8_is_worth_it_at_0_5b():
    """The device's time of a micro-batch over that of bf16; the goal is a step that is 1.2 times as fast."""
    fp8, bf16 = (whole(SMALL, recipe, 16, 1024, 24).seconds for recipe in ("fp8", "bf16"))
    ceiling(fp8 / bf16, today=1 / 1.2, goal=1 / 1.2)


@pytest.mark.tier("nightly", keep=1)
@pytest.mark.tier("thorough")  # each takes ten seconds
@pytest.mark.parametrize(
    ("recipe", "today"),
    [("mxfp8", 1.25), ("mxfp4", 1.25), ("nvfp4", 1.25), ("quartet", 1.25), ("fp4", 1.5455)],
)
def test_emulation_at_1_5b(recipe, today):
    """The device's time of a micro-batch over that of bf16."""
    ceiling(big(recipe).seconds / big("bf16").seconds, today, goal=1.25)


@pytest.mark.tier("thorough")  # test_emulation_at_1_5b keeps one
def test_msamp_at_1_5b():
    """The device's time of a micro-batch over that of fp8; the goal is a step at 0.9 of its speed."""
    ceiling(big("msamp-o2").seconds / big("fp8").seconds, today=1 / 0.9, goal=1 / 0.9)


@pytest.mark.parametrize(
    ("model", "recipe", "layers"), [(BIG, "fp8", 28), (SMALL, "fp8", 24), (GPT2, "bf16", 12)]
)
def test_the_host_runs_ahead(model, recipe, layers):
    """It waits for nothing, and by the assumed cost of its calls it needs less than half of the device's
    time."""
    count = whole(model, recipe, 16, 1024, layers)
    assert count.waits == 0
    assert count.launches * LAUNCH_S + count.functions * FUNCTION_S < 0.5 * count.seconds


@pytest.mark.tier("nightly")
def test_recomputation_at_8b():
    """At the ceilings, in ms."""
    count = whole(EIGHT, "fp8", 2, 8192, 32, options=(("recompute", True),))
    ceiling(1e3 * count.ceiling_seconds, today=1150, goal=1150)


def test_the_clip_is_a_few_launches():
    """Two launches a parameter were 651 in an update of 28 blocks, 22 a block."""
    two, three = (updated(BIG, "bf16", 16, 1024, layers) for layers in (2, 3))
    assert two.launches <= 28
    assert three.launches - two.launches <= 1
