"""A branch has the digits of a run of its length from scratch, or another recipe; or it is refused."""

import pytest
import torch

from narrowgauge.quantization import master_or_weight
from narrowgauge.system.errors import UserError
from narrowgauge.trainer.checkpoint import newest_valid
from narrowgauge.trainer.cli.main import main
from narrowgauge.trainer.runs import branch_run, run
from narrowgauge.trainer.runs.run_directory import RunDirectory
from narrowgauge.trainer.runs.use.branch import with_recipe
from narrowgauge.trainer.runs.use.export import export_run, import_model
from narrowgauge.trainer.training import make_config
from narrowgauge.trainer.training.step.trainer import Trainer
from support.fault_table import case

LONG = {
    "training.steps": 12,
    "checkpoint.every": 4,
    "checkpoint.keep": 3,
    "schedule.kind": "wsd",
    "schedule.warmup_steps": 2,
    "schedule.decay_fraction": 0.5,
    "schedule.final_lr_fraction": 0.0,
}
SHORT = LONG | {"training.steps": 8}
SIZES = {"model.dim": 128, "model.ffn_dim": 256}
WIDE = SIZES | {"training.steps": 4, "checkpoint.every": 4}


@pytest.mark.tier("nightly", keep=("msamp-o2",))
@pytest.mark.tier("thorough")
@pytest.mark.parametrize("recipe", ["bf16", "msamp-o2", "fp8-delayed", "nvfp4"])
def test_a_branch_is_the_shorter_run_bit_for_bit(trained, tiny, look, tmp_path, recipe):
    wide = SIZES | {"recipe.name": recipe}
    whole, trunk, out = trained(SHORT | wide), trained(LONG | wide), tmp_path / "branch"
    branch_run(trunk, 4, make_config(tiny(SHORT | wide)), out)
    run(tiny(SHORT | wide), out)
    assert look(out).trajectory == look(whole).trajectory
    assert [event["step"] for event in look(out).events("branch")] == [4]


@pytest.mark.tier("thorough")
def test_the_command_makes_a_branch_once_and_refuses_what_cannot_be(trained, tiny, look, tmp_path, capsys):
    trunk, out = trained(LONG), tmp_path / "out"
    for step, changes, words in (
        (6, SHORT, r"no whole checkpoint of step 6 \(kept: 4, 8, 12\)"),
        (8, SHORT, "no step left"),
        (4, SHORT | {"model.dim": 64}, "is of another model; a branch has the model"),
    ):
        with pytest.raises(UserError, match=words):
            branch_run(trunk, step, make_config(tiny(changes)), out)
    assert not out.exists()
    fp16 = tiny(LONG | {"recipe.name": "fp16", "training.steps": 14})  # its loss scale begins anew
    assert branch_run(trunk, None, make_config(fp16), tmp_path / "fp16") == 12
    for _ in range(2):
        assert main(["train", "--branch", f"{trunk}@4", "--steps", "8", "--out", str(out)]) == 0
    assert len(look(out).steps) == 8
    assert len(look(out).events("branch")) == 1
    assert main(["train", "--branch", f"{trunk}@last", "--out", str(tmp_path / "none")]) == 2
    assert "write RUN or RUN@STEP" in capsys.readouterr().err


def convert(before, recipe, after, steps=5):
    """Branch off the newest checkpoint of a run, under another recipe; returns its step."""
    config = with_recipe(RunDirectory(before).config(own_recipe=True), recipe)
    config = config.model_copy(update={"training": config.training.model_copy(update={"steps": steps})})
    return branch_run(before, None, config, after)


def session_of(path):
    trainer = Trainer.begin(RunDirectory(path).config(own_recipe=True), torch.device("cpu"))
    trainer.restore(newest_valid(RunDirectory(path).checkpoints, None)[0])
    return trainer


LATER = 'm = "e4m3"\nv = "e4m3"\n[[rule]]\nfrom_step = 3\nm = "fp32"\nv = "fp32"\n'


@pytest.mark.tier("thorough")  # a whole run
@pytest.mark.parametrize(
    ("first", "second", "rtol"),
    [
        ("bf16", "msamp-o1", 2.0**-10),
        ("msamp-o3", "bf16", 0),
        ("msamp-o2", "msamp-o2", 0),
        ("coat", "bf16-sr", 2.0**-8),
        ("bf16", LATER, 0),  # a rule has changed its state by then
    ],
)
def test_under_another_recipe_the_numbers_stay(trained, tmp_path, first, second, rtol):
    before, after = trained(WIDE | {"recipe.name": first}), tmp_path / "after"
    if second == LATER:
        (tmp_path / "later.toml").write_text(LATER)
        second = str(tmp_path / "later.toml")
    assert convert(before, second, after) == 4
    a, b = session_of(before), session_of(after)
    for (name, p), q in zip(a.model.named_parameters(), b.model.parameters(), strict=True):
        torch.testing.assert_close(master_or_weight(q), master_or_weight(p), rtol=rtol, atol=0, msg=name)
        assert b.optimizer.state[q]["step"] == 4
        is_kept = first == second or "later" in second
        for place, moment in b.optimizer.moments(q).items() if is_kept else ():
            # codes may differ: an amax that was rounded down to a power of two has a smaller scale
            assert torch.equal(moment.read(), a.optimizer.moments(p)[place].read()), (name, place)


@pytest.mark.tier("thorough")
def test_an_imported_model_has_no_branch(trained, tmp_path):
    export_run(trained(WIDE), "hf", tmp_path / "hf")
    imported = import_model(tmp_path / "hf", tmp_path / "imported")
    with pytest.raises(UserError, match="an imported model, with weights and no optimizer; start"):
        convert(imported, "bf16", tmp_path / "new")


@pytest.mark.tier("thorough")  # a whole run
@case("C8", tier="quick")
def test_a_checkpoint_of_other_formats_is_refused_with_both_named(trained, tiny):
    path = trained(WIDE | {"recipe.name": "msamp-o1"})
    trainer = Trainer.begin(make_config(tiny(WIDE | {"recipe.name": "msamp-o3"})), torch.device("cpu"))
    there = newest_valid(RunDirectory(path).checkpoints, None)[0]
    with pytest.raises(UserError, match=r"keeps .blocks.* as torch.float16, .* as torch.float8_e4m3fn"):
        trainer.restore(there)


@pytest.mark.tier("thorough")
def test_where_state_lies_is_kept_and_what_is_left_out_is_said(trained, look, tmp_path, capsys):
    places = {"offload": "m,v", "gather": "fp32", "wgrad.x": "e4m3"}
    places = {"recipe.name": "bf16", **{f"recipe.{key}": value for key, value in places.items()}}
    words = ["--recipe", "mxfp8", "--recipe.dgrad.w", "bf16", "--steps", "5", "--out"]
    assert main(["train", "--branch", str(trained(WIDE | places)), *words, str(tmp_path / "after")]) == 0
    assert "left out: recipe.gather, recipe.wgrad.x, set over the trunk's recipe" in capsys.readouterr().out
    assert [event["step"] for event in look(tmp_path / "after").events("convert")] == [4]
    config = RunDirectory(tmp_path / "after").config()
    assert config.spec.recipe.offload == ("m", "v")
    assert dict(config.recipe.places) == {"offload": "m,v", "dgrad.w": "bf16"}
