"""C7 and C8. A run that comes back to something else: refused with what is other, or let through by name."""

import json
import shutil

import pytest

from support.fault_runs import WIDE, contents
from support.fault_table import RANKS, case

SHORT = {"training.steps": 12, "checkpoint.every": 3}
OTHER = {
    "optimizer.lr": ("0.01", "optimizer.lr"),
    "recipe.name": ("mxfp8", "recipe.name"),
    "recipe.fprop.x": ("bf16", "recipe"),
    "training.seed": ("7", "training.seed"),
    "data.tokenizer": ("bpe-270", "data.tokenizer"),
    "model.ffn_dim": ("96", "model.ffn_dim"),
}


@case("C7")
@RANKS
@pytest.mark.parametrize("key", OTHER)
def test_another_configuration_is_refused_with_what_is_other(runs, out, key, ranks):
    runs.copy(out, SHORT, ranks)
    before = {name: data for name, data in contents(out) if name != ".lock"}
    value, named = OTHER[key]
    more = ["--model.vocab_size", "300"] if key == "data.tokenizer" else []
    ended = runs.start([*runs.words(SHORT), f"--{key}", value, *more], out, ranks).wait()
    assert set(ended.codes) == {2}, ended.err
    assert named in ended.err or (more and "model.vocab_size" in ended.err)
    assert {name: data for name, data in contents(out) if name != ".lock"} == before


@case("C7", tier="thorough")
def test_another_text_under_the_same_name_is_refused(runs, out, text, tmp_path):
    source = tmp_path / "text"
    shutil.copytree(text, source)
    words = runs.words(SHORT | {"data.source": source})
    runs.finish(words, out)
    (out / "status.json").unlink()
    (source / "00.txt").write_text("something else\n" * 10)
    ended = runs.start(words, out).wait()
    assert ended.codes == [2]
    assert "restore text and tokenizer" in ended.err


@case("C7")
def test_another_text_of_a_recipe_is_refused(runs, out, tmp_path):
    recipe = tmp_path / "mine.toml"
    recipe.write_text("[fprop]\nx = 'mxfp8'\n")
    words = runs.words(SHORT | {"recipe.name": recipe})
    runs.finish(words, out)
    (out / "status.json").unlink()
    recipe.write_text("[fprop]\nx = 'mxfp4'\n")
    ended = runs.start(words, out).wait()
    assert ended.codes == [2]
    assert "another text of recipe" in ended.err


@case("C7")
@RANKS
def test_a_change_that_is_allowed_by_name_is_made_and_told(runs, out, ranks):
    look = runs.copy(out, SHORT, ranks)
    words = [*runs.words(SHORT), "--optimizer.lr", "0.01", "--training.steps", "18"]
    one = runs.start([*words, "--allow-change", "optimizer.lr"], out, ranks).wait()
    assert set(one.codes) == {2}, "the other change was not allowed"
    assert "training.steps" in one.err
    runs.finish([*words, "--allow-change", "optimizer.lr,training.steps"], out, ranks)
    assert look.column("step") == list(range(1, 19))
    old = runs.undisturbed(SHORT, ranks).column("loss")
    assert look.column("loss")[:12] == old
    assert "optimizer.lr" in json.dumps(look.lines)


@case("C8")
@RANKS
def test_state_of_another_kind_is_refused_until_it_is_converted(runs, narrowgauge, tmp_path, ranks):
    """A run with fp32 moments, and an optimizer whose moments are FP8 and FP16."""
    wide, out = WIDE | SHORT | {"recipe.name": "bf16"}, tmp_path / "run"
    runs.copy(out, wide, ranks)
    before = {name: data for name, data in contents(out) if name != ".lock"}
    narrow = runs.words(wide | {"recipe.name": "msamp-o2"})
    ended = runs.start(narrow, out, ranks).wait()
    assert set(ended.codes) == {2}
    assert "recipe.name" in ended.err
    for name in ("config.toml", "recipe.toml"):  # even if a user edits the run's record of itself
        other = runs.undisturbed(wide | {"recipe.name": "msamp-o2"}, ranks).path
        shutil.copy(other / name, out / name)
    ended = runs.start(narrow, out, ranks).wait()
    assert set(ended.codes) == {2}
    for name, data in before.items():
        if name.startswith("checkpoints"):
            assert (out / name).read_bytes() == data
        if name in ("config.toml", "recipe.toml"):
            (out / name).write_bytes(data)
    converted = narrowgauge(
        *("train", "--branch", out, "--recipe", "msamp-o2", "--steps", "13", "--out", tmp_path / "converted")
    )
    assert converted.code == 0, converted.err
