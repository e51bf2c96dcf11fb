"""A run that comes back with other values: refused with every difference, or let through by name."""

import pytest

from narrowgauge.checkpoint import load, steps
from narrowgauge.errors import UserError
from narrowgauge.runs import run
from narrowgauge.training import load_values
from support.runs import write_text


def interrupted(path):
    """As if the run had been killed before its end."""
    (path / "status.json").unlink()
    return path


@pytest.fixture
def again(tiny, tmp_path):
    def do(changes, allowed=(), name="run"):
        return run(tiny(changes), tmp_path / name, allow_change=allowed)

    return do


@pytest.mark.tier("thorough")
def test_every_difference_is_told(train, again):
    path = train()
    before = (path / "config.toml").read_text()
    with pytest.raises(UserError) as error:
        again({"optimizer.lr": 0.1, "data.sequence_length": 16, "training.seed": 3})
    for words in (
        "optimizer.lr = 0.002, and now it is 0.1",
        "data.sequence_length = 32, and now it is 16",
        "training.seed = 0, and now it is 3",
        "--allow-change data.sequence_length,training.seed,optimizer.lr",
        "another --out",
    ):
        assert words in str(error.value)
    assert (path / "config.toml").read_text() == before


@pytest.mark.tier("thorough")  # a whole run; test_every_difference_is_told stays
def test_what_is_not_named_stays_refused(train, again):
    train()
    with pytest.raises(UserError, match=r"with training\.seed = 0, and now it is 3; restore") as error:
        again({"optimizer.lr": 0.1, "training.seed": 3}, ["optimizer.lr"])
    assert "optimizer.lr = " not in str(error.value)
    assert "--allow-change optimizer.lr,training.seed" in str(error.value), (
        "the line that would be let through"
    )


def test_a_name_that_is_no_key(again):
    with pytest.raises(UserError, match=r"--allow-change: .*lrr'; the nearest is 'optimizer\.lr'"):
        again({}, ["optimizer.lrr"])


@pytest.mark.tier("thorough")  # a whole run; test_every_difference_is_told stays
def test_a_change_that_is_let_through(narrowgauge, line, look, tmp_path):
    out = tmp_path / "run"
    assert narrowgauge(*line(), "--out", out).code == 0
    old_losses = look(out).column("loss")
    words = line({"optimizer.lr": 0.1, "training.steps": 9})
    refused = narrowgauge(*words, "--out", out)
    assert refused.code == 2
    allowed = ("--allow-change", "optimizer.lr,training.steps")
    ended = narrowgauge(*words, *allowed, "--out", out)
    assert ended.code == 0, ended.err
    assert "after step 6" in ended.out
    assert look(out).column("step") == list(range(1, 10))
    assert look(out).column("loss")[:6] == old_losses
    (change,) = look(out).events("change")
    assert change["step"] == 6
    assert change["changes"] == {"optimizer.lr": [0.002, 0.1], "training.steps": [6, 9]}
    assert load_values(out / "config.toml")["optimizer"]["lr"] == 0.1
    (out / "status.json").unlink()
    assert narrowgauge(*words, "--out", out).code == 0, "from then on they are the run's own"
    assert len(look(out).events("change")) == 1
    assert steps(out / "checkpoints") == [8, 9]


@pytest.mark.tier("thorough")  # a whole run; test_every_difference_is_told stays
def test_older_checkpoints_stay_the_runs_own(train, again, look, tmp_path):
    path = interrupted(train())
    again({"training.seed": 3, "training.steps": 7}, ["training.seed", "training.steps"])
    interrupted(path)
    damaged = path / "checkpoints" / "step-7" / "state.json"
    damaged.write_text("{}")
    again({"training.seed": 3, "training.steps": 7})
    assert look(path).events("resume")[-1]["step"] == 6, "made under the old values"


@pytest.mark.tier("thorough")  # a whole run; test_every_difference_is_told stays
def test_the_order_of_the_data_goes_on_under_another_batch_size(train, again, look):
    path = interrupted(train())
    values = {"training.batch_size": 4, "training.steps": 8, "checkpoint.every": 7}
    again(values, ["training.batch_size", "training.steps"])
    states = [load(path / "checkpoints" / f"step-{step}").state["guard"]["samples"] for step in (7, 8)]
    assert states == [6 * 2 + 4, 6 * 2 + 8]


@pytest.mark.tier("thorough")
def test_tokens_are_those_that_were_seen(train, again, look):
    path = interrupted(train())
    values = {"training.batch_size": 4, "data.sequence_length": 16, "training.steps": 8}
    again(values, ["training.batch_size", "data.sequence_length", "training.steps"])
    interrupted(path)
    again(values | {"training.batch_size": 2, "training.steps": 9}, ["training.batch_size", "training.steps"])
    seen = [2 * 32 * step for step in range(1, 7)]
    seen += [seen[-1] + 4 * 16, seen[-1] + 2 * 4 * 16, seen[-1] + 2 * 4 * 16 + 2 * 16]
    assert look(path).column("tokens") == seen


@pytest.mark.tier("thorough")  # a whole run; test_every_difference_is_told stays
def test_what_cannot_be_restored_changes_nothing(train, again):
    path = interrupted(train())
    before = (path / "config.toml").read_text()
    with pytest.raises(UserError, match="another model's"):
        again({"model.ffn_dim": 96}, ["model.ffn_dim"])
    assert (path / "config.toml").read_text() == before
    assert not (path / "identity.json").exists()
    again({})


@pytest.mark.tier("thorough")  # a whole run; test_every_difference_is_told stays
def test_another_recipe(train, again, look, tmp_path):
    path = interrupted(train())
    with pytest.raises(UserError, match=r"it has no .blocks.0.qkv.fprop_x.amax. of .recipe."):
        again({"recipe.name": "fp8-delayed"}, ["recipe.name"])
    changes = {"recipe.name": "mxfp8", "training.steps": 8}
    again(changes, ["recipe.name", "training.steps"])
    assert look(path).column("step") == list(range(1, 9))
    assert (path / "recipe.toml").read_text() != ""


@pytest.mark.tier("thorough")  # a whole run; test_every_difference_is_told stays
def test_another_text_of_the_recipe(tiny, tmp_path, look):
    mine = tmp_path / "mine.toml"
    mine.write_text('name = "mine"\n[fprop]\nx = "e4m3"\n')
    values = tiny({"recipe.name": str(mine)})
    path = interrupted(run(values, tmp_path / "run"))
    mine.write_text('name = "mine"\n[fprop]\nx = "e5m2"\n')
    with pytest.raises(UserError, match=r"another text of recipe .*--allow-change recipe\.name"):
        run(values, path)
    run(values, path, allow_change=["recipe.name"])
    assert "e5m2" in (path / "recipe.toml").read_text()


@pytest.mark.tier("thorough")
def test_another_text_of_the_data(tiny, tmp_path, look):
    values = tiny({"data.source": write_text(tmp_path / "mine", seed=1)})
    path = interrupted(run(values, tmp_path / "run"))
    old = look(path).events("start")[0]["corpus"]
    write_text(tmp_path / "mine", documents=14, seed=2)
    with pytest.raises(UserError, match=r"trained on corpus .*--allow-change data\.source"):
        run(values, path)
    run(values, path, allow_change=["data.source"])
    (change,) = look(path).events("change")
    assert change["changes"]["corpus"] == [old, look(path).events("resume")[-1]["corpus"]]
    interrupted(path)
    run(values, path)


@pytest.mark.tier("thorough")
def test_another_version_of_torch(train, again, look):
    path = interrupted(train())
    file = path / "metrics.jsonl"
    start = look(path).events("start")[0]["torch"]
    file.write_text(file.read_text().replace(start, "2.0.1"))
    with pytest.raises(
        UserError, match=r"code\.torch = '2\.0\.1', and now it is .*--allow-change code\.torch"
    ):
        again({})
    again({}, ["code.torch"])
    again({})
