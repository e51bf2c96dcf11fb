"""Plans: clusters are data, figures follow from them, and a few layers tell what many take."""

import json
from importlib import resources

import pytest

from narrowgauge.cluster import cluster_names, load_cluster, make_plan, tokens_of
from narrowgauge.cluster.plan.cluster_spec import parse_cluster
from narrowgauge.cluster.plan.estimate import cost, estimate
from narrowgauge.cluster.plan.plan import as_json, copy_of_save
from narrowgauge.distributed import ParallelDims
from narrowgauge.errors import UserError
from narrowgauge.models import flops_per_token
from narrowgauge.training import cheaper, estimate_memory, estimate_step, make_config
from narrowgauge.training.monitor.memory_estimate import _heaviest

SMALL = {"name": "debug", "dim": 128, "ffn_dim": 256, "vocab_size": 256}


def config(recipe="bf16", model=SMALL, **training):
    base = {"batch_size": 16, "micro_batch_size": 2}
    data = {"sequence_length": 128}
    return make_config(
        {"model": model, "data": data, "training": base | training, "recipe": {"name": recipe}}
    )


@pytest.mark.parametrize("name", cluster_names())
def test_clusters_that_ship(name):
    cluster = load_cluster(name)
    assert cluster.title
    assert cluster.attainable["bf16"] <= cluster.peak["bf16"]
    assert cluster.memory_bytes > 1e10
    assert all(cluster.speed(kind) <= cluster.peak[kind] for kind in cluster.peak)
    text = (resources.files("narrowgauge.cluster.plan") / "machines" / f"{name}.toml").read_text()
    bare = [line for line in text.splitlines() if line.startswith(("memory =", "inside", "between", "host"))]
    assert all("#" in line for line in bare), "each figure has its source"


def test_the_form_in_the_module_is_a_cluster(tmp_path):
    from narrowgauge.cluster.plan import cluster_spec

    lines = cluster_spec.__doc__.split("\n\n    ", 1)[1].split("\n\nThe device")[0]
    file = tmp_path / "mine.toml"
    file.write_text("\n".join(line.strip() for line in lines.splitlines()))
    assert load_cluster(str(file)).price == 3.5


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('colour = "red"', "'colour'"),
        ("devices_per_node = 0", "devices_per_node: input should be greater than or equal to 1"),
        ('memory = "much"', "memory size 'much'"),
        ("inside = inf", "inside: input should be a finite number"),
    ],
)
def test_a_mistake_in_a_cluster_is_named(line, words):
    text = (resources.files("narrowgauge.cluster.plan") / "machines" / "h100.toml").read_text()
    key = line.split(" =")[0]
    kept = "\n".join(x for x in text.splitlines() if not x.startswith(f"{key} ="))
    with pytest.raises(UserError, match=words):
        parse_cluster(f"{line}\n{kept}", "mine.toml")


def test_an_unknown_cluster_is_told_the_nearest():
    with pytest.raises(UserError, match="frontier"):
        load_cluster("fronteir")


@pytest.mark.parametrize(
    ("recipe", "mesh"),
    [("bf16", {}), ("bf16", {"shard": 2, "zero": 1}), ("bf16", {"pipeline": 2})],
    ids=str,
)
def test_a_few_layers_tell_what_many_take(recipe, mesh):
    deep = config(recipe, SMALL | {"layers": 10})
    quick, slow = estimate_step(deep, ParallelDims(**mesh)), _heaviest(deep, ParallelDims(**mesh))
    for name in ("weights", "gradients", "m", "v", "logits", "saved activations"):
        assert quick.memory.device[name] == slow.memory.device[name], name
    assert quick.memory.peak == pytest.approx(slow.memory.peak, rel=0.03)
    assert quick.sent == slow.sent


def test_narrow_weights_and_gradients_travel_in_a_byte():
    sent = {
        name: estimate_step(config(name, SMALL | {"layers": 1}), ParallelDims(shard=4)).sent
        for name in ("fp32", "bf16", "fp8", "msamp-o2")
    }

    def of(name, purpose):
        return sum(size for (why, _), size in sent[name].items() if why == purpose)

    linear = 128 * 128 * 2 + 128 * 128 + 3 * 128 * 256  # qkv with 2 of 4 heads, out, mlp
    # Gathered for the forward and the backward pass of each of 2 micro-batches; a shard goes to 3 others.
    head = 128 * 256  # in bf16, too, and there for both passes
    assert of("fp32", "gather") - of("bf16", "gather") == 3 / 4 * (2 * linear + head) * 2 * 2
    assert of("fp32", "gather") - of("fp8", "gather") == pytest.approx(3 / 4 * linear * 3 * 2 * 2, rel=0.01)
    assert of("bf16", "reduce") - of("msamp-o2", "reduce") == pytest.approx(3 / 4 * linear * 3 * 2, rel=0.01)


def test_a_mesh_too_large_to_try_is_planned_in_a_moment():
    many = config("bf16", {"name": "llama3-8b"}, batch_size=4096, micro_batch_size=1)
    plan = make_plan(many, 4096, load_cluster("frontier"))
    assert plan.parallel_dims.shard == 4096
    assert plan.step.memory.device["m"] < 4.01 * 8.03e9 / 4096 + 2**20
    between = [v for v in plan.time.volumes if v.ranks == 4096]
    assert between
    assert all(v.between == pytest.approx((v.inside + v.between) / 8, rel=0.01) for v in between)


def test_time_obeys_its_ceilings():
    cluster, dims = load_cluster("h100"), ParallelDims(shard=8)
    one = config("bf16", {"name": "llama3-1b"}, batch_size=64)
    found = estimate(one, dims, cluster, estimate_step(one, dims))
    tokens = 64 * 128
    assert found.products <= found.seconds
    attained = cluster.attainable["bf16"] / cluster.peak["bf16"]
    assert 0 < found.mfu < attained
    useful = flops_per_token(one.spec.model, 128) * tokens / found.seconds / 8
    assert found.mfu == pytest.approx(useful / 989e12)
    narrow = config("fp8", {"name": "llama3-1b"}, batch_size=64)
    assert estimate(narrow, dims, cluster, estimate_step(narrow, dims)).products < found.products
    again = config("bf16", {"name": "llama3-1b"}, batch_size=64, recompute=True)
    assert estimate(again, dims, cluster, estimate_step(again, dims)).products > found.products


def test_links_between_nodes_are_waited_for():
    cluster = load_cluster("rtx4090")
    tiny = config("fp32", {"name": "llama3-1b"}, batch_size=8, micro_batch_size=1)
    inside, across = (make_plan(tiny, n, cluster).time for n in (4, 8))
    assert not any(v.between for v in inside.volumes)
    assert across.waiting > inside.waiting > 0


def test_a_budget_costs_what_it_takes():
    one = config("bf16", {"name": "llama3-1b"})
    plan = make_plan(one, 8, load_cluster("h100"))
    found = cost(plan.time, 8, tokens_of("1B"), 2.0)
    assert found["device-hours"] == pytest.approx(1e9 / (16 * 128) * plan.time.seconds * 8 / 3600)
    assert found["price"] == pytest.approx(2 * found["device-hours"])
    assert found["days"] == pytest.approx(found["device-hours"] / 8 / 24)


@pytest.mark.parametrize("text", ["", "many", "-1B", "0", "nan", "1e30"])
def test_what_is_no_number_of_tokens_is_refused(text):
    with pytest.raises(UserError, match="300B, 1T"):
        tokens_of(text)


def test_what_does_not_fit_is_told_what_would_help():
    big = config("bf16", SMALL | {"layers": 2}, batch_size=64)
    dims = ParallelDims(replicate=8)
    words = dict(cheaper(big, True, dims, wider=True))
    for change in ("--parallel.replicate 1 --parallel.shard 8", "--devices 16 --parallel.shard 2"):
        assert words[change].peak < estimate_memory(big, dims).peak, change
    assert words["--recipe msamp-o3"].state < estimate_memory(big, dims).state * 0.7


def test_a_save_in_the_background_takes_the_hosts_memory():
    memory = estimate_memory(config(), ParallelDims(shard=2))
    state = sum(memory.device[name] for name in ("weights", "m", "v"))
    assert copy_of_save(memory, ParallelDims(shard=2)) == state
    assert copy_of_save(memory, ParallelDims(replicate=2)) == state // 2


def test_the_command(narrowgauge):
    words = ["plan", "--model", "llama3-8b", "--recipe", "bf16", "--cluster", "frontier", "--devices", "512"]
    words += ["--data.sequence_length", "8192", "--training.batch_size", "2048", "--tokens", "1T", "--json"]
    words += ["--training.micro_batch_size", "4", "--training.recompute", "true", "--price", "1"]
    ended = narrowgauge(*words)
    assert ended.code == 0, ended.err
    told = json.loads(ended.out)
    assert told["memory"]["fits"]
    assert told["devices"] == 512
    # Published: 16.8 M tokens in 61 s, where a ceiling stands below every run.
    assert told["step"]["tokens"] == 2**24
    assert told["step"]["seconds"] < 61
    assert told["run"]["price"] == pytest.approx(told["run"]["device-hours"])
    assert narrowgauge("plan", "--tokens", "1T").code == 2
    assert narrowgauge("plan", "--devices", "0").code == 2


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
