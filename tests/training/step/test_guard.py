"""A non-finite gradient: the step is skipped, reported, and too many in a row end the run."""

import math

import pytest
import torch

from narrowgauge.checkpoint import is_finite, load, steps
from narrowgauge.data import prepare
from narrowgauge.nn import recipe_tensors
from narrowgauge.training import Diverged, make_config
from narrowgauge.training.step.trainer import Trainer

CPU = torch.device("cpu")


def spoil(trainer, at_steps, value=math.nan):
    """From now on one element of one gradient is `value` in these steps."""

    def hook(gradient):
        if trainer.step + 1 in at_steps:
            gradient = gradient.clone()
            gradient.view(-1)[5] = value
        return gradient

    trainer.model.blocks[1].down.weight.register_hook(hook)


@pytest.fixture
def spoiled(monkeypatch):
    """Runs that begin from now on have a bad gradient in the given steps."""
    begin = Trainer.begin.__func__

    def do(*at_steps):
        def begin_and_spoil(cls, config, device, mesh=None):
            trainer = begin(cls, config, device, mesh)
            spoil(trainer, at_steps)
            return trainer

        monkeypatch.setattr(Trainer, "begin", classmethod(begin_and_spoil))

    return do


def state_of(trainer):
    tensors = dict(trainer.model.named_parameters()) | trainer.optimizer.tensors(trainer.names)
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_bad_gradient_leaves_every_bit(tiny, value):
    config = make_config(tiny({"recipe.name": "fp32"}))
    corpus = prepare(config.data.source, config.data.tokenizer)
    trainer = Trainer.begin(config.plan, CPU)
    spoil(trainer, {3}, value)
    trainer.train_step(trainer.batches(corpus.train))
    trainer.train_step(trainer.batches(corpus.train))
    before = state_of(trainer)
    assert any(name.endswith(".m.values") for name in before)
    loss, norm, _ = trainer.train_step(trainer.batches(corpus.train))
    assert math.isfinite(loss)
    assert not math.isfinite(norm)
    after = state_of(trainer)
    assert after.keys() == before.keys()
    for name, tensor in before.items():
        assert torch.equal(after[name], tensor), name
    assert (trainer.step, trainer.guard.skips_in_a_row) == (3, 1)
    trainer.train_step(trainer.batches(corpus.train))
    assert trainer.guard.skips_in_a_row == 0
    assert not torch.equal(state_of(trainer)["head.weight"], before["head.weight"])


def test_histories_forget_a_step_that_is_not_taken(tiny):
    config = make_config(tiny({"recipe.name": "fp8-delayed"}))
    trainer = Trainer.begin(config.plan, CPU)
    spoil(trainer, {2})
    batches = trainer.batches(prepare(config.data.source, config.data.tokenizer).train)
    trainer.train_step(batches)
    assert any(amaxes(trainer).values())
    trainer.train_step(batches)
    assert not any(amaxes(trainer).values())


def amaxes(trainer):
    """The largest magnitude that each history has seen in the last step."""
    return {n: t.item() for n, t in recipe_tensors(trainer.model).items() if n.endswith(".amax")}


@pytest.mark.tier("thorough")
def test_one_bad_step_is_skipped_once_and_told(spoiled, train, look):
    spoiled(3)
    path = train(changes={"training.steps": 8})
    (skip,) = look(path).events("skip")
    assert skip["step"] == 3
    assert "nan" in skip["reason"]
    first = skip["first_bad"]
    assert (first["layer"], first["place"], first["rank"]) == ("blocks.1.down.weight", "grad", 0)
    assert [math.isnan(norm) for norm in look(path).column("grad_norm")] == [s == 3 for s in range(1, 9)]
    assert all(map(math.isfinite, look(path).column("loss")))
    assert look(path).status["status"] == "done"


@pytest.mark.tier("thorough")
def test_bad_steps_that_are_not_in_a_row_do_not_stop_it(spoiled, train, look):
    spoiled(2, 3, 5, 6)
    path = train(changes={"training.steps": 8, "guard.max_skips": 2})
    assert [event["step"] for event in look(path).events("skip")] == [2, 3, 5, 6]
    assert look(path).status["status"] == "done"


@pytest.mark.tier("thorough")
def test_too_many_in_a_row_stop_it(spoiled, train, look, tmp_path):
    spoiled(*range(4, 100))
    with pytest.raises(
        Diverged,
        match=r"3 steps in a row .* the last is 6 \(.*blocks\.1\.down\.weight grad.*\); lower optimizer\.lr",
    ):
        train(changes={"training.steps": 50, "guard.max_skips": 2})
    run = look(tmp_path / "run")
    assert run.column("step") == [1, 2, 3, 4, 5, 6]
    assert run.status["status"] == "failed"
    assert "in a row" in run.status["reason"]
    for step in steps(run.path / "checkpoints"):
        for group in load(run.path / "checkpoints" / f"step-{step}").tensors.values():
            assert all(map(is_finite, group.values()))


@pytest.mark.tier("thorough")
def test_skips_in_a_row_are_counted_across_a_stop(spoiled, train, look, tmp_path):
    spoiled(*range(3, 100))
    changes = {"guard.max_skips": 3, "checkpoint.every": 4, "training.steps": 50}
    for _ in range(2):  # the second time from the checkpoint of step 4, which has seen two bad steps
        with pytest.raises(Diverged, match=r"4 steps in a row .* the last is 6"):
            train(changes=changes)
    assert [event["step"] for event in look(tmp_path / "run").events("skip")] == [3, 4, 5, 6]
    assert [event["step"] for event in look(tmp_path / "run").events("resume")] == [4]
