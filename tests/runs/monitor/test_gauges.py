"""Gauges in a run: what is written, and that training goes exactly as it would without."""

import json
import shutil

import pytest

from narrowgauge.errors import UserError
from narrowgauge.training import make_config
from narrowgauge.training.config.schema import GAUGES_EVERY

WIDE = {"model.dim": 64, "model.ffn_dim": 96, "training.steps": 4}  # large enough for narrow moments
EVERY = {"gauges.every": 1}
OFF = {"gauges.every": 0}


def trajectory(path):
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    keys = ("step", "loss", "grad_norm", "val_loss")
    return [[line.get(key) for key in keys] for line in lines if "event" not in line]


def gauges(path):
    return [json.loads(line) for line in (path / "gauges.jsonl").read_text().splitlines()]


@pytest.mark.tier("thorough")  # whole runs
@pytest.mark.parametrize(
    ("name", "recompute"),
    [
        *(("fp8-delayed", True), ("nvfp4", True), ("msamp-o3", True), ("coat", False)),
        ("fp4", False),  # has no state and no random bits to disturb
    ],
)
def test_not_a_bit_of_the_trajectory_changes(train, name, recompute):
    changes = WIDE | {"recipe.name": name, "training.recompute": recompute}
    without, read = train("without", changes | OFF), train("read", changes | EVERY)
    assert trajectory(read) == trajectory(without)
    assert not (without / "gauges.jsonl").exists()
    weights = [
        next((p / "checkpoints" / "step-4").glob("model*.safetensors")).read_bytes() for p in (without, read)
    ]
    assert weights[0] == weights[1]
    assert {line["step"] for line in gauges(read)} == {1, 2, 3, 4}


@pytest.mark.tier("thorough")  # whole runs
def test_every_layer_and_place_is_read_once_a_step(train):
    lines = gauges(
        train("run", WIDE | {"recipe.name": "mxfp4", "gauges.every": 2, "training.recompute": True})
    )
    assert {line["step"] for line in lines} == {2, 4}
    keys = [(line["step"], line["layer"], line["place"]) for line in lines]
    assert len(set(keys)) == len(keys)
    operands = {"fprop.x", "fprop.w", "dgrad.dy", "dgrad.w", "wgrad.dy", "wgrad.x"}
    of_layer = {
        line["place"]: line for line in lines if line["layer"] == "blocks.1.down" and line["step"] == 4
    }
    assert of_layer.keys() == operands | {"fprop.y", "dgrad.dx", "wgrad.dw"} | {"weight", "grad", "m", "v"}
    assert all(
        of_layer[place]["cast"] == "mxfp4" and 10 < of_layer[place]["sqnr_db"] < 30 for place in operands
    )
    assert all(0.9 < of_layer[place]["cosine"] < 1 for place in ("fprop.y", "dgrad.dx", "wgrad.dw"))
    assert all(of_layer[place]["cast"] == "fp32" for place in ("weight", "grad", "m", "v"))
    assert {"embedding", "head"} <= {line["layer"] for line in lines}


@pytest.mark.tier("thorough")  # whole runs
def test_lines_after_the_checkpoint_are_made_again(train):
    changes = WIDE | EVERY | {"recipe.name": "nvfp4", "checkpoint.every": 2, "checkpoint.keep": 2}
    path = train("run", changes)
    before = (path / "gauges.jsonl").read_bytes()
    shutil.rmtree(path / "checkpoints" / "step-4")
    (path / "status.json").unlink()
    with (path / "gauges.jsonl").open("ab") as file:
        file.write(b'{"step": 5, "la')
    train("run", changes)
    assert (path / "gauges.jsonl").read_bytes() == before
    (path / "status.json").unlink()
    (path / "gauges.jsonl").write_bytes(b"{}\n" + before)
    with pytest.raises(UserError, match=r"gauges\.jsonl:1: every line .* fix or delete"):
        train("run", changes)


@pytest.mark.tier("thorough")  # whole runs
def test_they_may_be_switched_on_in_a_run_that_goes_on(train):
    path = train("run", WIDE | OFF)
    shutil.rmtree(path / "checkpoints" / "step-4")
    (path / "status.json").unlink()
    train("run", WIDE | EVERY)
    assert {line["step"] for line in gauges(path)} == {3, 4}


@pytest.mark.tier("thorough")  # whole runs
def test_a_step_that_is_skipped_is_read_all_the_same(train):
    changes = WIDE | EVERY | {"optimizer.lr": 1e30, "schedule.warmup_steps": 0, "guard.max_skips": 9}
    lines = gauges(train("run", changes | {"training.steps": 3, "optimizer.clip_norm": float("inf")}))
    broken = [line for line in lines if line["step"] == 3 and line.get("nonfinite")]
    assert broken, "weights of 1e30 overflow"
    assert all(line["sqnr_db"] is None or line["nonfinite"] < 1 for line in broken)


def test_the_default(tiny):
    assert make_config(tiny()).gauges.every == GAUGES_EVERY
    assert make_config(tiny({"training.compile": True})).gauges.every == 0


def test_compiled_code_is_refused(tiny):
    with pytest.raises(
        UserError, match=r"gauges\.every = 5 with training\.compile = true.* --gauges\.every 0"
    ):
        make_config(tiny({"training.compile": True, "gauges.every": 5}))
