"""Checkouts of programs whose text is not in this project; a variable names the folder of each.

git clone https://github.com/karpathy/nanoGPT; git clone https://github.com/karpathy/nanochat
export NARROWGAUGE_NANOGPT=nanoGPT NARROWGAUGE_NANOCHAT=nanochat
"""

import os
import sys
from pathlib import Path

import pytest

MODULES = {"nanoGPT": "model", "nanochat": "nanochat"}  # what a program's own modules are called


def cloned(program: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a checkout, whose modules a test can import and that are forgotten afterwards."""
    variable = f"NARROWGAUGE_{program.upper()}"
    if not (folder := os.environ.get(variable)):
        pytest.skip(f"{variable} names no checkout")
    path = Path(folder).resolve()
    monkeypatch.syspath_prepend(str(path))
    for name in [name for name in sys.modules if name.split(".")[0] == MODULES[program]]:
        monkeypatch.delitem(sys.modules, name)
    return path
