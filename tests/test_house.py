"""The rules of the house: rooms import only rooms above them, and the public surface is what is listed."""

import ast
import re
from pathlib import Path

import pytest

import narrowgauge as ng

ROOT = Path(ng.__file__).parent
ROOMS = (
    "errors",
    "signals",
    "units",
    "files",
    "toml_text",
    "torch_compat",
    "collectives",
    "formats",
    "quantization",
    "kernels",
    "recipes",
    "nn",
    "optim",
    "models",
    "data",
    "distributed",
    "checkpoint",
    "training",
    "report",
    "bench",
    "cluster",
    "cli",
)
FILES = sorted(ROOT.rglob("*.py"))


def room_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported_rooms(path: Path) -> set[str]:
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            names = [node.module or ""]
        rooms |= {n.split(".")[1] for n in names if n.startswith("narrowgauge.")}
    return rooms


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_file_imports_only_its_own_room_and_those_above(path):
    room = room_of(path)
    if room in ("__init__", "__main__"):
        return
    assert room in ROOMS, f"{room} has no place in the house: add it to the list, with its question"
    allowed = set(ROOMS[: ROOMS.index(room) + 1])
    assert imported_rooms(path) <= allowed


def test_models_know_nothing_of_recipes():
    numbers = {"formats", "quantization", "recipes", "nn"}
    for path in (ROOT / "models").glob("*.py"):
        assert not imported_rooms(path) & numbers, path


def test_every_public_name_exists_and_is_documented():
    for name in ng.__all__:
        assert getattr(ng, name).__doc__, name


def test_nothing_read_from_a_file_can_be_executed():
    for path in FILES:
        source = path.read_text(encoding="utf-8")
        for word in ("import pickle", "torch.load", "eval(", "exec(", "allow_pickle"):
            found = f"\n{word}" in source or f" {word}" in source
            assert not found, f"{path}: {word}"


# Private attributes of torch's objects, which a class of ours could have by the same name on itself.
OF_TORCH = {"_base", "_cdata", "_local_tensor", "_parameters", "_schema", "_type", "_version", "unbox"}
RENAMED = {"all_gather_into_tensor", "reduce_scatter_tensor"}
# Private in name only (os._exit, named tuples, an operator of ATen), and argparse's.
OF_OTHERS = {"_exit", "_replace", "_asdict", "_to_copy", "_actions", "_option_string_actions"}


def dotted(node: ast.expr) -> str:
    """`torch._C.name` as text; "" for what is no chain of names."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (before := dotted(node.value)):
        return f"{before}.{node.attr}"
    return ""


def private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def private_names_of_torch(tree: ast.Module, ours: set[str]) -> set[str]:
    """What a file uses of torch that is private, or that torch has renamed."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {a.name for a in node.names if a.name.startswith("torch") and private(a.name)}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            names = {f"{node.module}.{a.name}" for a in node.names}
            found |= {n for n in names if private(n) or n.endswith("scaled_mm")}
        elif isinstance(node, ast.Attribute) and is_of_torch(node, ours):
            found.add(dotted(node) or node.attr)
        elif isinstance(node, ast.Constant) and re.fullmatch(r"torch(\.\w+)*\._\S*", str(node.value)):
            found.add(node.value)
    return found


def is_of_torch(node: ast.Attribute, ours: set[str]) -> bool:
    owner, name = dotted(node.value), node.attr
    if owner.startswith("torch") and private(dotted(node)):
        return True
    if owner in ("self", "cls"):
        return False
    is_private = private(name) and name not in ours | OF_OTHERS
    return is_private or name in OF_TORCH or name in RENAMED


def names_we_define(tree: ast.Module) -> set[str]:
    names = {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    stored = [n for n in ast.walk(tree) if isinstance(getattr(n, "ctx", None), ast.Store)]
    names |= {n.attr for n in stored if isinstance(n, ast.Attribute)}
    return names | {n.id for n in stored if isinstance(n, ast.Name)}


def test_private_names_of_torch_stand_in_one_file():
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in FILES}
    ours = set().union(*map(names_we_define, trees.values()))
    for path, tree in trees.items():
        found = private_names_of_torch(tree, ours)
        assert bool(found) == (path.name == "torch_compat.py"), f"{path}: {found} belong in torch_compat.py"


@pytest.mark.parametrize(
    "line",
    [
        "import torch.utils._pytree",
        "from torch.utils._pytree import tree_map",
        "from torch.nn.functional import scaled_mm",
        "torch._C._current_graph_task_id()",
        "x = t._local_tensor",
        "grid._flatten('name')",
        "dist.all_gather_into_tensor(a, b)",
        "import_module('torch.testing._internal.distributed.fake_pg')",
    ],
)
def test_a_private_name_of_torch_is_found(line):
    assert private_names_of_torch(ast.parse(line), set())


def test_no_file_is_longer_than_it_may_be():
    for path in FILES:
        assert len(path.read_text(encoding="utf-8").splitlines()) <= 400, path
