"""Advice: the printed line plans, nothing in its space is better, and what is missing is refused.

A dozen combinations of model, machine and budget are compared with brute force over their settings. This
oracle shares nothing with the search: it writes each setting as the words of a command line, and asks for the
memory and time of `plan` and the gap of `predict`. On one layout it tries up to `MOST` settings of a recipe,
which are all of a batch of one; on each of several layouts at least four. Of more settings it tries a sample
that depends on the title of the row alone.
"""

import json
import math
import random
import re
import shlex
from functools import cache
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest

import narrowgauge as ng
from narrowgauge.distributed import ParallelDims
from narrowgauge.forecast import Forecaster
from narrowgauge.recipes import recipe
from narrowgauge.system.devices import imagine
from narrowgauge.system.errors import UserError
from narrowgauge.system.units import parse_bytes
from narrowgauge.trainer.cli.line import config_values, read_line
from narrowgauge.trainer.cli.main import main
from narrowgauge.trainer.cluster.plan.budget import tokens_of
from narrowgauge.trainer.cluster.plan.cluster_spec import load_cluster
from narrowgauge.trainer.cluster.plan.estimate import estimate
from narrowgauge.trainer.laboratory.advise.advise import Advice
from narrowgauge.trainer.laboratory.advise.search import RECIPES, fastest, unfit
from narrowgauge.trainer.models import count_block_weights, model_config
from narrowgauge.trainer.models.published import published
from narrowgauge.trainer.runs import lay_out
from narrowgauge.trainer.simulate import estimate_step
from narrowgauge.trainer.training import make_config

CARD = """
title = "a small card"
gpu = "sm_89"
devices_per_node = 2
memory = "{memory}"
memory_bandwidth = 1e12
inside = 20e9
between = 1e9
host = 26e9
price = "1 EUR"
[peak]
bf16 = 165e12
fp8 = 330e12
fp32 = 82e12
"""


def card(folder, memory="24GB"):
    path = folder / "card.toml"
    path.write_text(CARD.format(memory=memory), encoding="utf-8")
    return str(path)


def fastest_on(cluster, name="bf16", dims=None, batch=2, model="debug"):
    values = {
        "model": {"name": model},
        "data": {"sequence_length": 256},
        "training": {"batch_size": batch, "device": "cpu"},
        "recipe": {"name": name},
    }
    return fastest(values, dims or ParallelDims(), load_cluster(cluster), {})


def test_a_layout_that_train_would_refuse_is_no_answer(tmp_path):
    with pytest.raises(UserError, match=r"model.kv_heads = 2 cannot be divided by .* = 4"):
        fastest_on(card(tmp_path), dims=ParallelDims(tensor=4))
    with pytest.raises(UserError, match="the tokens of an expert come from full sequences on one process"):
        fastest_on(card(tmp_path), dims=ParallelDims(tensor=2), model="moe-debug")


@pytest.mark.tier("thorough")
def test_a_pipeline_takes_the_micro_batches_that_wait_least(tmp_path):
    """Smaller micro-batches are more of them, so a pipeline may be faster with less memory."""
    best = fastest_on(card(tmp_path), dims=ParallelDims(pipeline=2, shard=2), batch=64)
    assert best.fits
    assert best.setting.micro_batch_size < 16, "two micro-batches wait for a third of the time"


@pytest.mark.tier("nightly")
def test_a_no_follows_from_all_recipes_of_narrower_state_and_names_what_fits(tmp_path):
    """msamp-o3 takes the least of all that ship; it is not among those that are compared where all fit."""
    need = fastest_on(card(tmp_path, "1MB"), "msamp-o3").needed
    given = {"model": "debug", "tokens": 10**6, "batch_size": 2, "sequence_length": 256}
    found = advised(cluster=card(tmp_path, f"{need}B"), **given)
    assert [answer.recipe for answer in found.answers] == ["msamp-o3"]
    tight = ng.advise(cluster=card(tmp_path, f"{need - 10**5}B"), recipes=["bf16"], **given).refused
    assert re.search(r"the least is .*, bf16 with .*; it fits with .*--data.sequence_length 128", tight)


def advised(**arguments):
    found = ng.advise(**arguments)
    assert found.refused is None, found.refused
    return found


@pytest.mark.tier("thorough")
def test_the_first_answer_has_every_part_and_its_line_plans(capsys, tmp_path):
    found = advised(model="debug", cluster=card(tmp_path), tokens=10**7, recipes=["bf16"], batch_size=2)
    (first,) = found.answers
    assert first.cost == pytest.approx(first.days * 24)
    row = json.loads(json.dumps(found.as_json()))["answers"][0]
    assert {"line", "recipe", "memory_gib", "days", "cost", "gap_percent", "why"} <= row.keys()
    assert "no training of debug is published" in found.notes[0]
    assert first.line in str(found)
    assert main(shlex.split(first.plan_line)[1:]) == 0
    assert any(text.startswith("fits: ") for text in capsys.readouterr().out.splitlines())
    words = shlex.split(first.line)
    training = make_config(config_values(read_line(words[words.index("train") :]))).training
    assert training.steps * training.batch_size * 256 == first.tokens >= 10**7
    hours = {"model": "debug", "cluster": card(tmp_path), "recipes": ["bf16"], "batch_size": 2, "hours": 2}
    found = advised(**hours)
    assert found.answers[0].days * 24 == pytest.approx(2, rel=0.01), "hours give tokens"
    late = ng.advise(tokens=10 * found.answers[0].tokens, **hours)
    assert "and the budget is 2 hours; leave out tokens to train on the" in late.refused


def test_a_reason_that_holds_for_many_is_printed_once():
    lost = {"fp16": "slow", "o2 shard 64": "unknown", "o2 shard 8 x tensor 8": "unknown", "fp8": "slow"}
    text = Advice([], "none", lost=lost).table()
    assert text.splitlines()[2:] == ["  fp16; fp8: slow", "  o2 shard 64, shard 8 x tensor 8: unknown"]


@pytest.mark.tier("thorough")
def test_each_recipe_has_one_way_to_win_and_the_reference_none(tmp_path):
    given = {"model": "debug", "tokens": "10M", "cluster": card(tmp_path)}
    found = advised(recipes=["bf16", "fp8"], batch_size=8, devices=2, **given)
    assert len({answer.layout for answer in found.answers}) > 1
    assert len([text for text in found.changes if "wins" in text]) <= 1
    found = advised(recipes=["bf16", "nvfp4"], batch_size=2, **given)
    assert found.answers[0].is_reference
    assert not any("bf16 needs" in text for text in found.changes)


def test_what_is_missing_is_refused(tmp_path):
    cluster = card(tmp_path)
    assert "a budget is missing" in ng.advise("debug", cluster).refused
    with pytest.raises(UserError, match="unknown model"):
        ng.advise("gpt5", cluster, 1e9)
    with pytest.raises(UserError, match="hours = 0: it must be above 0"):
        ng.advise("debug", cluster, hours=0)
    with pytest.raises(UserError, match="it must be a number such as"):
        ng.advise("debug", cluster, "many")
    with pytest.raises(UserError, match="devices = 3: a node of this cluster has 2, and a run takes whole"):
        ng.advise("debug", cluster, 1e6, devices=3)
    (tmp_path / "card.toml").write_text(CARD.format(memory="24GB").replace('price = "1 EUR"\n', ""))
    assert "money needs the price" in ng.advise("debug", cluster, money=5).refused


@pytest.mark.tier("nightly")
def test_a_budget_that_rules_the_best_out_leaves_the_next():
    given = {"model": "llama3-8b", "cluster": "b200", "tokens": "200B", "batch_size": 1}
    first, second = advised(recipes=["bf16", "nvfp4"], **given).answers
    assert (first.recipe, second.recipe) == ("bf16", "nvfp4")
    assert second.hours < first.hours
    found = advised(recipes=["bf16", "nvfp4"], hours=(first.hours + second.hours) / 2, **given)
    assert [answer.recipe for answer in found.answers] == ["nvfp4"]
    assert "hours with bf16, and the budget is" in found.lost["bf16"]


@pytest.mark.tier("nightly")
def test_more_memory_helps_only_where_the_batch_has_more_and_without_a_price_hours_are_told(tmp_path):
    given = {"model": "debug", "tokens": "10M", "recipes": ["bf16"], "devices": 2}
    found = advised(cluster=card(tmp_path, "720MB"), batch_size=8, **given)
    assert any("a device with more than 720MB allows faster settings" in text for text in found.changes)
    file = Path(card(tmp_path))
    file.write_text(file.read_text().replace('price = "1 EUR"\n', ""))
    found = advised(cluster=str(file), batch_size=2, **given)
    assert not any("faster settings" in text for text in found.changes)
    first = found.answers[0]
    assert first.device_hours == pytest.approx(first.days * 48)
    assert f"{first.device_hours:,.0f} device-hours" in str(found)


def test_the_candidates_are_native_with_one_wide_recipe():
    fits = {"t4": "fp16", "a100": "bf16", "cpu": "bf16", "mi355x": "bf16 fp8 msamp-o2"}
    for cluster, recipes in fits.items():
        machine = load_cluster(cluster)
        assert [name for name in RECIPES if not unfit(name, machine)] == recipes.split()


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
    "CPU, too large": row("llama3-8b", "cpu", "bf16", refused="does not fit on 1 x CPU (64GB)"),
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
    if step.memory.peak + host > parse_bytes(machine.memory):
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
@pytest.mark.tier("thorough")
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
