"""The examples of docs/examples.md run as they stand, and are short."""

import json
import re
from pathlib import Path

import pytest

from support.cloned import MODULES, cloned

PAGE = (Path(__file__).parents[2] / "docs" / "examples.md").read_text(encoding="utf-8")
EXAMPLES = dict(re.findall(r"^## ([^\n]*)\n.*?```python\n(.*?)```", PAGE, re.MULTILINE | re.DOTALL))
TRAIN = ("A comparison in a notebook", "A gate in CI", "A probe of a trained model, and a forecast")
CLONED = {f"{program} as it is": program for program in MODULES}
SLOW = (*TRAIN, "A vision transformer", "A mixture of experts of transformers", "A plan over clusters")


def test_there_are_thirteen_of_at_most_twenty_lines():
    assert len(EXAMPLES) == PAGE.count("```python") == 13
    assert max(text.count("\n") for text in EXAMPLES.values()) <= 20


def run(name, source, folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    (folder / "text.txt").write_bytes(source.read_bytes())
    exec(compile(EXAMPLES[name], name, "exec"), {"__name__": name})
    return capsys.readouterr().out


@pytest.mark.parametrize("name", [name for name in EXAMPLES if name not in (*SLOW, *CLONED)])
def test_an_example_runs(name, source, tmp_path, monkeypatch, capsys):
    run(name, source, tmp_path, monkeypatch, capsys)


@pytest.mark.tier("nightly", keep=("A gate in CI",))
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
    cloned(CLONED[name], monkeypatch)
    losses = json.loads(run(name, source, tmp_path, monkeypatch, capsys).splitlines()[-1])
    assert losses[-1] < losses[0] - 0.5, losses
