"""A run from end to end, in this process: what it records, what moves it, what it refuses."""

import io
import json
import os
import platform
import random
import shutil
import statistics
from datetime import UTC, datetime
from importlib import import_module
from importlib.metadata import version

import pytest

import narrowgauge.training
from narrowgauge.checkpoint import lock_run, steps
from narrowgauge.cli.main import main
from narrowgauge.data import load_tokenizer
from narrowgauge.errors import UserError
from narrowgauge.runs import default_out
from narrowgauge.runs.loop.run import run
from narrowgauge.training import load_values, make_config
from support.llama2 import write_llama2

NAMES = ("qkv", "attention_out", "gate_up", "down")
STEP_KEYS = ["step", "loss", "lr", "grad_norm", "tokens", "tokens_per_s", "step_ms", "mfu", "memory_bytes"]


@pytest.mark.tier("thorough")
def test_every_step_is_recorded_and_the_tokenizer_is_kept(train, look):
    path = train()
    run_ = look(path)
    assert run_.column("step") == [1, 2, 3, 4, 5, 6]
    for line in run_.steps:
        validated = ["val_loss", "val_tokens", "val_parts"] if line["step"] in (4, 6) else []
        assert list(line) == [*STEP_KEYS, *validated]
        assert line["tokens"] == line["step"] * 2 * 32
        assert line["tokens_per_s"] == pytest.approx(64 / (line["step_ms"] / 1000))
        assert 0 < line["mfu"] < 1
        assert line["memory_bytes"] > 10_000_000
    before = next(line for line in run_.lines if line.get("step") == 0 and "val_loss" in line)
    assert before["val_loss"] == pytest.approx(5.55, abs=0.1), "about log 257 before the first step"
    assert run_.steps[-1]["val_loss"] < before["val_loss"]
    assert statistics.fmean(before["val_parts"]) == pytest.approx(before["val_loss"], abs=1e-6)
    assert before["val_tokens"] == 32 * len(before["val_parts"]), "a micro-batch is one sequence"
    assert load_tokenizer(path / "tokenizer.json").encode("coal") == list(b"coal")


@pytest.mark.tier("thorough")
def test_events_say_how_it_ran(train, look):
    path = train(changes={"recipe.name": "mxfp4"})
    lines = look(path).lines
    start, done = lines[0], lines[-1]
    assert (start["event"], start["recipe"], start["backend"]) == ("start", "mxfp4", "emulated")
    assert "CPU" in start["backend_reason"]
    assert "TFLOP/s" in start["peak_source"]
    assert datetime.fromisoformat(start["time"]) <= datetime.fromisoformat(done["time"]) <= datetime.now(UTC)
    assert (start["host"], start["version"]) == (platform.node(), version("narrowgauge"))
    assert start["command"]
    assert start["parameters"] == 2 * 257 * 32 + 2 * (32 * 64 + 32 * 32 + 32 * 128 + 64 * 32 + 64) + 32
    assert [event["step"] for event in look(path).events("save")] == [2, 4, 6]
    (audited,) = look(path).events("audit")
    assert audited["step"] == 1
    assert {layer["layer"]: layer["gradient"] for layer in audited["layers"]} == dict.fromkeys(
        [*(f"blocks.{i}.{name}" for i in (0, 1) for name in NAMES), "head"], True
    )
    assert all(layer["calls"] > 0 for layer in audited["layers"])
    assert (done["event"], done["step"]) == ("done", 6)
    assert look(path).status == {"status": "done", "reason": "all 6 steps"}
    assert steps(path / "checkpoints") == [4, 6]


@pytest.mark.tier("thorough")
def test_a_sample_is_shown_and_kept(train, look):
    said = io.StringIO()
    path = train(changes={"log.prompt": "steam "}, said=said)
    (done,) = look(path).events("done")
    assert done["prompt"] == "steam "
    assert done["sample"]
    assert f"steam {done['sample']}" in said.getvalue()


@pytest.mark.tier("thorough")
def test_a_sample_keeps_the_blank_after_its_prompt(train, look, tmp_path, monkeypatch, capsys):
    """A decoder that drops the blank before the first word, at the end of a run and in `sample`."""
    tokenizer = write_llama2(tmp_path / "tokenizer.json")
    new = tokenizer.encode("steam train")[len(tokenizer.encode("steam")) :]
    for place in ("narrowgauge.runs.loop.sample", "narrowgauge.cli.verbs.models"):
        monkeypatch.setattr(import_module(place), "generate", lambda *_, **__: new)
    changes = {"data.tokenizer": str(tmp_path / "tokenizer.json"), "log.prompt": "steam"}
    path = train(changes=changes)
    (done,) = look(path).events("done")
    assert done["sample"] == " train"
    assert main(["sample", str(path), "--prompt", "steam", "--device", "cpu"]) == 0
    assert capsys.readouterr().out == "steam train\n"


@pytest.mark.tier("thorough")
def test_the_same_seed_gives_the_same_run_and_another_another(train, look):
    first, again, other = (
        train(name, {"training.seed": seed}) for name, seed in (("a", 1), ("b", 1), ("c", 2))
    )
    assert look(first).trajectory == look(again).trajectory
    assert look(first).column("loss") != look(other).column("loss")


@pytest.mark.tier("thorough")  # a whole run
def test_the_recipe_moves_the_losses(train, look):
    losses = [look(train(name, {"recipe.name": name})).column("loss") for name in ("fp32", "bf16", "nvfp4")]
    for a, b in ((0, 1), (0, 2), (1, 2)):
        assert losses[a] != losses[b]
        assert losses[a] == pytest.approx(losses[b], rel=0.02)


@pytest.mark.tier("thorough")
def test_a_place_moves_the_losses(train, look):
    plain = train("plain", {"recipe.name": "bf16"})
    narrow = train("narrow", {"recipe.name": "bf16", "recipe.fprop.x": "mxfp4"})
    assert look(plain).column("loss") != look(narrow).column("loss")


@pytest.mark.tier("thorough")
def test_micro_batches_add_up_to_the_batch(train, look):
    fp32 = {"recipe.name": "fp32", "training.batch_size": 4}
    whole = look(train("whole", fp32 | {"training.micro_batch_size": 4}))
    parts = look(train("parts", fp32 | {"training.micro_batch_size": 1}))
    for key in ("loss", "grad_norm"):
        assert whole.column(key) == pytest.approx(parts.column(key), rel=2e-6)
    assert whole.column("tokens") == parts.column("tokens")


@pytest.mark.tier("thorough")  # a whole run
@pytest.mark.parametrize(("name", "recompute"), [("fp8", "selective"), ("nvfp4", True)])
def test_recomputing_changes_no_bit(train, look, name, recompute):
    kept = train("kept", {"recipe.name": name})
    again = train("again", {"recipe.name": name, "training.recompute": recompute})
    assert look(kept).trajectory == look(again).trajectory


@pytest.mark.tier("thorough")
def test_what_is_shown_and_kept_moves_nothing(train, look):
    changes = {"log.every": 1, "checkpoint.every": 3, "checkpoint.keep": 5, "validation.every": 3}
    plain, chatty = look(train("plain")), look(train("chatty", changes))
    for key in ("loss", "grad_norm", "lr"):
        assert plain.column(key) == chatty.column(key)


@pytest.mark.tier("thorough")
@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("constant", [5e-4, 1e-3, 1e-3, 1e-3, 1e-3, 1e-3]),
        ("linear", [5e-4, 1e-3, 8e-4, 6e-4, 4e-4, 2e-4]),
        ("wsd", [5e-4, 1e-3, 1e-3, 1e-3, 6e-4, 2e-4]),
        ("cosine", [5e-4, 1e-3, 8.8284e-4, 6e-4, 3.1716e-4, 2e-4]),
    ],
)
def test_the_schedule_is_kept(train, look, kind, expected):
    changes = {"optimizer.lr": 1e-3, "schedule.kind": kind, "schedule.final_lr_fraction": 0.2}
    path = train(changes=changes | {"schedule.decay_fraction": 0.34})
    assert look(path).column("lr") == pytest.approx(expected, rel=1e-4)


@pytest.mark.tier("thorough")
def test_a_done_run_is_left_alone(train, look):
    path = train()
    files = {p: p.read_bytes() for p in path.rglob("*") if p.is_file() and p.name != ".lock"}
    said = io.StringIO()
    train(said=said)
    assert "is done" in said.getvalue()
    assert {p: p.read_bytes() for p in path.rglob("*") if p.is_file() and p.name != ".lock"} == files


@pytest.mark.tier("thorough")
def test_an_end_that_was_killed_is_made_again_once(train, look):
    path = train()
    before = look(path).trajectory
    (path / "status.json").write_text('{"status": "running", "reason": ""}\n')
    train()
    assert look(path).trajectory == before
    assert len(look(path).events("done")) == 1
    assert look(path).status["status"] == "done"


@pytest.mark.tier("thorough")
def test_the_configuration_it_leaves_makes_the_run_again(train, look, tmp_path):
    path = train(changes={"recipe.name": "nvfp4", "recipe.fprop.x": "mxfp8", "optimizer.betas": "0.8,0.9"})
    again = run(load_values(path / "config.toml"), tmp_path / "again")
    assert look(again).trajectory == look(path).trajectory


@pytest.mark.tier("thorough")
def test_it_is_what_python_runs(tiny, tmp_path, look, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = narrowgauge.runs.run(tiny())
    assert path == default_out(make_config(tiny()))
    assert path.parts[0] == "runs"
    assert "-fp8," in path.name
    assert look(path).status["status"] == "done"


@pytest.mark.tier("thorough")
def test_without_a_terminal_lines_are_plain(train):
    said = io.StringIO()
    train(changes={"log.every": 3}, said=said)
    text = said.getvalue()
    assert "\x1b" not in text
    assert [line.split()[1] for line in text.splitlines() if line.startswith("step")] == [
        "0/6",
        "3/6",
        "4/6",
        "6/6",
    ]


def write_corpus(directory, sizes, seed=0):
    rng = random.Random(seed)
    directory.mkdir(exist_ok=True)
    for i, size in enumerate(sizes):
        (directory / f"{i}.txt").write_text("".join(rng.choice("narowg ") for _ in range(size)))
    return str(directory)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ([], "leads to no file that can be read"),
        ([0, 0], "leads to no file that can be read|only white space"),
        ([20, 20], "the training part .* 21 tokens.* data.sequence_length"),
        ([100, 20], "part of the data holds 21 tokens.* data.sequence_length"),
    ],
)
def test_a_corpus_without_a_sequence_is_refused(train, tmp_path, sizes, words):
    source = write_corpus(tmp_path / "small", sizes)
    with pytest.raises(UserError, match=words):
        train(changes={"data.source": source})
    assert not (tmp_path / "run").exists(), "the directory is still free for a configuration that works"


def test_a_vocabulary_too_small_is_refused(train, tmp_path):
    with pytest.raises(UserError, match=r"up to 256.* model\.vocab_size = 256.* --model\.vocab_size 257"):
        train(changes={"model.vocab_size": 256})
    assert not (tmp_path / "run").exists()


@pytest.mark.tier("thorough")
@pytest.mark.parametrize("cut", [1, 2, 1000])
def test_a_token_file_cut_short_is_refused(train, tmp_path, monkeypatch, cut):
    monkeypatch.setenv("NARROWGAUGE_CACHE", str(tmp_path / "cache"))
    train("first")
    (file,) = (tmp_path / "cache").rglob("train.bin")
    os.truncate(file, file.stat().st_size - cut)
    with pytest.raises(UserError, match=r"train\.bin is damaged"):
        train("second")
    assert not (tmp_path / "second").exists()


@pytest.mark.tier("thorough")
def test_a_changed_corpus_is_refused_and_the_run_stays_usable(train, look, tmp_path):
    source = write_corpus(tmp_path / "text", [150] * 10)
    changes = {"data.source": source, "data.tokenizer": "bpe-300", "model.vocab_size": 300}
    changes |= {"data.sequence_length": 16}
    path = train(changes=changes)
    (path / "status.json").unlink()
    kept = (path / "tokenizer.json").read_bytes()
    write_corpus(tmp_path / "text", [150] * 10, seed=1)
    with pytest.raises(UserError, match="restore text and tokenizer"):
        train(changes=changes)
    assert (path / "tokenizer.json").read_bytes() == kept, "of the tokens that the weights know"


def test_a_run_in_use_is_refused(train, tmp_path):
    with lock_run(tmp_path / "run"), pytest.raises(UserError, match=f"in use by process {os.getpid()}"):
        train()


@pytest.mark.tier("thorough")
def test_going_back_over_a_deleted_checkpoint_gives_the_same_run(train, look):
    path = train(changes={"recipe.name": "nvfp4"})
    before = look(path).trajectory
    shutil.rmtree(path / "checkpoints" / "step-6")
    (path / "status.json").write_text(json.dumps({"status": "running", "reason": ""}))
    train(changes={"recipe.name": "nvfp4"})
    assert look(path).trajectory == before
    assert [event["step"] for event in look(path).events("resume")] == [4]


def test_a_run_that_diverges_leaves_its_page(line, tmp_path, capsys):
    words = line({"optimizer.lr": 1e30, "guard.max_skips": 0})
    assert main([*words, "--out", str(tmp_path / "run")]) == 1
    assert "non-finite" in capsys.readouterr().err
    page = (tmp_path / "run" / "report.html").read_text()
    assert '<p class="failed">The run failed after step ' in page


@pytest.mark.tier("thorough")
def test_a_short_run_is_read_at_its_last_step(train):
    path = train(changes={"recipe.name": "mxfp4"})
    lines = [json.loads(text) for text in (path / "gauges.jsonl").read_text().splitlines()]
    assert {line["step"] for line in lines} == {6}, "of 6 steps, with gauges.every = 100"
