"""The programs of examples/ run as they stand."""

import json
import os
from pathlib import Path

import pytest

FILES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))
EXAMPLES = {path.stem: path.read_text(encoding="utf-8") for path in FILES}
TRAIN = ("comparison", "gate_in_ci", "probe_and_forecast")
CLONED = ("nanogpt", "nanochat")  # NARROWGAUGE_NANOGPT and NARROWGAUGE_NANOCHAT name the folders of clones
SLOW = (*TRAIN, "vision_transformer", "mixture_of_experts", "plan_over_clusters")


def run(name, source, folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    (folder / "text.txt").write_bytes(source.read_bytes())
    exec(compile(EXAMPLES[name], name, "exec"), {"__name__": name})
    return capsys.readouterr().out


@pytest.mark.parametrize("name", [name for name in EXAMPLES if name not in (*SLOW, *CLONED)])
def test_an_example_runs(name, source, tmp_path, monkeypatch, capsys):
    run(name, source, tmp_path, monkeypatch, capsys)


@pytest.mark.tier("nightly", keep=("gate_in_ci",))
@pytest.mark.tier("thorough")  # the functions that they call are tested in test_results.py
@pytest.mark.parametrize("name", SLOW)
def test_a_longer_example_runs(name, source, tmp_path, monkeypatch, capsys):
    if "transformers" in EXAMPLES[name]:
        pytest.importorskip("transformers")
    run(name, source, tmp_path, monkeypatch, capsys)
    if name in TRAIN:
        assert list((tmp_path / "runs").iterdir())


@pytest.mark.tier("nightly", keep=1)
@pytest.mark.tier("thorough")
@pytest.mark.parametrize("name", CLONED)
def test_a_program_trains_as_it_was_cloned(name, source, tmp_path, monkeypatch, capsys):
    if not (folder := os.environ.get(f"NARROWGAUGE_{name.upper()}")):
        pytest.skip("no variable names a clone of it")
    monkeypatch.syspath_prepend(os.path.abspath(folder))
    losses = json.loads(run(name, source, tmp_path, monkeypatch, capsys).splitlines()[-1])
    assert losses[-1] < losses[0] - 0.5, losses
