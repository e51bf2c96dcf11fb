"""The rules of the house: rooms import only rooms above them, and the public surface is what is listed."""

import ast
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


def test_no_file_is_longer_than_it_may_be():
    for path in FILES:
        assert len(path.read_text(encoding="utf-8").splitlines()) <= 400, path
