"""`training.graph`: where micro-batches are recorded, and where that is refused."""

import pytest
import torch

from narrowgauge.system import files
from narrowgauge.system.errors import UserError
from narrowgauge.trainer.training import make_config
from narrowgauge.trainer.training.config.diff import config_diff
from narrowgauge.trainer.training.step.build_model import note_verified, verification_file
from narrowgauge.trainer.training.step.trainer import Trainer

CPU = torch.device("cpu")


def config_of(graph):
    small = {"name": "debug", "dim": 32, "layers": 1, "heads": 2, "kv_heads": 1, "ffn_dim": 32}
    training = {"graph": graph, "device": "cpu"}
    return make_config({"model": small, "data": {"sequence_length": 8}, "training": training})


def test_words_for_it_and_that_it_changes_no_digit():
    for given, value in [("on", True), ("off", False), ("true", True), ("auto", "auto")]:
        assert config_of(given).training.graph == value
    with pytest.raises(UserError, match=r"training\.graph = 'yess': input should be true, false or auto"):
        config_of("yess")
    assert config_diff(config_of("auto"), config_of(False)) == {}
    for graph in ("auto", False):
        assert Trainer.begin(config_of(graph), CPU).engine.graphs is None


def test_what_verify_found_holds_for_these_versions_and_sources(tmp_path, monkeypatch):
    """An editable install keeps its version while its sources change."""
    monkeypatch.setenv("NARROWGAUGE_CACHE", str(tmp_path / "cache"))
    source = tmp_path / "narrowgauge" / "system" / "files.py"
    source.parent.mkdir(parents=True)
    source.write_text("x = 1\n")
    monkeypatch.setattr(files, "__file__", str(source))
    assert not verification_file(CPU).is_file()
    note_verified(CPU, are_equal=True)
    assert verification_file(CPU).is_file()
    source.write_text("x = 2\n")
    assert not verification_file(CPU).is_file()
    note_verified(CPU, are_equal=True)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__version__", "0.0")
        assert not verification_file(CPU).is_file()
    note_verified(CPU, are_equal=False)
    assert not verification_file(CPU).is_file()
