"""Advice: the printed line plans, nothing in its space is better, and what is missing is refused."""

import json
import re
import shlex
from pathlib import Path

import pytest

import narrowgauge as ng
from narrowgauge.distributed import ParallelDims
from narrowgauge.system.errors import UserError
from narrowgauge.trainer.cli.line import config_values, read_line
from narrowgauge.trainer.cli.main import main
from narrowgauge.trainer.cluster.plan.cluster_spec import load_cluster
from narrowgauge.trainer.laboratory.advise.advise import Advice
from narrowgauge.trainer.laboratory.advise.search import RECIPES, fastest, unfit
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
