"""The programs of docs/how-to/trainers.md run as the page shows, and are short."""

import importlib.util
import re
from pathlib import Path

import pytest

from support.markdown import blocks

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "trainers.md").read_text(encoding="utf-8")
NEEDED = {"transformers": ("transformers", "accelerate"), "lightning": ("lightning",), "torchao": ()}
ELSEWHERE = {"torchtitan"}  # under torchrun, in test_torchtitan.py
PROGRAMS = {re.findall(r"narrowgauge\.integrations\.(\w+)", text)[0]: text for text in blocks(PAGE, "python")}


@pytest.mark.tier("thorough", keep=("lightning", "torchao"))
@pytest.mark.filterwarnings("ignore")  # of others' packages
@pytest.mark.parametrize("name", NEEDED)
def test_a_program_learns(name, tmp_path, monkeypatch):
    for package in NEEDED[name]:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "program"}
    exec(compile(PROGRAMS[name], name, "exec"), names)
    losses = names["losses"] if "losses" in names else names["model"].losses
    assert losses[-1] < 0.9 * losses[0]


def test_each_integration_has_a_program():
    assert PROGRAMS.keys() == NEEDED.keys() | ELSEWHERE
