"""Packages that import on use: what they state for type checkers is what they hand on."""

import ast
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import narrowgauge as ng

ROOT = Path(ng.__file__).parent
PACKAGES = [path for path in sorted(ROOT.rglob("__init__.py")) if "import_on_use(" in path.read_text()]


def test_a_package_hands_on_the_names_that_it_states_for_type_checkers():
    assert len(PACKAGES) >= 15
    for path in PACKAGES:
        package = ".".join(("narrowgauge", *path.parent.relative_to(ROOT).parts))
        (typed,) = (n for n in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(n, ast.If))
        stated = [(node.module, alias) for node in typed.body for alias in node.names]
        handed_on = import_module(package)
        assert sorted(handed_on.__all__) == sorted(alias.name for _, alias in stated)
        for module, alias in stated:
            assert alias.asname == alias.name, "type checkers hand on what is renamed to itself"
            assert getattr(handed_on, alias.name) is getattr(import_module(module), alias.name), alias.name
        assert {*handed_on.__all__, "__name__"} <= set(dir(handed_on))
        with pytest.raises(AttributeError, match=f"module '{package}' has no attribute 'nothing'"):
            handed_on.nothing  # noqa: B018


SNIPPET = """
import narrowgauge as ng
from narrowgauge import nosuch
reveal_type(ng.recipe("fp8"))
reveal_type(ng.quantize)
ng.nosuch
ng.format("e4m3").nosuch
"""


@pytest.mark.tier("thorough")  # mypy reads torch for a minute; the test above compares the names
def test_a_type_checker_knows_every_name_and_no_other_and_accepts_the_examples(tmp_path):
    examples = sorted((ROOT.parents[1] / "examples").glob("*.py"))
    files = [Path(shutil.copy(path, tmp_path)).name for path in examples]
    (tmp_path / "snippet.py").write_text(SNIPPET, encoding="utf-8")
    options = ["--strict", "--allow-untyped-calls", "--no-error-summary", "--hide-error-context"]
    options += ["--cache-dir", "cache"]
    command = [sys.executable, "-m", "mypy", *options, "snippet.py", *files]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    lines = [line.removeprefix("snippet.py:") for line in found.stdout.splitlines()]
    quantize = lines.pop(2)
    assert quantize.startswith('5: note: Revealed type is "def (x: torch._tensor.Tensor, cast: str | ')
    assert quantize.endswith('-> narrowgauge.quantization.quantize.QTensor"')
    assert lines == [
        '3: error: Module "narrowgauge" has no attribute "nosuch"  [attr-defined]',
        '4: note: Revealed type is "narrowgauge.recipes.recipe.Recipe"',
        '6: error: Module has no attribute "nosuch"  [attr-defined]',
        '7: error: "Format" has no attribute "nosuch"  [attr-defined]',
    ], found.stderr
