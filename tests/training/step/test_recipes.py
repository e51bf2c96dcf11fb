"""Every recipe that ships trains, repeats itself, and continues after a stop to the same digits."""

import json

import pytest
import torch

from narrowgauge.recipes import recipe_names
from narrowgauge.runs import open_run
from narrowgauge.training.config.config import make_config
from narrowgauge.training.step.trainer import Trainer


# That each recipe repeats to its digits, and continues to them, is shown in tests/golden: here by runs, under
# the recipes with most state.
@pytest.mark.tier("thorough")  # a whole run; a test of the step shows its parts
@pytest.mark.parametrize("name", recipe_names())
def test_a_run_repeats_and_goes_on_to_the_same_digits(train, look, name):
    changes = {"recipe.name": name, "validation.every": 3}
    first, again = train("first", changes), train("again", changes)
    expected = look(first).trajectory
    assert look(again).trajectory == expected
    assert all(line["loss"] < 6 for line in look(first).steps)
    for file in (again / "checkpoints" / "step-6").iterdir():
        file.unlink()
    (again / "checkpoints" / "step-6").rmdir()
    (again / "status.json").unlink()
    train("again", changes)
    assert [event["step"] for event in look(again).events("resume")] == [4]
    assert look(again).trajectory == expected


@pytest.mark.tier("thorough")
def test_delayed_scales_are_in_the_checkpoint_and_used_by_who_opens_the_run(train):
    path = train(changes={"recipe.name": "fp8-delayed"})
    histories = [m for m in open_run(path, "cpu").model.modules() if type(m).__name__ == "AmaxHistory"]
    seen = [h for h in histories if h.scale != 1]
    assert len(seen) == len(histories) / 2, "the others are of places that see another place's numbers"


@pytest.mark.tier("thorough")  # a whole run; a test of the step shows its parts
def test_a_rule_holds_from_its_share_of_the_run_on(train, look, tmp_path):
    file = tmp_path / "late.toml"
    everywhere = 'fprop = "mxfp4"\ndgrad = "mxfp4"\nwgrad = "mxfp4"\n'
    file.write_text(everywhere + '[[rule]]\nfrom_share = 0.5\nfprop = "bf16"')
    mixed = look(train("mixed", {"recipe.name": str(file), "schedule.warmup_steps": 0}))
    narrow = tmp_path / "narrow.toml"
    narrow.write_text(everywhere)
    always = look(train("always", {"recipe.name": str(narrow), "schedule.warmup_steps": 0}))
    same = [a == b for a, b in zip(mixed.column("loss"), always.column("loss"), strict=True)]
    assert same == [True, True, True, False, False, False]


def test_fp16_scales_its_loss_and_lowers_the_scale_where_it_overflows(tiny):
    config = make_config(tiny({"recipe.name": "fp16"}))
    trainer = Trainer.begin(config.plan, torch.device("cpu"))
    assert trainer.scaler is not None
    scale = trainer.scaler.get_scale()
    from narrowgauge.data import prepare

    corpus = prepare(config.data.source, config.data.tokenizer, progress=lambda *_: None)
    before = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
    hook = trainer.model.head.weight.register_hook(lambda g: g * float("inf"))
    trainer.train_step(trainer.batches(corpus.train))
    hook.remove()
    assert trainer.guard.skips_in_a_row == 1
    assert trainer.scaler.get_scale() == scale / 2
    assert all(torch.equal(before[n], p) for n, p in trainer.model.named_parameters())
    trainer.train_step(trainer.batches(corpus.train))
    assert trainer.guard.skips_in_a_row == 0
    assert not torch.equal(before["head.weight"], trainer.model.head.weight)


def test_the_scale_of_the_loss_is_in_the_checkpoint(train):
    path = train(changes={"recipe.name": "fp16"})
    state = json.loads((path / "checkpoints" / "step-6" / "state.json").read_text())
    assert state["loss_scaling"]["scale"] >= 1
