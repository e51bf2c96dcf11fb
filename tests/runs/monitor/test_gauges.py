"""Gauges in a run: what is written. That they change no bit is shown in loop/test_loop.py."""

import json

import pytest

from narrowgauge.system.errors import UserError
from narrowgauge.trainer.training import make_config
from narrowgauge.trainer.training.config.schema import GAUGES_EVERY
from support.runs import interrupted

WIDE = {"model.dim": 64, "model.ffn_dim": 96, "training.steps": 4}  # large enough for narrow moments
OPERANDS = {"fprop.x", "fprop.w", "dgrad.dy", "dgrad.w", "wgrad.dy", "wgrad.x"}
PRODUCTS = {"fprop.y", "dgrad.dx", "wgrad.dw"}


def gauges(path):
    return [json.loads(line) for line in (path / "gauges.jsonl").read_text().splitlines()]


@pytest.mark.tier("thorough")  # a whole run
def test_every_layer_and_place_is_read_once_a_step(train):
    changes = {"recipe.name": "mxfp4", "gauges.every": 2, "training.recompute": True}
    lines = gauges(train("run", WIDE | changes))
    assert {line["step"] for line in lines} == {2, 4}
    keys = [(line["step"], line["layer"], line["place"]) for line in lines]
    assert len(set(keys)) == len(keys)
    down = {line["place"]: line for line in lines if (line["layer"], line["step"]) == ("blocks.1.down", 4)}
    assert down.keys() == OPERANDS | PRODUCTS | {"weight", "grad", "m", "v"}
    assert all(down[place]["cast"] == "mxfp4" and 10 < down[place]["sqnr_db"] < 30 for place in OPERANDS)
    assert all(0.9 < down[place]["cosine"] < 1 for place in PRODUCTS)
    assert all(down[place]["cast"] == "fp32" for place in ("weight", "grad", "m", "v"))
    assert {"embedding", "head"} <= {line["layer"] for line in lines}


@pytest.mark.tier("thorough")  # whole runs
def test_lines_after_the_checkpoint_are_made_again(train):
    """And they may be switched on in a run that goes on."""
    changes = WIDE | {"recipe.name": "nvfp4", "gauges.every": 1}
    path = train("run", changes)
    before = (path / "gauges.jsonl").read_bytes()
    with (path / "gauges.jsonl").open("ab") as file:
        file.write(b'{"step": 5, "la')
    interrupted(path, 4)
    train("run", changes)
    assert (path / "gauges.jsonl").read_bytes() == before
    interrupted(path, 4)
    (path / "gauges.jsonl").write_bytes(b"{}\n" + before)
    with pytest.raises(UserError, match=r"gauges\.jsonl:1: every line .* fix or delete"):
        train("run", changes)
    (path / "gauges.jsonl").unlink()
    train("run", changes)
    assert {line["step"] for line in gauges(path)} == {3, 4}


def test_compiled_code_has_no_gauges(tiny):
    assert make_config(tiny()).gauges.every == GAUGES_EVERY
    assert make_config(tiny({"training.compile": True})).gauges.every == 0
    words = r"gauges\.every = 5 with training\.compile = true.* --gauges\.every 0"
    with pytest.raises(UserError, match=words):
        make_config(tiny({"training.compile": True, "gauges.every": 5}))
