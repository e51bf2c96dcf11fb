"""Plans: clusters are data, figures follow from them, and a few layers tell what many take."""

import json
import re
import shlex
from importlib import resources

import pytest

from narrowgauge.distributed import ParallelDims
from narrowgauge.system.errors import UserError
from narrowgauge.system.units import parse_bytes
from narrowgauge.trainer.cluster.data_file import read_tables
from narrowgauge.trainer.cluster.plan import cluster_spec
from narrowgauge.trainer.cluster.plan.budget import parse_price, tokens_of
from narrowgauge.trainer.cluster.plan.cluster_spec import Cluster, cluster_names, load_cluster
from narrowgauge.trainer.cluster.plan.estimate import counted_step, estimate, expectation, speeds_of
from narrowgauge.trainer.cluster.plan.plan import as_json, fewest_devices, make_plan
from narrowgauge.trainer.simulate import (
    SINGLE,
    Memory,
    StepEstimate,
    count_step,
    estimate_memory,
    estimate_step,
)
from narrowgauge.trainer.simulate.memory import CLASSES
from narrowgauge.trainer.simulate.room import Room, copy_of_save
from narrowgauge.trainer.training import make_config
from support.runs import config_of

SMALL = {"name": "debug", "dim": 128, "ffn_dim": 256, "vocab_size": 256}


def config(recipe="bf16", model=SMALL, **training):
    return config_of(recipe, model, 128, **{"batch_size": 16} | training)


def text_of(name):
    return (resources.files("narrowgauge.trainer.cluster.plan") / "machines" / f"{name}.toml").read_text()


def test_clusters_that_ship():
    for name in cluster_names():
        cluster = load_cluster(name)
        assert cluster.title
        assert cluster.facts.maker in ("nvidia", "amd", "cpu")
        assert parse_bytes(cluster.memory) > 1e10
        assert all(cluster.speed(kind) <= cluster.peak[kind] for kind in cluster.peak)


def test_a_cluster_of_ones_own(tmp_path):
    lines = cluster_spec.__doc__.split("\n\n    ", 1)[1].split("\n\nA recipe is native")[0]
    file = tmp_path / "mine.toml"
    file.write_text("\n".join(line.strip() for line in lines.splitlines()))
    assert str(load_cluster(str(file)).price) == "3.50 USD"
    assert load_cluster("4090") == load_cluster("rtx4090"), "an ending stands for the one that has it"
    for name, words in (("100", "unknown cluster '100'"), ("fronteir", "frontier")):  # a100, h100 and v100
        with pytest.raises(UserError, match=words):
            load_cluster(name)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('colour = "red"', "'colour'"),
        ("devices_per_node = 0", "devices_per_node is 0, but it must be at least 1"),
        ('memory = "much"', "memory size 'much'"),
        ("inside = inf", "inside is inf, but it must be a finite number"),
        ('gpu = "sm_88"', "mine.toml: unknown device 'sm_88'; the nearest are sm_89"),
        ("price = -1", "mine.toml: price '-1': it must be the price of a device-hour"),
    ],
)
def test_a_mistake_in_a_cluster_is_named(line, words):
    key = line.split(" =")[0]
    kept = "\n".join(x for x in text_of("h100").splitlines() if not x.startswith(f"{key} ="))
    with pytest.raises(UserError, match=words):
        read_tables(Cluster, "cluster", f"{line}\n{kept}", "mine.toml")


PRICES = {"2.50USD": "2.50 USD", "2.5 EUR": "2.50 EUR", "$3": "3.00 $", "1234": "1,234"}


def test_a_price_has_the_currency_that_was_written_and_tokens_are_a_number():
    assert {text: str(parse_price("--price", text)) for text in PRICES} == PRICES
    assert str(parse_price("--price", "0.004USD")) == "below 0.01 USD"
    for text in ("", "-1", "EUR 2 USD"):
        with pytest.raises(UserError, match=r"--price .*such as 2\.50USD"):
            parse_price("--price", text)
    for text in ("many", "nan", "1e30"):
        with pytest.raises(UserError, match="300B, 1T"):
            tokens_of(text)


@pytest.mark.tier("thorough")
def test_a_format_that_the_device_lacks_is_priced_as_emulation():
    """Matmuls in bf16 as under recipe bf16, and casts on top; where torch's operations cast, in fp32."""
    dims = ParallelDims()
    step = estimate_step(config("bf16", SMALL | {"layers": 1}), dims)

    def of(recipe, name):
        narrow = config(recipe, {"name": "llama3-1b", "layers": 2}, micro_batch_size=16)
        return estimate(narrow, dims, load_cluster(name), step)

    wide, hopper, a100 = of("bf16", "h100"), of("mxfp4", "h100"), of("bf16", "a100")
    assert (hopper.backend.name, hopper.formats[0]) == ("emulated", "bf16")
    assert hopper.causes.products == pytest.approx(wide.causes.products)
    assert hopper.causes.casts > 2 * wide.causes.casts
    assert of("nvfp4", "rtx4090").backend.name == "emulated"
    blackwell = of("nvfp4", "b200")  # its last block and its head are kept in bf16
    assert (blackwell.backend.name, set(blackwell.formats)) == ("native", {"fp4", "bf16"})
    assert blackwell.causes.products < of("bf16", "b200").causes.products
    plain = a100.causes.products
    assert [of(name, "a100").causes.products for name in ("fp8", "fp8-block")] == pytest.approx([plain] * 2)
    assert of("fp8-block", "h100").causes.products < wide.causes.products
    assert of("averis", "a100").causes.products > 2 * plain, "its forward products are in fp32"


def test_what_is_expected_is_what_the_nearest_runs_reached():
    """Another size of the model is further than another format, or than more devices."""
    frontier, card, h100 = (load_cluster(name).measured for name in ("frontier", "rtx4090", "h100"))
    many, few = (expectation(frontier, devices, 8_030_261_248, "bf16") for devices in (512, 32))
    assert [run.tokens_per_s for run in many.runs] == [345, 426, 537]
    assert many.least < many.share < many.most
    assert [run.devices for run in few.runs] == [64]
    assert {run.format for run in expectation(card, 1, 124_000_000, "fp8").runs} == {"fp8"}
    assert [run.format for run in expectation(h100, 8, 124_000_000, "fp8").runs] == ["bf16"]
    assert expectation(card, 1, 7_000_000_000, "bf16").share <= 1
    assert expectation((), 1, 1, "bf16") is None


@pytest.mark.tier("thorough")
def test_the_smallest_number_of_devices_is_found():
    """The first that fits, in the order of numbers that the batch can be cut over; micro-batches shrink."""

    def of(shard, micro=6):
        size = min(micro, 12 // shard)
        return config("bf16", SMALL | {"layers": 2}, batch_size=12, micro_batch_size=size)

    peaks = {shard: estimate_memory(of(shard), ParallelDims(shard=shard)).peak for shard in (2, 3)}
    big, limit, two = of(1), peaks[3], ParallelDims(replicate=2)
    memory = estimate_memory(big, two)
    found = fewest_devices(big, two, memory, lambda m, _: m.peak <= limit)
    assert (found.parallel_dims.shard, found.parallel_dims.replicate, found.micro_batch_size) == (3, 1, 4)
    assert peaks[2] > limit
    half = ParallelDims(shard=2)
    fitting = estimate_memory(big, half)
    down = fewest_devices(big, half, fitting, lambda m, _: m.peak <= fitting.peak)
    assert (down.parallel_dims.shard, down.memory) == (2, fitting)
    assert fewest_devices(big, ParallelDims(), memory, lambda *_: False) is None


@pytest.fixture(scope="module")
def counted():
    """A step of eight micro-batches, counted on one device."""
    values = config("bf16", SMALL | {"layers": 4})
    return values, counted_step(values, ParallelDims(), load_cluster("h100"))


@pytest.mark.parametrize("mesh", [{}, {"shard": 2}, {"pipeline": 2}, {"pipeline": 2, "chunks": 2}], ids=str)
def test_the_time_of_a_step_follows_from_its_memory_and_traffic(mesh, counted):
    """A pipeline waits (P - 1) / (m x chunks) of the time that it computes; gradients on the host travel in
    each micro-batch; a device updates its own state; and only gather and reduce overlap computation."""
    (values, count), dims, cluster = counted, ParallelDims(**mesh), load_cluster("h100")
    host = {"gradients": 5 * 10**8, "m": 10**8}
    memory = Memory(dict.fromkeys(CLASSES, 0) | {"weights": 10**9, "m": 3 * 10**9}, host, 2**33)
    sent = {("gather", tuple(range(16))): 2**30, ("reduce", tuple(range(4))): 2**28, ("stage", (0, 8)): 2**20}
    time = estimate(values, dims, cluster, StepEstimate(memory, sent), count)
    busy, micro_batches = time.causes.products + time.causes.casts + time.causes.passes, 8 // dims.data
    assert busy * dims.size == pytest.approx(count.best.of_micro_batches("seconds"))
    assert time.causes.bubble == pytest.approx(busy * (dims.pipeline - 1) / (micro_batches * dims.chunks))
    assert time.causes.update == pytest.approx(count.best.update.seconds * memory.state / count.state_bytes)
    assert time.causes.copies == pytest.approx(2 * (6e8 + micro_batches * 5e8) / cluster.host)
    # each node sends on as much as each of its ranks
    gather = 2**30 / min(8 * cluster.between, cluster.inside)
    reduce, stage = 2**28 / cluster.inside, 2**20 / cluster.between
    assert [v.seconds for v in time.volumes] == pytest.approx([gather, reduce, stage])
    assert [v.between for v in time.volumes] == [2**30 // 8, 0, 2**20]
    assert time.causes.waiting == pytest.approx(max(0, gather + reduce - busy) + stage)


def test_a_save_in_the_background_takes_the_hosts_memory():
    memory = estimate_memory(config(), ParallelDims(shard=2))
    state = sum(memory.device[name] for name in ("weights", "m", "v"))
    assert copy_of_save(memory, ParallelDims(shard=2)) == state
    assert copy_of_save(memory, ParallelDims(replicate=2)) == state // 2


@pytest.mark.tier("thorough")
def test_the_command(narrowgauge):
    """Published: 16.8 M tokens in 61 to 95 s, in three weeks of 2024; a ceiling is below every run."""
    words = "--model llama3-8b --recipe bf16 --cluster frontier --devices 512 --data.sequence_length 8192 "
    words += "--training.batch_size 2048 --training.micro_batch_size 4 --training.recompute true "
    words += "--tokens 1T --price 1EUR --json"
    ended = narrowgauge("plan", *words.split())
    assert ended.code == 0, ended.err
    told = json.loads(ended.out)
    step, run, expect = told["step"], told["run"], told["expect"]
    assert (told["memory"]["fits"], told["devices"], step["tokens"]) == (True, 512, 2**24)
    assert (run["price"], run["currency"]) == (pytest.approx(run["device-hours"]), "EUR")
    assert step["seconds"] < 61
    slowest, fastest = step["seconds"] / expect["least"], step["seconds"] / expect["most"]
    assert (fastest, slowest) == pytest.approx((61, 95), rel=0.02)
    assert 1 < told["fewest_devices"] < 512
    words = "--model llama3-1b --recipe mxfp4 --cluster h100 --data.sequence_length 128 --model.layers 1"
    shown = narrowgauge("plan", *words.split(), "--tokens", "5B")
    for words in ("recipe mxfp4 is emulated on this device", "5,000,000,000 tokens", "cost: at 3.50 USD"):
        assert words in shown.out, shown.err
    assert [narrowgauge("plan", *words).code for words in (("--tokens", "1T"), ("--devices", "0"))] == [2, 2]


@pytest.mark.tier("thorough")  # plans of seconds
def test_what_nobody_gave_is_chosen_and_said():
    """A batch that the devices can share, and micro-batches of it; `train` would refuse the default batch."""
    plan = make_plan(make_config({"model": SMALL, "data": {"sequence_length": 128}}), 16)
    assert (plan.config.training.batch_size, plan.config.training.micro_batch_size) == (16, 1)
    batch, micro = plan.chosen
    assert "--training.batch_size 16, which was chosen: the default of 8 does not fit 16 devices" in batch
    assert "micro-batches of 1 (training.micro_batch_size), which was chosen" in micro
    assert as_json(plan)["chosen"] == [batch, micro]
    with pytest.raises(UserError, match=r"training\.batch_size = 8 cannot be divided over .* = 16 processes"):
        make_plan(make_config({"model": SMALL, "training": {"batch_size": 8}}), 16)


@pytest.mark.tier("thorough")
def test_what_is_expected_of_one_gpu_is_counted():
    """What several devices take, and what a compiled step takes, is not called counted."""
    h200, five = load_cluster("h200"), config("fp8", SMALL | {"layers": 5})
    found, told = counted_step(five, ParallelDims(), h200), as_json(make_plan(five, 1, h200))["expect"]
    assert told["seconds"] == pytest.approx(found.seconds)
    assert told["counted"]["seconds"] == found.seconds
    assert not make_plan(five, 2, h200).time.expected.is_counted
    with pytest.raises(UserError, match="a compiled step is not counted"):
        count_step(config("fp8", SMALL | {"layers": 5}, compile=True), h200.facts)
    assert speeds_of(load_cluster("rtx4090")).bytes_per_s < speeds_of(h200).bytes_per_s
    host = {"m": int(found.seconds_at_best * h200.host)}  # which is read and written
    step = estimate_step(five)
    step = StepEstimate(Memory(step.memory.device, host, step.memory.parameters), {})
    copied = estimate(five, ParallelDims(), h200.model_copy(update={"measured": ()}), step, found)
    assert copied.expected.share == copied.expected.least == copied.seconds / copied.seconds_expected
    copies = copied.causes.copies
    assert copied.seconds_expected == pytest.approx(found.seconds + copies), "the host's link"


@pytest.mark.tier("thorough")
def test_the_line_that_fits_is_printed_and_fits(narrowgauge):
    """All settings do not make fp8 fit, so the recipe changes as well; what was given stays where it can."""
    least = {"micro_batch_size": 1, "batch_size": 4, "recompute": True, "chunked_loss": True}
    narrow = {"name": "msamp-o3", "offload": "master,grad,m,v"}
    data, model = {"sequence_length": 128}, {"name": "gpt2-124m", "layers": 4, "vocab_size": 256}
    smallest = make_config({"model": model, "data": data, "training": least, "recipe": narrow})
    memory = estimate_memory(smallest)
    limit = Room(0, "", has_host=True, copies_saves=False).needed(memory, SINGLE)
    words = "--model gpt2-124m --model.layers 4 --model.vocab_size 256 --data.sequence_length 128 "
    words += f"--recipe fp8 --training.batch_size 4 --training.micro_batch_size 4 --memory-limit {limit}B"
    shown = narrowgauge("plan", *words.split())
    assert "does not fit: " in shown.out, shown.err
    fitting = r"^it fits with these changes, .*:\n  (narrowgauge plan .*)$"
    (line,) = re.findall(fitting, shown.out, re.MULTILINE)
    given = shlex.split(line)
    assert given.count("--recipe") == given.count("--training.micro_batch_size") == 1
    assert given[given.index("--recipe") + 1] == "msamp-o3"
    again = narrowgauge(*given[1:])
    assert re.search("^fits: ", again.out, re.MULTILINE), again.out
    assert "it fits with these changes" not in again.out
    assert json.loads(narrowgauge("plan", *words.split(), "--json").out)["fits_with"]["peak"] <= memory.peak
