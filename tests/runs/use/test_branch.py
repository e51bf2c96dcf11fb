"""A branch has the digits of a run of its length from scratch, and is refused where it could not have."""

import pytest

from narrowgauge.cli.main import main
from narrowgauge.errors import UserError
from narrowgauge.runs import branch_run, run
from narrowgauge.training import make_config

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


@pytest.mark.tier("thorough")
@pytest.mark.parametrize("recipe", ["bf16", "msamp-o2", "fp8-delayed", "nvfp4"])
def test_a_branch_is_the_shorter_run_bit_for_bit(train, tiny, look, tmp_path, recipe):
    wide = {"model.dim": 128, "model.ffn_dim": 256, "recipe.name": recipe}
    whole = train("whole", SHORT | wide)
    trunk, out = train("trunk", LONG | wide), tmp_path / "branch"
    branch_run(trunk, 4, make_config(tiny(SHORT | wide)), out)
    run(tiny(SHORT | wide), out)
    assert look(out).trajectory == look(whole).trajectory
    assert [event["step"] for event in look(out).events("branch")] == [4]


@pytest.mark.tier("thorough")
def test_a_branch_that_cannot_be_is_refused(train, tiny, tmp_path):
    trunk = train("trunk", LONG)
    with pytest.raises(UserError, match=r"no whole checkpoint of step 6 \(kept: 4, 8, 12\)"):
        branch_run(trunk, 6, make_config(tiny(SHORT)), tmp_path / "a")
    with pytest.raises(UserError, match="no step left"):
        branch_run(trunk, 8, make_config(tiny(SHORT)), tmp_path / "b")
    with pytest.raises(UserError):
        branch_run(trunk, 4, make_config(tiny(SHORT | {"model.dim": 64})), tmp_path / "c")
    assert not any((tmp_path / name).exists() for name in "abc")
    fp16 = tiny(LONG | {"recipe.name": "fp16", "training.steps": 14})  # its loss scale begins anew
    assert branch_run(trunk, None, make_config(fp16), tmp_path / "d") == 12


@pytest.mark.tier("thorough")
def test_the_command_makes_it_once_and_goes_on(train, look, tmp_path, capsys):
    trunk, out = train("trunk", LONG), tmp_path / "out"
    line = ["train", "--branch", f"{trunk}@4", "--steps", "8", "--out", str(out)]
    assert main(line) == 0
    assert main(line) == 0
    assert len(look(out).steps) == 8
    assert len(look(out).events("branch")) == 1
    assert main(["train", "--branch", f"{trunk}@last", "--out", str(tmp_path / "none")]) == 2
    assert "write RUN or RUN@STEP" in capsys.readouterr().err
