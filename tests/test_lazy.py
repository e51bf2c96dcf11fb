"""Packages that import on use: what they state for type checkers is what they hand on."""

import ast
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
