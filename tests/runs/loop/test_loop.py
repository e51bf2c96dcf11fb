"""A run from end to end, in this process: what it records, what moves it, what it refuses."""

import io
import json
from datetime import UTC, datetime
from importlib import import_module

import pytest

import narrowgauge.trainer.runs
from narrowgauge.trainer.checkpoint import steps
from narrowgauge.trainer.cli.main import main
from narrowgauge.trainer.runs import default_out
from narrowgauge.trainer.training import load_values, make_config
from support.llama2 import write_llama2
from support.runs import interrupted

NAMES = ("qkv", "attention_out", "gate_up", "down")
STEP_KEYS = ["step", "loss", "lr", "grad_norm", "tokens", "tokens_per_s", "step_ms", "mfu", "memory_bytes"]


@pytest.mark.tier("thorough")
def test_a_run_records_its_steps_its_events_and_a_sample(train, look):
    said = io.StringIO()
    schedule = {"optimizer.lr": 1e-3, "schedule.kind": "wsd", "schedule.final_lr_fraction": 0.2}
    schedule |= {"schedule.decay_fraction": 0.34}
    changes = {"recipe.name": "mxfp4", "log.prompt": "steam ", "log.every": 3}
    path = train(changes=changes | schedule, said=said)
    run = look(path)
    assert run.column("step") == [1, 2, 3, 4, 5, 6]
    assert run.column("lr") == pytest.approx([5e-4, 1e-3, 1e-3, 1e-3, 6e-4, 2e-4], rel=1e-4)
    for line in run.steps:
        assert list(line) == STEP_KEYS + ["val_loss", "val_tokens", "val_parts"] * (line["step"] in (4, 6))
        assert line["tokens"] == line["step"] * 2 * 32
        assert line["tokens_per_s"] == pytest.approx(64 / (line["step_ms"] / 1000))
        assert 0 < line["mfu"] < 1
        assert line["memory_bytes"] > 10_000_000
    before = next(line for line in run.lines if line.get("step") == 0 and "val_loss" in line)
    assert before["val_loss"] == pytest.approx(5.55, abs=0.2), "about log 257 before the first step"
    assert run.steps[-1]["val_loss"] < before["val_loss"]
    start, done = run.lines[0], run.lines[-1]
    assert (start["event"], start["recipe"], start["backend"]) == ("start", "mxfp4", "emulated")
    assert datetime.fromisoformat(start["time"]) <= datetime.fromisoformat(done["time"]) <= datetime.now(UTC)
    assert start["parameters"] == 2 * 257 * 32 + 2 * (32 * 64 + 32 * 32 + 32 * 128 + 64 * 32 + 64) + 32
    (audited,) = run.events("audit")
    assert audited["step"] == 1
    assert {layer["layer"]: layer["gradient"] for layer in audited["layers"]} == dict.fromkeys(
        [*(f"blocks.{i}.{name}" for i in (0, 1) for name in NAMES), "head"], True
    )
    assert [event["step"] for event in run.events("save")] == [2, 4, 6]
    assert steps(path / "checkpoints") == [4, 6]
    gauges = [json.loads(text) for text in (path / "gauges.jsonl").read_text().splitlines()]
    assert {line["step"] for line in gauges} == {6}, "a short run is read at its last step"

    assert (done["event"], done["step"], done["prompt"]) == ("done", 6, "steam ")
    for words in (f"run directory: {path}\n", f"steam {done['sample']}"):
        assert words in said.getvalue()
    assert run.status == {"status": "done", "reason": "all 6 steps", "diverged": False}
    assert "\x1b" not in said.getvalue(), "plain lines without a terminal"
    shown = [line.split()[1] for line in said.getvalue().splitlines() if line.startswith("step")]
    assert shown == ["0/6", "3/6", "4/6", "6/6"]


@pytest.mark.tier("thorough")
def test_a_sample_keeps_the_blank_after_its_prompt(train, look, tmp_path, monkeypatch, capsys):
    """A decoder that drops the blank before the first word, at the end of a run and in `sample`."""
    tokenizer = write_llama2(tmp_path / "tokenizer.json")
    new = tokenizer.encode("steam train")[len(tokenizer.encode("steam")) :]
    for place in ("narrowgauge.trainer.runs.loop.loop", "narrowgauge.trainer.models"):
        monkeypatch.setattr(import_module(place), "generate", lambda *_, **__: new)
    path = train(changes={"data.tokenizer": str(tmp_path / "tokenizer.json"), "log.prompt": "steam"})
    (done,) = look(path).events("done")
    assert done["sample"] == " train"
    assert main(["sample", str(path), "--prompt", "steam", "--device", "cpu"]) == 0
    assert capsys.readouterr().out == "steam train\n"


WATCHED = {"gauges.every": 1, "guard.replay_every": 2, "checkpoint.asynchronous": True, "log.every": 1}
WIDE = {"model.dim": 64, "model.ffn_dim": 96, "gauges.every": 0}  # large enough for narrow moments


@pytest.mark.tier("nightly", keep=("fp8-delayed", "msamp-o3"))
@pytest.mark.tier("thorough")
@pytest.mark.parametrize(
    ("name", "recompute"),
    [
        *(("fp8-delayed", True), ("nvfp4", True), ("msamp-o3", True), ("coat", False)),
        *(("fp16", "selective"), ("fp4", False)),
    ],
)
def test_what_watches_recomputes_or_saves_behind_the_steps_changes_no_bit(train, look, name, recompute):
    """Gauges, steps computed twice, recomputation and saves in the background, all at once: losses, norms,
    and the bytes of the last checkpoint are those of a run without them."""
    plain = look(train("plain", WIDE | {"recipe.name": name}))
    watched = look(train("watched", WIDE | WATCHED | {"recipe.name": name, "training.recompute": recompute}))
    assert watched.trajectory == plain.trajectory
    assert not (plain.path / "gauges.jsonl").exists()
    gauges = (watched.path / "gauges.jsonl").read_text().splitlines()
    assert {json.loads(line)["step"] for line in gauges} == set(range(1, 7))
    for run in (plain, watched):
        assert [event["step"] for event in run.events("save")] == [2, 4, 6]
        assert steps(run.path / "checkpoints") == [4, 6]


@pytest.mark.tier("thorough")
def test_what_moves_the_losses_and_what_does_not(train, trained, look, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    places = {"recipe.name": "bf16", "recipe.fprop.x": "mxfp8", "optimizer.betas": "0.8,0.9"}
    base = look(trained(places))
    again = narrowgauge.trainer.runs.run(load_values(base.path / "config.toml"))  # in runs/
    assert look(again).trajectory == base.trajectory
    assert again == default_out(make_config(load_values(base.path / "config.toml")))
    often = {"log.every": 1, "checkpoint.every": 3, "checkpoint.keep": 5, "validation.every": 3}
    shown = look(train("often", places | often))
    for key in ("loss", "grad_norm", "lr"):
        assert base.column(key) == shown.column(key)
    for changes in ({"training.seed": 2}, {"recipe.fprop.x": "mxfp4"}, {"recipe.name": "nvfp4"}):
        other = look(train(str(changes), places | changes)).column("loss")
        assert other != base.column("loss")
        assert "training.seed" in changes or other == pytest.approx(base.column("loss"), rel=0.02)


@pytest.mark.tier("thorough")
def test_the_same_call_leaves_a_done_run_finishes_its_end_and_goes_back_over_lost_steps(train, look):
    path, nvfp4 = train(changes={"recipe.name": "nvfp4"}), {"recipe.name": "nvfp4"}
    before, said = look(path).trajectory, io.StringIO()
    files = {p: p.read_bytes() for p in path.rglob("*") if p.is_file() and p.name != ".lock"}
    train(changes=nvfp4, said=said)
    assert "is done" in said.getvalue()
    assert {p: p.read_bytes() for p in path.rglob("*") if p.is_file() and p.name != ".lock"} == files
    for lost in ([], [6]):
        interrupted(path, *lost)
        train(changes=nvfp4)
        assert look(path).trajectory == before
        assert len(look(path).events("done")) == 1
        assert look(path).status["status"] == "done"
    assert [event["step"] for event in look(path).events("resume")] == [4]


def test_a_run_that_diverges_leaves_its_page(line, tmp_path, capsys):
    words = line({"optimizer.lr": 1e30, "guard.max_skips": 0})
    assert main([*words, "--out", str(tmp_path / "run")]) == 1
    assert "non-finite" in capsys.readouterr().err
    page = (tmp_path / "run" / "report.html").read_text()
    assert '<p class="failed">The run failed after step ' in page
