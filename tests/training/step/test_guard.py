"""A non-finite gradient: the step is skipped, reported, and too many in a row end the run."""

import math

import pytest

from narrowgauge.trainer.checkpoint import is_finite, load, steps
from narrowgauge.trainer.training import Diverged
from support.fault_table import case
from support.in_process import bits


def spoil(trainer, at_steps, value=math.nan):
    """From now on one element of one gradient is `value` in these steps."""

    def hook(gradient):
        if trainer.step + 1 in at_steps:
            gradient = gradient.clone()
            gradient.view(-1)[5] = value
        return gradient

    trainer.model.blocks[1].down.weight.register_hook(hook)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_bad_gradient_leaves_every_bit(begin, value):
    trainer, batches = begin({"recipe.name": "fp32"})
    spoil(trainer, {3}, value)
    for _ in range(2):
        trainer.train_step(batches)
    before = bits(trainer)
    assert any(name.endswith(".m.values") for name in before)
    loss, norm, _ = trainer.train_step(batches)
    assert math.isfinite(loss)
    assert not math.isfinite(norm)
    assert bits(trainer) == before
    assert (trainer.step, trainer.guard.skips_in_a_row) == (3, 1)
    trainer.train_step(batches)
    assert trainer.guard.skips_in_a_row == 0
    assert bits(trainer)["model head.weight"] != before["model head.weight"]


@case("E3", tier="thorough")
def test_bad_steps_are_told_and_too_many_in_a_row_end_the_run_also_across_a_stop(
    with_trainer, train, look, tmp_path
):
    with_trainer(lambda trainer: spoil(trainer, {3, 5, 6, *range(9, 100)}))
    bad = [3, 5, 6, 9, 10, 11]
    changes, run = {"training.steps": 50, "guard.max_skips": 2}, look(tmp_path / "run")
    words = r"3 steps in a row .* the last is 11 \(.*blocks\.1\.down\.weight grad.*\); lower optimizer\.lr"
    for _ in range(2):  # the second time from the checkpoint of step 10, which has seen two bad steps
        with pytest.raises(Diverged, match=words):
            train(changes=changes)
        assert run.column("step") == list(range(1, 12))
        assert [event["step"] for event in run.events("skip")] == bad
    assert [event["step"] for event in run.events("resume")] == [10]
    first = run.events("skip")[0]["first_bad"]
    assert {"layer": "blocks.1.down.weight", "place": "grad", "rank": 0}.items() <= first.items()
    assert [math.isnan(norm) for norm in run.column("grad_norm")] == [s in bad for s in range(1, 12)]
    assert all(map(math.isfinite, run.column("loss")))
    assert run.status["status"] == "failed"
    assert "in a row" in run.status["reason"]
    for step in steps(run.path / "checkpoints"):
        for group in load(run.path / "checkpoints" / f"step-{step}").tensors.values():
            assert all(map(is_finite, group.values()))


def test_fp16_scales_its_loss_and_lowers_the_scale_where_it_overflows(begin, tmp_path):
    trainer, batches = begin({"recipe.name": "fp16"})
    scale, before = trainer.scaler.get_scale(), bits(trainer)
    hook = trainer.model.head.weight.register_hook(lambda g: g * math.inf)
    trainer.train_step(batches)
    hook.remove()
    assert trainer.guard.skips_in_a_row == 1
    assert trainer.scaler.get_scale() == scale / 2
    assert load(trainer.plan_save(tmp_path, "me").write()).state["loss_scaling"]["scale"] == scale / 2
    assert bits(trainer) == before
    trainer.train_step(batches)
    assert trainer.guard.skips_in_a_row == 0
    assert bits(trainer)["model head.weight"] != before["model head.weight"]
