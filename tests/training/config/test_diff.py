"""A run that comes back with other values: refused with every difference, or let through by name."""

import shutil

import pytest

from narrowgauge.system.errors import UserError
from narrowgauge.trainer.checkpoint import load, steps
from narrowgauge.trainer.training import load_values
from support.in_process import run_here
from support.runs import interrupted, write_text


@pytest.fixture
def path(trained, tmp_path):
    """A run of six steps that was killed before its end."""
    return interrupted(shutil.copytree(trained(), tmp_path / "run"))


@pytest.fixture
def again(tiny, path):
    """The same line again with changes, of which some keys are allowed."""
    return lambda changes=None, *allowed: run_here(tiny(changes), path, allow_change=allowed)


#: (changes, keys allowed, parts of the sentence)
REFUSED = [
    (
        {"optimizer.lr": 0.1, "data.sequence_length": 16, "training.seed": 3}, [],
        "optimizer.lr = 0.002, and now it is 0.1|data.sequence_length = 32, and now it is 16|"
        "training.seed = 0, and now it is 3|"
        "--allow-change data.sequence_length,training.seed,optimizer.lr|another --out",
    ),
    ({}, ["optimizer.lrr"], "--allow-change: |lrr'; the nearest is 'optimizer.lr'"),
    ({"model.ffn_dim": 96}, ["model.ffn_dim"], "another model's"),
    ({"recipe.name": "fp8-delayed"}, ["recipe.name"], "it has no |blocks.0.qkv.fprop_x.amax| of |recipe"),
]  # fmt: skip


@pytest.mark.tier("thorough", keep=1)
@pytest.mark.parametrize(("changes", "allowed", "words"), REFUSED)
def test_what_is_not_let_through_or_cannot_be_restored_changes_nothing(path, again, changes, allowed, words):
    before = (path / "config.toml").read_text()
    with pytest.raises(UserError) as error:
        again(changes, *allowed)
    for part in words.split("|"):
        assert part in str(error.value)
    assert (path / "config.toml").read_text() == before
    assert not (path / "identity.json").exists()


@pytest.mark.tier("thorough")  # whole runs
def test_a_change_that_is_let_through_is_told_and_from_then_on_the_runs_own(path, again, look):
    run, changes = look(path), {"optimizer.lr": 0.1, "training.steps": 9}
    old_losses = run.column("loss")
    again(changes, "optimizer.lr", "training.steps")
    assert run.column("step") == list(range(1, 10))
    assert run.column("loss")[:6] == old_losses
    (change,) = run.events("change")
    assert change["step"] == 6
    assert change["changes"] == {"optimizer.lr": [0.002, 0.1], "training.steps": [6, 9]}
    assert load_values(path / "config.toml")["optimizer"]["lr"] == 0.1
    assert steps(path / "checkpoints") == [8, 9]
    interrupted(path)
    again(changes)
    assert len(run.events("change")) == 1


@pytest.mark.tier("thorough")  # whole runs
def test_the_order_of_the_data_and_the_count_of_tokens_go_on_under_other_sizes(path, again, look):
    sizes = {"training.batch_size": 4, "data.sequence_length": 16, "training.steps": 8, "checkpoint.every": 7}
    again(sizes, "training.batch_size", "data.sequence_length", "training.steps")
    states = [load(path / "checkpoints" / f"step-{step}").state["guard"]["samples"] for step in (7, 8)]
    assert states == [6 * 2 + 4, 6 * 2 + 8]
    interrupted(path)
    again(sizes | {"training.batch_size": 2, "training.steps": 9}, "training.batch_size", "training.steps")
    seen = [2 * 32 * step for step in range(1, 7)]
    seen += [seen[-1] + 4 * 16, seen[-1] + 2 * 4 * 16, seen[-1] + 2 * 4 * 16 + 2 * 16]
    assert look(path).column("tokens") == seen


@pytest.mark.tier("thorough")  # whole runs
def test_another_recipe_or_another_text_of_it(tiny, tmp_path, path, again, look):
    mine = tmp_path / "mine.toml"
    mine.write_text('name = "mine"\n[fprop]\nx = "e4m3"\n')
    changes = {"recipe.name": str(mine), "training.steps": 8}
    again(changes, "recipe.name", "training.steps")
    assert look(path).column("step") == list(range(1, 9))
    interrupted(path)
    mine.write_text('name = "mine"\n[fprop]\nx = "e5m2"\n')
    with pytest.raises(UserError, match=r"another text of recipe .*--allow-change recipe\.name"):
        again(changes)
    again(changes, "recipe.name")
    assert "e5m2" in (path / "recipe.toml").read_text()


@pytest.mark.tier("thorough")
def test_another_text_of_the_data_or_another_version_of_torch(tiny, tmp_path, look):
    """The tokenizer that the weights know is kept."""
    source = write_text(tmp_path / "mine", documents=24, seed=1)
    changes = {"data.source": source, "data.tokenizer": "bpe-300", "model.vocab_size": 300}
    values = tiny(changes | {"data.sequence_length": 8, "training.steps": 4})
    path = interrupted(run_here(values, tmp_path / "run"))
    start, tokenizer = look(path).events("start")[0], (path / "tokenizer.json").read_bytes()
    write_text(tmp_path / "mine", documents=26, seed=2)
    with pytest.raises(UserError, match=r"trained on corpus .*--allow-change data\.source"):
        run_here(values, path)
    assert (path / "tokenizer.json").read_bytes() == tokenizer
    run_here(values, path, allow_change=["data.source"])
    (change,) = look(path).events("change")
    assert change["changes"]["corpus"] == [start["corpus"], look(path).events("resume")[-1]["corpus"]]
    interrupted(path)
    run_here(values, path)
    interrupted(path)
    file = path / "metrics.jsonl"
    file.write_text(file.read_text().replace(start["torch"], "2.0.1"))
    words = r"code\.torch = '2\.0\.1', and now it is .*--allow-change code\.torch"
    with pytest.raises(UserError, match=words):
        run_here(values, path)
    run_here(values, path, allow_change=["code.torch"])
