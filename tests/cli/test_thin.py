"""The command line holds no computation: a verb reads words, calls a function of a room above, and prints."""

import ast
from pathlib import Path

import pytest

import narrowgauge as ng

VERBS = sorted((Path(ng.__file__).parent / "cli" / "verbs").glob("*.py"))
ARITHMETIC = (ast.Mult, ast.Sub, ast.Pow, ast.FloorDiv, ast.Mod, ast.MatMult)
#: Counts of processes and a unit, which a verb checks before it calls anything.
CHECKED = {
    "launch": {"options.nodes * per_node", "t.batch_size // dims.data", "job.nodes - 1"},
}
ABOUT_DEVICES = {"torch.device", "torch.cuda.is_available"}


def is_literal(node):
    return isinstance(node.left, ast.Constant) and isinstance(node.right, ast.Constant)


def computations(tree):
    """The arithmetic and the loops of a module that are more than words."""
    found = {
        ast.unparse(node)
        for node in ast.walk(tree)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ARITHMETIC) and not is_literal(node)
    }
    return found | {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.While)}


@pytest.mark.parametrize("path", VERBS, ids=lambda path: path.stem)
def test_a_verb_computes_nothing(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert computations(tree) == CHECKED.get(path.stem, set())
    called = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    assert not {name for name in called if name.startswith(("torch.", "np.", "numpy."))} - ABOUT_DEVICES


def test_a_computation_would_be_found():
    assert computations(ast.parse("gap = 100 * (loss / reference - 1)\nlimit = 2**24")) == {
        "100 * (loss / reference - 1)",
        "loss / reference - 1",
    }
