"""A run directory belongs to one configuration, and records what happened in it."""

import json

import pytest

from narrowgauge.recipes import recipe
from narrowgauge.system.errors import UserError
from narrowgauge.trainer.runs.run_directory import RunDirectory
from narrowgauge.trainer.training import make_config


@pytest.fixture
def directory(tmp_path):
    return RunDirectory(tmp_path / "runs" / "mine")


def test_a_claim_writes_everything_resolved(directory, tiny):
    """Also where one was killed half way."""
    directory.path.mkdir(parents=True)
    (directory.path / "recipe.toml").write_text("half of an older recipe")
    (directory.path / ".config.toml.tmp-0a").write_text("[mod")
    config = make_config(tiny())
    directory.claim(config)
    assert directory.config().spec.model == config.spec.model
    assert directory.config().training == config.training
    assert (directory.path / "recipe.toml").read_text() == recipe("fp8").text


@pytest.mark.parametrize(
    ("key", "old", "new"),
    [
        ("model.dim", 32, 64),
        ("data.tokenizer", "'bytes'", "'bpe-300'"),
        ("recipe.name", "'fp8'", "'bf16'"),
        ("recipe.fprop.x", None, "'bf16'"),
        ("guard.max_skips", 10, 0),
    ],
)
def test_another_configuration_is_refused_by_its_key_and_both_values(directory, tiny, key, old, new):
    directory.claim(make_config(tiny()))
    changed = make_config(tiny({key: str(new).strip("'")}))
    with pytest.raises(UserError) as error:
        directory.claim(changed)
    for words in (str(directory.path), f"{key} = {old}", f"now it is {new}", "another --out"):
        assert words in str(error.value)


def test_what_does_not_move_the_trajectory_may_change(directory, tiny):
    directory.claim(make_config(tiny()))
    for changes in (
        {"log.every": 1, "log.prompt": "steam"},
        {"checkpoint.every": 1, "checkpoint.keep": 5, "checkpoint.every_minutes": 1},
        {"validation.every": 1, "validation.batches": 1},
        {"model.name": "debug", "model.vocab_size": 257, "model.head_dim": 16},
        {"training.device": "cpu", "recipe.backend": "auto"},
    ):
        directory.claim(make_config(tiny(changes)))


def test_another_text_of_the_recipe_is_refused(directory, tiny, tmp_path):
    mine, text = tmp_path / "mine.toml", 'name = "mine"\n[fprop]\nx = "e4m3"\n'
    for same in (text, text, f"# a comment\n{text}"):
        mine.write_text(same)
        directory.claim(make_config(tiny({"recipe.name": str(mine)})))
    mine.write_text(text.replace("e4m3", "e5m2"))
    changed = make_config(tiny({"recipe.name": str(mine)}))
    with pytest.raises(UserError, match=r"another text of recipe .*mine\.toml.* restore .* another --out"):
        directory.claim(changed)
    own = directory.config(own_recipe=True).spec.recipe
    assert own.casts["fprop.x"].name == "e4m3", "a finished run is used with the recipe it was made with"


def test_status_is_the_last_that_was_set(directory, tiny):
    assert directory.status() == ""
    directory.claim(make_config(tiny()))
    for status in ("running", "preempted"):
        directory.set_status(status, "")
        assert directory.status() == status
    (directory.path / "status.json").write_text("{")
    assert directory.status() == ""


def test_lines_after_a_checkpoint_go_and_damaged_ones_are_not_dropped(directory):
    directory.path.mkdir(parents=True)
    for line in (
        {"event": "start", "step": 0, "sample": "two\nlines"},
        {"step": 1, "loss": 0.1 + 0.2},
        {"step": 2, "loss": float("nan")},
        {"step": 3, "loss": 1},
        {"event": "done", "step": 2},
    ):
        directory.record(line)
    directory.metrics.write_bytes(directory.metrics.read_bytes() + b'{"step": 4, "lo')
    before = directory.metrics.read_text().splitlines()
    assert json.loads(before[0])["sample"] == "two\nlines", "a line is one JSON object"
    directory.keep_metrics_until(2)
    kept = directory.metrics.read_text()
    assert kept.splitlines() == before[:3], "to the letter; the end of the run is yet to come"
    assert kept.endswith("\n")
    directory.metrics.write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(UserError, match=r"metrics\.jsonl:2"):
        directory.keep_metrics_until(3)


def test_another_corpus_is_refused(directory):
    directory.path.mkdir(parents=True)
    directory.check_corpus("1" * 64)
    directory.record({"event": "start", "step": 0, "corpus": "1" * 64})
    directory.check_corpus("1" * 64)
    with pytest.raises(UserError, match=r"corpus 111111111111\.\.\..* 222222222222\.\.\..* another --out"):
        directory.check_corpus("2" * 64)


def test_checkpoints_stay_its_own_where_the_text_changed_before_the_first(directory, tiny):
    """A run that was killed before its first save begins again, with another corpus that was let through."""
    config = make_config(tiny())
    directory.claim(config)
    directory.record({"event": "start", "step": 0, "corpus": "a" * 64})
    run_id = directory.run_id("b" * 64)  # that checkpoints get from now on
    directory.keep_metrics_until(-1)
    directory.adopt(config, {}, "b" * 64, 0, run_id)
    directory.record({"event": "start", "step": 0, "corpus": "b" * 64})
    assert directory.run_id("b" * 64) == run_id
