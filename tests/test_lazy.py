"""Packages that import on use: what they state for type checkers is what they hand on."""

import ast
from importlib import import_module
from pathlib import Path

import pytest

import narrowgauge as ng

ROOT = Path(ng.__file__).parent
PACKAGES = [
    path for path in sorted(ROOT.rglob("__init__.py")) if "import_on_use(" in path.read_text(encoding="utf-8")
]


def test_there_are_some():
    assert {path.parent.name for path in PACKAGES} == {"narrowgauge", "cluster", "distributed"}


@pytest.mark.parametrize("path", PACKAGES, ids=lambda path: path.parent.name)
def test_type_checkers_the_table_and_all_name_the_same(path):
    package = ".".join(("narrowgauge", *path.parent.relative_to(ROOT).parts))
    tree = ast.parse(path.read_text(encoding="utf-8"))
    (typed,) = (node for node in tree.body if isinstance(node, ast.If))
    (call,) = (
        n for n in ast.walk(tree) if isinstance(n, ast.Call) and "import_on_use" in ast.unparse(n.func)
    )
    table = ast.literal_eval(call.args[1])
    stated = {
        (node.module, alias.name)
        for node in typed.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert stated == {(f"{package}.{module}", name) for module, names in table.items() for name in names}
    handed_on = import_module(package)
    assert sorted(handed_on.__all__) == sorted(name for _, name in stated)
    for module, name in stated:
        assert getattr(handed_on, name) is getattr(import_module(module), name), name
    with pytest.raises(AttributeError, match=f"module '{package}' has no attribute 'nothing'"):
        handed_on.nothing  # noqa: B018
