"""The examples in docstrings are true."""

import doctest
import importlib
import re
from pathlib import Path

import pytest

import narrowgauge as ng

ROOT = Path(ng.__file__).parent
WITH_EXAMPLES = [
    ".".join(["narrowgauge", *path.relative_to(ROOT).with_suffix("").parts]).removesuffix(".__init__")
    for path in sorted(ROOT.rglob("*.py"))
    if re.search(r"^\s*>>> ", path.read_text(encoding="utf-8"), re.MULTILINE)
]


@pytest.mark.parametrize("module", WITH_EXAMPLES)
def test_an_example_says_what_happens(module):
    result = doctest.testmod(importlib.import_module(module))
    assert result.attempted > 0
    assert result.failed == 0
