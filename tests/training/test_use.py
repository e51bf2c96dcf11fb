"""A run put to use, whatever became of the files it was made from."""

import pytest
import torch

from narrowgauge.data import prepare
from narrowgauge.errors import UserError
from narrowgauge.training import open_run, validation_loss


def test_the_newest_model_gives_the_recorded_loss(train, look, text):
    trained = open_run(train(), "cpu")
    assert trained.step == 6
    assert not trained.model.training
    loss = validation_loss(trained.model, prepare(text, "bytes").val, 1, 32, 2)
    assert loss == look(train()).steps[-1]["val_loss"]


def test_the_loss_is_the_mean_over_tokens(train, text):
    # In fp8 a batch shares its scales, so that its sequences are not computed as they are alone.
    model = open_run(train(changes={"recipe.name": "fp32"}), "cpu").model
    val = prepare(text, "bytes").val
    singly = validation_loss(model, val, 1, 32, None)
    assert validation_loss(model, val, 2, 32, None) == pytest.approx(singly, rel=1e-5)
    assert all(p.grad is None for p in model.parameters())


def test_a_recipe_file_may_be_gone(train, tmp_path):
    mine = tmp_path / "mine.toml"
    mine.write_text('name = "mine"\n[fprop]\nx = "mxfp4"\n')
    path = train(changes={"recipe.name": str(mine)})
    mine.unlink()
    assert open_run(path, "cpu").model.blocks[0].down.recipe.casts["fprop.x"].name == "mxfp4"


def test_a_run_without_a_checkpoint_is_refused(train, tmp_path):
    path = train()
    (path / "checkpoints").rename(tmp_path / "elsewhere")
    with pytest.raises(UserError, match=r"no checkpoint yet.* checkpoint\.every = 2"):
        open_run(path)


def test_what_is_no_run_is_refused(tmp_path):
    with pytest.raises(UserError, match="no run directory"):
        open_run(tmp_path)


def test_the_weights_are_those_of_the_checkpoint(train):
    path = train(changes={"recipe.name": "fp32"})
    one, two = open_run(path, "cpu").model, open_run(path, "cpu").model
    x = torch.arange(20).view(1, 20)
    assert torch.equal(one(x), two(x))
