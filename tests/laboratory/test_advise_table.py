"""Advice for a dozen combinations of model, machine and budget, against brute force over its settings.

The oracle shares nothing with the search: it writes each setting as the words of a command line, and asks
for the memory and time of `plan` and the gap of `predict`. On one layout it tries up to `MOST` settings of a
recipe, which are all of a batch of one; on each of several layouts at least four. Of more settings it tries a
sample that depends on the title of the row alone.
"""

import json
import math
import random
import shlex
from functools import cache
from itertools import product
from types import SimpleNamespace

import pytest

import narrowgauge as ng
from narrowgauge.distributed import ParallelDims
from narrowgauge.forecast import Forecaster
from narrowgauge.recipes import recipe
from narrowgauge.system.devices import imagine
from narrowgauge.trainer.cli.line import config_values, read_line
from narrowgauge.trainer.cli.main import main
from narrowgauge.trainer.cluster.plan.budget import tokens_of
from narrowgauge.trainer.cluster.plan.cluster_spec import load_cluster
from narrowgauge.trainer.cluster.plan.estimate import estimate
from narrowgauge.trainer.models import count_block_weights, model_config
from narrowgauge.trainer.models.published import published
from narrowgauge.trainer.runs import lay_out
from narrowgauge.trainer.simulate import estimate_step
from narrowgauge.trainer.training import make_config

pytestmark = pytest.mark.tier("thorough")

MOST = 12
MICRO_BATCHES, RECOMPUTE, CHUNKED = (16, 8, 4, 2, 1), ("false", "selective", "true"), ("false", "true")
OFFLOAD = ("", "master,grad,m,v")


def row(model, cluster, recipes, refused="", is_default=False, layouts=((1, 1, 1, 1),), **given):
    """A combination: the candidates, which are named to `advise` unless `is_default`; part of the sentence
    that refuses it, if any; the (pipeline, replicate, shard, tensor) of each layout; and other arguments."""
    return SimpleNamespace(
        model=model,
        cluster=cluster,
        recipes=recipes.split(","),
        refused=refused,
        is_default=is_default,
        layouts=layouts,
        given={"batch_size": 1, **given},
    )


TWO = [(1, 2, 1, 1), (1, 1, 2, 1), (1, 1, 1, 2)]
EIGHT = [(1, 8, 1, 1), (1, 1, 8, 1), (1, 1, 4, 2), (1, 1, 2, 4), (1, 1, 1, 8)]
FRONTIER = [(1, 256, 1, 1), (1, 1, 256, 1), (1, 1, 128, 2), (1, 1, 64, 4), (1, 1, 32, 8), (1, 32, 8, 1)]
FRONTIER += [(stages, 1, 256 // stages // width, width) for stages in (2, 4, 8) for width in (1, 8)]
MANY, OCTET = {"batch_size": 256, "devices": 256}, {"batch_size": 8, "devices": 8}

ROWS = {
    "FP8 on an RTX 4090": row("gpt2-124m", "rtx4090", "bf16,fp8", batch_size=2),
    "GPT-3 345M with MS-AMP": row("gpt3-345m", "h100", "bf16,fp8,msamp-o2"),
    "GPT-2 of llm.c on a CPU": row("gpt2-124m", "cpu", "bf16", is_default=True, hours=48),
    "GPT-2 on two GPUs": row("gpt2-124m", "a100", "bf16", batch_size=2, devices=2, hours=24, layouts=TWO),
    "Llama-3 8B on Frontier": row("llama3-8b", "frontier", "bf16", tokens="1T", layouts=FRONTIER, **MANY),
    "T4, a model that needs the host": row("llama3-1b", "t4", "fp16", hours=100, sequence_length=2048),
    "RTX 4090, state on the host": row("gpt2-1558m", "rtx4090", "bf16,fp8", hours=100),
    "H100 x 8": row("llama3-8b", "h100", "fp8", tokens="15B", layouts=EIGHT, sequence_length=4096, **OCTET),
    "B200, without a price": row("llama3-8b", "b200", "mxfp8", money=5000, refused="money needs the price"),
    "MI300X x 8": row("llama3-70b", "mi300x", "bf16", tokens="1B", layouts=EIGHT, **OCTET),
    "CPU, too large": row("llama3-8b", "cpu", "bf16", refused="does not fit on 1 x CPU"),
    "CPU, less than a step": row("gpt2-124m", "cpu", "bf16", hours=0.0001, refused="raise the budget"),
}  # fmt: skip

# One on several layouts within a budget of hours, and a refusal.
KEPT = ("GPT-2 on two GPUs", "CPU, too large")


FORECASTER = cache(Forecaster)


def settings(one, dims, seed, is_gpu):
    """The words of each setting, or of a sample."""
    batch = one.given["batch_size"]
    sizes = [
        n for n in MICRO_BATCHES if batch % (n * dims.data) == 0 and batch >= n * dims.data * dims.pipeline
    ]
    found = list(product(sizes, RECOMPUTE, CHUNKED, OFFLOAD if is_gpu else OFFLOAD[:1]))
    most = min(max(4, MOST // len(one.layouts)), len(found))
    for micro, recompute, chunked, offload in random.Random(seed).sample(found, most):
        words = ["--training.micro_batch_size", str(micro), "--training.recompute", recompute]
        words += ["--training.chunked_loss", chunked]
        yield words + (["--recipe.offload", offload] if offload else [])


def seconds_of_a_step(config, dims, machine, counts):
    """Infinite where the step does not fit. A setting has the same work on each layout, counted once."""
    with imagine(machine.facts):
        step = estimate_step(config, dims)
    host = sum(step.memory.host.values()) if machine.device == "CPU" else 0
    if step.memory.peak + host > machine.memory:
        return math.inf
    key = f"{config.recipe} {config.training}"
    time = estimate(config, dims, machine, step, counts.get(key))
    counts[key] = time.count
    return time.seconds_expected


def scores(one, machine, title):
    """(its gap is not known, hours per token of bf16's loss) of each setting that fits within the budget."""
    kept, batch, limit = published(one.model), one.given["batch_size"], one.given.get("hours", math.inf)
    length = one.given.get("sequence_length") or (kept.sequence_length if kept else 256)
    tokens = tokens_of(one.given["tokens"]) if "tokens" in one.given else None
    if tokens is None and limit == math.inf:
        tokens = kept.tokens
    size, counts = count_block_weights(model_config(name=one.model)), {}
    line = ["train", "--model", one.model, "--device", "cpu", "--data.sequence_length", str(length)]
    line += ["--training.batch_size", str(batch)]
    for name, layout in product(one.recipes, one.layouts):
        dims = ParallelDims(**dict(zip(("pipeline", "replicate", "shard", "tensor"), layout, strict=True)))
        for words in settings(one, dims, f"{title} {name} {layout}", machine.facts.is_gpu):
            config = make_config(config_values(read_line([*line, "--recipe", name, *words])))
            seconds = seconds_of_a_step(config, dims, machine, counts)
            steps = math.ceil(tokens / length / batch) if tokens else limit * 3600 // seconds
            if seconds == math.inf or steps < 1 or steps * seconds / 3600 > limit:
                continue
            forecast = FORECASTER().forecast(recipe(name), size, steps * length * batch, name)
            extra = forecast.extra_tokens_percent
            cost = 1 + (0.0 if extra is None else extra.mean) / 100
            yield forecast.gap_percent is None, seconds / 3600 / length / batch * cost


@pytest.mark.tier("nightly", keep=KEPT)
@pytest.mark.parametrize("title", ROWS)
def test_no_setting_is_better_than_the_advice(title, capsys):
    one = ROWS[title]
    given = one.given if one.is_default else {**one.given, "recipes": one.recipes}
    found = ng.advise(one.model, one.cluster, **given)
    if "price" not in (found.refused or ""):
        best = min(scores(one, load_cluster(one.cluster), title), default=None)
        assert (best is None) == (found.refused is not None), found.refused
    if one.refused:
        assert one.refused in found.refused
        return
    first = found.answers[0]
    own = first.forecast.gap_percent is None, first.score * 24
    assert own <= (best[0], best[1] * 1.0001), f"{first.line} takes {own}, and another {best}"

    assert main([*shlex.split(first.plan_line)[1:], "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["memory"]["fits"]
    assert plan.get("expect", plan["run"])["days"] == pytest.approx(first.days, rel=1e-6)
    assert plan["memory"]["peak"] / 2**30 <= first.memory_gib * 1.000001

    for answer in found.answers:
        words = shlex.split(answer.line)
        line = words[words.index("--") + 1 :] if "launch" in words else words[words.index("train") :]
        config = make_config(config_values(read_line(line)))
        assert config.recipe.name == answer.recipe
        assert lay_out(config, one.given.get("devices", 1)).parallel_dims.text == answer.layout
        assert answer.hours <= one.given.get("hours", math.inf)
        assert answer.tokens >= tokens_of(one.given.get("tokens", "1"))
