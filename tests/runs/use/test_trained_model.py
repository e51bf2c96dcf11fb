"""A run put to use, whatever became of the files it was made from."""

import numpy as np
import pytest
import torch

from narrowgauge.nn import convert
from narrowgauge.recipes import recipe_names
from narrowgauge.system.errors import UserError
from narrowgauge.trainer.cli.main import main
from narrowgauge.trainer.data import prepare, validation_batches
from narrowgauge.trainer.distributed import Engine
from narrowgauge.trainer.models import Transformer, initialize, model_config
from narrowgauge.trainer.runs import TrainedRun, bits_per_byte, open_run, validation_loss
from support.runs import write_text

DELAYED = {"recipe.name": "fp8-delayed"}
STOCHASTIC = {"recipe.name": "mxfp4", "recipe.fprop": {"x": {"cast": "mxfp4", "rounding": "stochastic"}}}


@pytest.mark.tier("thorough")
@pytest.mark.parametrize("changes", [DELAYED, STOCHASTIC], ids=["delayed scales", "stochastic forward"])
def test_the_newest_model_gives_the_recorded_loss(trained, look, text, changes):
    path = trained(changes | {"training.batch_size": 4, "training.micro_batch_size": 2})
    there = open_run(path, "cpu")
    assert there.step == 6
    assert not there.model.training
    val = prepare(text, "bytes").val
    batches = validation_batches(val, 2, 32, 4)
    loss = validation_loss(Engine.of_one_process(there.model), there.go_to_sample, batches).mean
    assert loss == look(path).steps[-1]["val_loss"]


@pytest.mark.tier("thorough")
def test_eval_takes_the_text_of_the_runs_validation(train, look, tmp_path, capsys):
    """A run on several processes may have smaller micro-batches, and its validation as many sequences."""
    changes = {"data.source": write_text(tmp_path / "more", 120), "recipe.name": "fp32"}
    changes |= {"training.batch_size": 8, "training.micro_batch_size": 2, "training.fit_micro_batch": True}
    path = train(changes=changes | {"validation.batches": 1, "training.steps": 2})
    loss = look(path).steps[-1]["val_loss"]
    assert main(["eval", str(path), "--batches", "1"]) == 0
    assert f"validation loss {loss:.4f} nats" in capsys.readouterr().out
    assert main(["eval", str(path), "--batches", "1", "--forward", "bf16"]) == 0
    assert f"own {loss:.6f}" in capsys.readouterr().out


def test_the_loss_is_the_mean_over_tokens_and_of_bytes_the_bits_a_byte(trained, text):
    # In fp8 a batch shares its scales, so that its sequences are not computed as they are alone.
    there = open_run(trained({"recipe.name": "fp32"}), "cpu")
    engine, val = Engine.of_one_process(there.model), prepare(text, "bytes").val
    singly, together = (
        validation_loss(engine, there.go_to_sample, validation_batches(val, size, 32)).mean for size in (1, 2)
    )
    assert together == pytest.approx(singly, rel=1e-5)
    assert all(p.grad is None for p in there.model.parameters())
    ends = len(val) / (len(val) - (val.streams[0][:] == 256).sum())  # the end of a document has no bytes
    bits = bits_per_byte(together, there.tokenizer, validation_batches(val, 2, 32))
    assert together / np.log(2) <= bits == pytest.approx(together / np.log(2) * ends, rel=0.02)


@pytest.mark.tier("thorough")
def test_a_recipe_file_may_be_gone_and_a_checkpoint_may_not(train, tmp_path):
    mine = tmp_path / "mine.toml"
    mine.write_text('name = "mine"\n[fprop]\nx = "mxfp4"\n')
    path = train(changes={"recipe.name": str(mine), "training.steps": 2})
    mine.unlink()
    assert open_run(path, "cpu").model.blocks[0].down.recipe.casts["fprop.x"].name == "mxfp4"
    (path / "checkpoints").rename(tmp_path / "elsewhere")
    with pytest.raises(UserError, match=r"no checkpoint yet.* checkpoint\.every = 2"):
        open_run(path)
    with pytest.raises(UserError, match="not a run directory"):
        open_run(tmp_path)


TOKENWISE = {"fp32", "bf16", "fp16", "bf16-sr", "eco", "fp8-row", "fp8-row-hp", "fp8-block", "quartet"}
TOKENWISE |= {"mxfp8", "mxfp8-2d", "bf16-fwd-mxfp8-bwd", "mxfp6-e2m3", "mxfp6-e3m2", "mxfp4", "mxint8"}
TOKENWISE |= {"mxfp8-fwd-nvfp4-bwd", "mxfp4-amd", "nvfp4-row", "nvfp4-row-fwd-mxfp8-bwd", "tetrajet2"}
TOKENWISE |= {"tetrajet2-outliers"}


@pytest.mark.parametrize("name", recipe_names())
def test_a_token_by_itself(name):
    """Whether a token's numbers change with its neighbours, by trying it; if they do, it is reported."""
    model = Transformer(model_config("debug", dim=128, heads=4, layers=7, ffn_dim=128, vocab_size=160))
    initialize(model, 0)
    convert(model, name)
    assert TrainedRun(None, None, model, 0, None).is_tokenwise == (name in TOKENWISE)
    layer = model.blocks[0].down.eval()
    x = torch.randn(1, 4, 128, generator=torch.Generator().manual_seed(0))
    changed = torch.cat([x[:, :2], 30 * x[:, 2:]], dim=1)
    with torch.no_grad():
        same = torch.equal(layer(x)[:, :2], layer(changed)[:, :2])
    assert same or name not in TOKENWISE
