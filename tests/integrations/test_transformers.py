"""Hugging Face's Trainer under a recipe: the real package on the CPU, against loops without it."""

import importlib.util
import json
import math
import shutil

import pytest
import torch

import narrowgauge as ng
from narrowgauge.system.errors import UserError

pytestmark = pytest.mark.filterwarnings("ignore")  # of others' packages
SAVING = {"save_strategy": "steps", "save_steps": 3}


def needs(package):
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"{package} is not installed")


def trained(hf, path, recipe, seed=0, resume=None, arguments=None, **given):
    """A trainer after its steps, with the arguments of `trainer_kwargs` given."""
    trainer = hf.trainer_of(path, hf.kwargs(hf.model(seed), recipe, lr=hf.LR, **given), **(arguments or {}))
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def test_the_optimizers_arguments_are_those_given_and_else_the_trainers(hf, tmp_path):
    """The trainer writes its own weight decay into the groups that it makes: another was passed over."""
    arguments = {"learning_rate": 2e-5, "adam_beta2": 0.95, "adam_epsilon": 1e-6, "weight_decay": 0.1}

    def groups_of(**optimizer):
        trainer = hf.trainer_of(tmp_path, hf.kwargs(hf.model(), "mxfp8", **optimizer), **arguments)
        keys = ("lr", "betas", "eps", "weight_decay")
        return [tuple(group[key] for key in keys) for group in trainer.create_optimizer().param_groups]

    own = (2e-5, (0.9, 0.95), 1e-6)
    assert groups_of() == [(*own, 0.1), (*own, 0.0)]
    given = {"lr": hf.LR, "betas": (0.8, 0.9), "eps": 1e-5}
    expected = tuple(given.values())
    assert groups_of(**given, weight_decay=0.1) == [(*expected, 0.1), (*expected, 0.0)]
    with pytest.raises(UserError, match=r"weight_decay = 0.01 .* TrainingArguments, 0.1; give it there"):
        groups_of(weight_decay=0.01)


@pytest.mark.tier("thorough", nightly=("nvfp4",))
@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4", "msamp-o3"])
def test_as_in_a_loop_of_ones_own(hf, recipe, tmp_path):
    """Random bits, accumulation and clipping match a loop that sets its steps."""
    batches = hf.Batches()
    trainer = hf.trainer_of(tmp_path, hf.kwargs(hf.model(), recipe, lr=hf.LR, weight_decay=0.0), batches)
    trainer.train()
    assert list(hf.losses_of(trainer).values()) == pytest.approx(hf.own_loop(recipe, batches.all), rel=1e-4)


@pytest.mark.tier("thorough", nightly=("fp8-delayed-finished", "msamp-o3-made"))
@pytest.mark.parametrize("optimizer", ["made", "finished"])
@pytest.mark.parametrize("recipe", ["fp8-delayed", "nvfp4", "msamp-o3", "bf16-sr"])
def test_resumed_by_the_trainers_own_means_to_the_last_digit(hf, recipe, optimizer, tmp_path):
    """Narrow weights, masters, histories and random keys are in its checkpoint, or in the state dict
    of an optimizer that it is given finished."""

    def run(seed, resume=None):
        given = hf.kwargs(hf.model(seed), recipe, lr=hf.LR)
        if optimizer == "finished":
            del given["optimizer_cls_and_kwargs"]
            own = ng.AdamW(given["model"].parameters(), recipe, lr=hf.LR, weight_decay=0.0)
            given["optimizers"] = (own, None)
        trainer = hf.trainer_of(tmp_path, given, **SAVING)
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    whole, again = run(0), run(1, str(tmp_path / "checkpoint-3"))
    assert hf.losses_of(again) == hf.losses_of(whole)
    hf.assert_same_weights(whole.model, again.model)


@pytest.mark.tier("thorough")
def test_a_rule_that_waits_for_the_decay_is_told_its_step(hf, tmp_path):
    """`nvfp4-finish` computes the forward pass in bf16 from the decay on: the same digits until then."""
    a = hf.losses_of(trained(hf, tmp_path, "nvfp4"))
    b = hf.losses_of(trained(hf, tmp_path, "nvfp4-finish", decay_step=4))
    assert [step for step in a if a[step] != b[step]] == [4, 5, 6]
    with pytest.raises(UserError, match="waits for the decay"):
        trained(hf, tmp_path, "nvfp4-finish")


@pytest.mark.tier("thorough")
def test_trainer_refuses_to_resume_experts_that_it_does_not_read_back(hf, tmp_path):
    trainer = hf.trainer_of(tmp_path, hf.kwargs(hf.mixture(), "nvfp4", lr=hf.LR), **SAVING)
    trainer.train()
    shutil.rmtree(tmp_path / "checkpoint-6")
    again = hf.trainer_of(tmp_path, hf.kwargs(hf.mixture(), "nvfp4", lr=hf.LR))
    with pytest.raises(UserError, match="has not read them back; make the model with from_pretrained"):
        again.train(resume_from_checkpoint=True)
    again = hf.trainer_of(tmp_path, hf.kwargs(hf.read(tmp_path / "checkpoint-3"), "nvfp4", lr=hf.LR))
    again.train(resume_from_checkpoint=True)
    assert hf.losses_of(again) == hf.losses_of(trainer)


@pytest.mark.tier("thorough")
def test_a_step_without_numbers_is_skipped_and_logged(hf, tmp_path):
    given = hf.kwargs(hf.model(), "fp8-delayed", lr=hf.LR, gauges_every=3)
    trainer = hf.trainer_of(tmp_path, given, max_steps=3)
    norm, seen = given["model"].model.norm.weight, []

    def poison(gradient):
        seen.append(norm.detach().clone())
        return gradient * (math.nan if len(seen) == 3 else 1.0)  # the first micro-batch of the second step

    norm.register_hook(poison)
    trainer.train()
    first, second, third = (row for row in trainer.state.log_history if "loss" in row)
    assert first["narrowgauge/skips"] == 0
    assert second["narrowgauge/verdict"] == "skip"
    assert "narrowgauge/verdict" not in third
    assert third["narrowgauge/skips"] == 1
    assert torch.equal(seen[2], seen[4])  # the weights of the second and third step
    assert not torch.equal(seen[0], seen[2])
    assert 0 < third["narrowgauge/fprop.x/sqnr_db"] < 60
    json.dumps(trainer.state.log_history)


def test_what_cannot_work_is_refused(hf, tmp_path):
    arguments = hf.TrainingArguments(tmp_path, use_cpu=True, report_to=[])
    arguments.fsdp = "full_shard"
    given = hf.kwargs(hf.model(), "nvfp4", lr=hf.LR)
    (callback,) = given["callbacks"]
    with pytest.raises(UserError, match=r"DDP .* under any recipe, or .* narrowgauge\.fully_shard"):
        type(callback)().on_init_end(arguments, None, None, model=None)
    del given["optimizer_cls_and_kwargs"]
    with pytest.raises(UserError, match="optimizer_cls_and_kwargs"):
        hf.trainer_of(tmp_path, given, max_steps=1).train()


@needs("trl")
def test_trls_trainer_takes_the_same_arguments(hf, tmp_path):
    from trl import SFTConfig, SFTTrainer

    rows = [{"input_ids": e["input_ids"].tolist()} for e in hf.examples(8)]
    config = SFTConfig(tmp_path, max_steps=2, report_to=[], use_cpu=True, bf16=False, logging_steps=1)
    trainer = hf.trl_trainer(SFTTrainer, config, rows, hf.kwargs(hf.model(), "nvfp4", lr=hf.LR))
    trainer.train()
    assert [row["narrowgauge/skips"] for row in trainer.state.log_history if "loss" in row] == [0, 0]
