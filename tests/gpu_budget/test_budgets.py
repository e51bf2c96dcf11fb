"""What a micro-batch costs on GPUs that are not here is what docs/performance.md shows: counted throughout.

Whoever changes a figure changes the page. Of other GPUs, what a recipe gains over another is held here.
Seconds are an H200's, in the proportion of data sheets for GPUs with a machine file
(`cluster/plan/machines`), which an RTX 5090 and an MI355X lack. Steps of whole models are counted from models
of few layers: a count is linear in them.
"""

from functools import cache
from pathlib import Path

import pytest

from narrowgauge.recipes import named_device
from narrowgauge.trainer.cluster.plan.cluster_spec import cluster_names, load_cluster
from narrowgauge.trainer.cluster.plan.estimate import speeds_of
from narrowgauge.trainer.simulate import H200, count_step, count_whole
from narrowgauge.trainer.simulate.speeds import FUNCTION_S, LAUNCH_S
from narrowgauge.trainer.training import make_config

PAGE = (Path(__file__).parents[2] / "docs" / "performance.md").read_text(encoding="utf-8")
COUNTED = PAGE.partition("## Counted for a GPU")[2].splitlines()
# model, sequences of a micro-batch, their length
BIG, SMALL = ("qwen2.5-1.5b", 16, 1024), ("qwen2.5-0.5b", 16, 1024)
FEW, GPT2 = ("qwen2.5-0.5b", 4, 1024), ("gpt2-124m", 16, 1024)
STREAM, IN_CHUNKS = {"recipe.stream": "bf16"}, {"training.chunked_loss": True}
BOTH = STREAM | {"recipe.keep": "none"}  # the stream in bf16, the head in FP8


def config_of(size, recipe, layers=None, **options):
    """A configuration at the real width; tokens of a step are 524,288."""
    name, sequences, length = size
    values = {
        "model": {"name": name} | ({} if layers is None else {"layers": layers}),
        "data": {"sequence_length": length},
        "training": {"batch_size": 524288 // length, "micro_batch_size": sequences},
        "recipe": {"name": recipe},
    }
    for key, value in options.items():
        section, _, name = key.partition(".")
        values[section][name] = value
    return make_config(values)


@cache
def _counted(size, recipe, gpu, options):
    speeds = speeds_of(load_cluster(gpu)) if gpu in cluster_names() else H200
    return count_whole(config_of(size, recipe, **dict(options)), named_device(gpu), speeds)


def counted(size, recipe, gpu="h200", **options):
    """(the figures of a further micro-batch at calibrated speeds, GiB at the peak); the host never waits."""
    step = _counted(size, recipe, gpu, tuple(options.items()))
    assert step.expected.further.waits == 0
    return step.expected.further, step.peak_bytes / 2**30


def shown(label):
    """The figures of a row of the page."""
    (row,) = (line for line in COUNTED if line.startswith(f"| {label} "))
    return [float(word.strip(" *").replace(",", "")) for word in row.strip("|").split("|")[1:]]


#: Of the table of launches, GB and ms: the recipes of a row, and options.
ROWS = {
    "`bf16`": (["bf16"], {}),
    "`fp8`, `fp8-delayed`": (["fp8", "fp8-delayed"], {}),
    "`fp8`, stream in bf16": (["fp8"], STREAM),
    "and the head in FP8": (["fp8"], BOTH),
    "`mxfp8`, `mxfp4` emulated": (["mxfp8", "mxfp4"], {}),
    "`nvfp4` emulated": (["nvfp4"], {}),
    "`quartet` emulated": (["quartet"], {}),
    "`fp4` emulated": (["fp4"], {}),
    "`msamp-o2`": (["msamp-o2"], {}),
}


@pytest.mark.tier("nightly", keep=("`fp8`, `fp8-delayed`", "and the head in FP8", "`nvfp4` emulated"))
@pytest.mark.tier("thorough", keep=("`fp8`, `fp8-delayed`",))
@pytest.mark.parametrize("label", ROWS)
def test_the_page_shows_what_a_micro_batch_costs(label):
    recipes, options = ROWS[label]
    for recipe in recipes:
        micro, _ = counted(BIG, recipe, **options)
        found = micro.launches, micro.bytes / 1e9, 1e3 * micro.seconds
        assert found == pytest.approx(shown(label), rel=5e-3)


@pytest.mark.tier("nightly")
def test_the_page_shows_what_options_that_change_no_number_cost():
    ways = {}, IN_CHUNKS, IN_CHUNKS | {"training.recompute": "selective"}
    rows = "none", "`--training.chunked_loss true`", "and `--training.recompute selective`"
    for row, way in zip(rows, ways, strict=True):
        micro, gib = counted(BIG, "fp8", **way)
        assert [gib, 1e3 * micro.seconds, micro.bytes / 1e9] == pytest.approx(shown(row), rel=5e-3)


#: On a GPU: size, a recipe and another, and the first one's share of the other's seconds.
SHARES = {
    "0.5b": ("h200", SMALL, "fp8", "bf16", 0.8426),
    "b200 nvfp4": ("b200", BIG, "nvfp4", "bf16", 0.741),
    "b200 mxfp8": ("b200", BIG, "mxfp8", "bf16", 0.819),
    "b200 fp8": ("b200", BIG, "fp8", "bf16", 0.7783),
    "rtx5090 nvfp4": ("rtx5090", FEW, "nvfp4", "bf16", 0.7206),
    "rtx5090 mxfp8": ("rtx5090", FEW, "mxfp8", "bf16", 0.8337),
    "rtx4090 fp8": ("rtx4090", FEW, "fp8", "bf16", 0.8349),
    "mi300x fp8": ("mi300x", BIG, "fp8-fnuz", "bf16", 0.74),
    "mi355x fp8": ("mi355x", BIG, "fp8", "bf16", 0.7607),
    "mi355x mxfp8": ("mi355x", BIG, "mxfp8", "bf16", 1.16),  # emulated
    "t4 fp16": ("t4", FEW, "fp16", "fp32", 1.035),  # at plain operations, without kernels
}


@pytest.mark.tier("thorough", nightly=("0.5b", "b200 nvfp4"))
@pytest.mark.parametrize("name", SHARES)
def test_a_recipe_is_as_much_faster_than_another(name):
    gpu, size, recipe, other, share = SHARES[name]
    ours, theirs = (counted(size, one, gpu)[0].seconds for one in (recipe, other))
    assert ours / theirs <= 1.0005 * share


@pytest.mark.parametrize(("size", "recipe"), [(BIG, "fp8"), (SMALL, "fp8"), (GPT2, "bf16")])
def test_the_host_runs_ahead(size, recipe):
    """By the assumed cost of its calls it needs less than half of the device's time."""
    micro, _ = counted(size, recipe)
    assert micro.launches * LAUNCH_S + micro.functions * FUNCTION_S < 0.5 * micro.seconds


def test_the_clip_is_a_few_launches():
    """Two launches a parameter were 651 in an update of 28 blocks, 22 a block."""
    two, three = (
        count_step(config_of(BIG, "bf16", layers), named_device("h200")).totals(H200).update
        for layers in (2, 3)
    )
    assert two.launches <= 28
    assert three.launches - two.launches <= 1
