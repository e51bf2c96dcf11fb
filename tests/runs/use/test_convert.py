"""A run continues under another recipe: the same values in other formats, and only if asked to."""

import json
from pathlib import Path

import pytest
import torch

from narrowgauge.checkpoint import newest_valid
from narrowgauge.errors import UserError
from narrowgauge.quantization import master_or_weight
from narrowgauge.runs import branch_run, run
from narrowgauge.runs.run_directory import RunDirectory
from narrowgauge.runs.use.branch import with_recipe
from narrowgauge.runs.use.export import export_run, import_model
from narrowgauge.training import make_config
from narrowgauge.training.step.trainer import Trainer
from support.fault_table import case

WIDE = {"model.dim": 128, "model.ffn_dim": 256, "training.steps": 8, "checkpoint.every": 4}


def convert(before, recipe, after, steps=9):
    """Branch off the newest checkpoint of a run, under another recipe; returns its step."""
    config = with_recipe(RunDirectory(before).config(own_recipe=True), recipe)
    config = config.model_copy(update={"training": config.training.model_copy(update={"steps": steps})})
    return branch_run(before, None, config, after)


def session_of(path):
    trainer = Trainer.begin(RunDirectory(path).config(own_recipe=True).plan, torch.device("cpu"))
    trainer.restore(newest_valid(RunDirectory(path).checkpoints, None)[0])
    return trainer


@pytest.mark.tier("thorough")  # a whole run
@pytest.mark.parametrize(
    ("first", "second", "rtol"),
    [
        ("bf16", "msamp-o1", 2.0**-10),
        ("msamp-o3", "bf16", 0),
        ("msamp-o2", "msamp-o2", 0),
        ("coat", "bf16-sr", 2.0**-8),
    ],
)
def test_the_numbers_stay(train, tmp_path, first, second, rtol):
    before = train("before", WIDE | {"recipe.name": first})
    after = tmp_path / "after"
    assert convert(before, second, after) == 8
    a, b = session_of(before), session_of(after)
    for (name, p), q in zip(a.model.named_parameters(), b.model.parameters(), strict=True):
        torch.testing.assert_close(master_or_weight(q), master_or_weight(p), rtol=rtol, atol=0, msg=name)
        assert b.optimizer.state[q]["step"] == 8
        for place, moment in b.optimizer.moments(q).items() if first == second else ():
            # codes may differ: an amax that was rounded down to a power of two has a smaller scale
            assert torch.equal(moment.read(), a.optimizer.moments(p)[place].read()), (name, place)


def records(path: Path) -> dict[int, float]:
    """The loss of each step."""
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


@pytest.mark.tier("thorough")  # a whole run
def test_a_stopped_run_goes_on(train, look, tmp_path):
    before = train("before", WIDE | {"recipe.name": "bf16"})
    whole = records(before)
    for newer in (before / "checkpoints").glob("step-8"):
        for file in sorted(newer.rglob("*"), reverse=True):
            file.unlink()
        newer.rmdir()
    after = tmp_path / "after"
    assert convert(before, "msamp-o2", after, 8) == 4
    assert json.loads((after / "status.json").read_text())["status"] == "preempted"
    run(RunDirectory(after).config(), after)
    assert look(after).status["status"] == "done"
    assert [e["step"] for e in look(after).events("convert")] == [4]
    assert list(records(after)) == list(range(1, 9))
    assert records(after)[4] == whole[4]
    assert records(after)[8] == pytest.approx(whole[8], rel=0.01)


@pytest.mark.tier("thorough")
def test_only_an_empty_directory_is_filled(train, tmp_path):
    before = train("before", WIDE)
    with pytest.raises(
        UserError, match="is there already, and nothing is ever overwritten; name another with --out"
    ):
        convert(before, "bf16", before)
    with pytest.raises(UserError, match="is not a run directory"):
        convert(tmp_path / "nothing", "bf16", tmp_path / "new")
    with pytest.raises(UserError, match="unknown recipe 'bf17'"):
        convert(before, "bf17", tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.tier("thorough")
def test_an_imported_model_has_nothing_to_convert(train, tmp_path):
    export_run(train("run", WIDE), "hf", tmp_path / "hf")
    imported = import_model(tmp_path / "hf", tmp_path / "imported")
    with pytest.raises(UserError, match="is an imported model, with weights and no optimizer; start from it"):
        convert(imported, "msamp-o2", tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.tier("thorough")
def test_another_recipe_in_the_same_directory_is_refused_with_both_named(train):
    train("run", WIDE | {"recipe.name": "bf16"})
    with pytest.raises(UserError, match=r"recipe\.name = 'bf16', and now it is 'msamp-o2'"):
        train("run", WIDE | {"recipe.name": "msamp-o2"})


@pytest.mark.tier("thorough")  # a whole run
@case("C8", tier="quick")
def test_a_checkpoint_of_other_formats_is_refused_with_both_named(train, tiny):
    path = train("run", WIDE | {"recipe.name": "msamp-o1"})
    trainer = Trainer.begin(make_config(tiny(WIDE | {"recipe.name": "msamp-o3"})).plan, torch.device("cpu"))
    there = newest_valid(RunDirectory(path).checkpoints, None)[0]
    with pytest.raises(UserError, match=r"keeps .blocks.* as torch.float16, .* as torch.float8_e4m3fn"):
        trainer.restore(there)


@pytest.mark.tier("thorough")
def test_state_that_a_rule_has_changed_by_then_is_written_as_it_is_kept_then(train, look, tmp_path):
    before = train("before", WIDE | {"recipe.name": "bf16", "training.steps": 4})
    recipe = tmp_path / "later.toml"
    recipe.write_text('m = "e4m3"\nv = "e4m3"\n[[rule]]\nfrom_step = 3\nm = "fp32"\nv = "fp32"\n')
    after = tmp_path / "after"
    convert(before, str(recipe), after)
    a, b = session_of(before), session_of(after)
    for p, q in zip(a.model.parameters(), b.model.parameters(), strict=True):
        for place, moment in b.optimizer.moments(q).items():
            torch.testing.assert_close(moment.read(), a.optimizer.moments(p)[place].read(), rtol=0, atol=0)


@pytest.mark.tier("thorough")
def test_where_state_lies_is_kept_and_what_is_left_out_is_said(narrowgauge, train, tmp_path):
    places = {
        "recipe.name": "bf16",
        "recipe.offload": "m,v",
        "recipe.gather": "fp32",
        "recipe.wgrad.x": "e4m3",
    }
    before, after = train("before", WIDE | {"training.steps": 4} | places), tmp_path / "after"
    words = ("--recipe", "mxfp8", "--recipe.dgrad.w", "bf16", "--steps", "5")
    done = narrowgauge("train", "--branch", before, *words, "--out", after)
    assert done.code == 0, done.err
    assert "left out: recipe.gather, recipe.wgrad.x, set over the trunk's recipe" in done.out
    config = RunDirectory(after).config()
    assert config.spec.recipe.offload == ("m", "v")
    assert dict(config.recipe.places) == {"offload": "m,v", "dgrad.w": "bf16"}
