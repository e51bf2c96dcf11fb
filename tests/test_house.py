"""The rules of the house: what may import what, what is public, whose private names are used, and lengths."""

import ast
import re
import sys
import tomllib
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

import narrowgauge as ng

ROOT = Path(ng.__file__).parent

# A room may import itself and the rooms above it. The same holds inside a room for the entries that are
# listed: its modules and sub-packages, from the ground up. Those that are not listed make no circle.
ORDER = [
    *("errors", "operating_system", "lazy", "signals", "processes", "units", "once"),
    *("t_interval", "files", "result", "json_lines", "toml_text", "torch_compat", "second_derivative"),
    *("devices", "collectives", "formats", "quantization", "kernels", "recipes", "exchange", "forecast"),
    *("conformance", "nn", "optim", "guard", "models", "data", "distributed", "checkpoint", "training"),
    *("simulate", "runs", "analysis", "report", "bench", "experiment", "cluster", "laboratory"),
    *("integrations", "cli"),
]
ENTRIES: dict[str, tuple[str, ...]] = {
    "quantization": ("cast", "blocks", "scales", "sharding", "context", "quantize", "state", "gauges"),
    "kernels": ("amax", "triton"),
    "forecast": (
        *("atlas", "noise", "setting", "parts", "curve", "law", "fit"),
        *("support", "published", "hints", "forecast", "svg", "picture", "result"),
    ),
    "nn": ("gemm", "weight", "operands", "linear_function", "fused", "linear", "convert"),
    "guard": ("raises", "broken_place", "guard"),
    "data": ("sources", "tokenization", "token_files", "corpus", "preparation", "loading"),
    "distributed": (
        *("launch", "process_group", "mesh", "quantized_reduce", "fsdp"),
        *("data_parallel", "pipeline", "parallel"),
    ),
    "checkpoint": ("store", "interop"),
    "training": ("outline", "plan", "config", "step"),
    "runs": ("monitor", "run_directory", "use", "loop"),
    "report": ("read", "verdict", "table", "page"),
    "cluster": ("plan", "launch", "doctor", "scaling"),
    "laboratory": ("chart", "arguments", "subject", "watch", "advise"),
}
FILES = sorted(ROOT.rglob("*.py"))


def module_of(path: Path) -> str:
    """The dotted name below `narrowgauge`; that of a package is its folder's."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix("__init__").rstrip(".")


MODULES = {module_of(path): path for path in FILES}


@cache  # not while tests are collected: each worker collects all
def tree_of(path: Path) -> ast.Module:
    """A file's source, parsed."""
    return ast.parse(path.read_text(encoding="utf-8"))


def imports_of(path: Path) -> list[tuple[str, str]]:
    """(module below `narrowgauge`, name) of each import."""
    found = []
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            found += [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            found += [(node.module or "", alias.name) for alias in node.names]
    return [
        (m.removeprefix("narrowgauge").lstrip("."), n) for m, n in found if m.split(".")[0] == "narrowgauge"
    ]


@cache
def all_imports() -> dict[str, list[tuple[str, str]]]:
    """The imports of each module."""
    return {module: imports_of(path) for module, path in MODULES.items()}


def defined_in(module: str, name: str) -> str:
    """The module that an import leads to, through what packages hand on."""
    path = MODULES[module]
    if path.name != "__init__.py":
        return module
    for source, handed_on in all_imports()[module]:
        if handed_on == name:
            return defined_in(source, name) if f"{source}.{name}" not in MODULES else f"{source}.{name}"
    inner = f"{module}.{name}".lstrip(".")
    return inner if inner in MODULES else module


def room_of(module: str) -> str:
    """The room that a module belongs to; rooms lie in the package, in `system` and in `trainer`."""
    return re.sub(r"^(system|trainer)\.", "", module).split(".")[0]


def entry_of(module: str) -> str:
    """The entry of its room that a module belongs to."""
    return [*re.sub(r"^(system|trainer)\.", "", module).split("."), ""][1]


def imports_from_below() -> list[str]:
    """The imports of what stands below, as sentences."""
    found = []
    for module, imports in all_imports().items():
        if module in ("", "__main__", "system", "trainer"):
            continue
        room = room_of(module)
        assert room in ORDER, f"{room} has no place in the house: add it to the list, with its question"
        above, entries = ORDER[: ORDER.index(room)], ENTRIES.get(room, ())
        is_package = MODULES[module].name == "__init__.py" and not entry_of(module)
        for source, name in imports:
            target = defined_in(source, name)
            if (target, name) == ("", ""):
                continue  # the package itself, for its version
            ends = entry_of(target), entry_of(module)
            if room_of(target) != room:
                is_above = room_of(target) in above
            else:
                is_above = is_package or not {*ends} <= {*entries}
                is_above = is_above or entries.index(ends[0]) <= entries.index(ends[1])
            if not is_above:
                found.append(f"{module} imports {target}, which stands below it")
    return found


@pytest.fixture(scope="module", autouse=True)
def _parsed():
    """All sources, parsed before any test pays for it."""
    all_imports()


def test_a_file_imports_only_what_stands_above_it():
    assert not imports_from_below()


def test_sub_packages_make_no_circle():
    """No entry of a room, a module or a sub-package, needs itself by way of others."""
    needs: dict[str, set[str]] = {}
    for module in MODULES:
        if not entry_of(module):
            continue
        node = f"{room_of(module)}.{entry_of(module)}"
        found = [defined_in(*one) for one in all_imports()[module]]
        targets = {f"{room_of(target)}.{entry_of(target)}" for target in found if entry_of(target)}
        needs.setdefault(node, set()).update(targets - {node})
    done: set[str] = set()

    def visit(node: str, path: tuple[str, ...]) -> None:
        assert node not in path, " -> ".join((*path[path.index(node) :], node))
        if node not in done:
            for other in sorted(needs.get(node, ())):
                visit(other, (*path, node))
            done.add(node)

    for node in sorted(needs):
        visit(node, ())


def reached_from(module: str) -> set[str]:
    """A module and all that it imports by way of others, also within functions, with the packages above."""
    found: set[str] = set()
    left = [module]
    while left:
        one = left.pop()
        if one in found:
            continue
        found.add(one)
        left += [one[:i] for i, letter in enumerate(one) if letter == "."]
        if "import_on_use" not in MODULES[one].read_text(encoding="utf-8"):  # else each name leads to its own
            left += [defined_in(*source_and_name) for source_and_name in all_imports()[one]]
    return found


MATH = ("formats", "quantization", "kernels", "recipes", "nn", "optim", "guard", "integrations")
RUN = {"data", "checkpoint", "training", "runs"}


def third_parties_of(tree: ast.Module) -> set[str]:
    """What a file imports of others as soon as it is imported."""
    outer = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    names = [n.module or "" if isinstance(n, ast.ImportFrom) else n.names[0].name for n in outer]
    return {name.split(".")[0] for name in names} - {*sys.stdlib_module_names, "narrowgauge"}


def test_the_library_needs_torch_and_numpy_and_nothing_of_the_trainer():
    """What other trainers bring (`integrations`), and Triton's language, are imported where they are."""
    for module, imports in all_imports().items():
        if module.split(".")[0] not in ("", "__main__", "trainer"):
            sources = {defined_in(*one).split(".")[0] for one in imports}
            assert not sources & {"trainer"}, module
            theirs = {"triton"} if module.startswith("kernels.triton") else set()
            if not module.startswith("integrations"):
                assert third_parties_of(tree_of(MODULES[module])) <= {"torch", "numpy"} | theirs, module


def test_what_other_trainers_import_reaches_no_configuration_data_checkpoint_or_run():
    """And models know nothing of recipes."""
    for module, imports in all_imports().items():
        if room_of(module) in MATH:
            reached = sorted(m for m in reached_from(module) if room_of(m) in RUN)
            assert not reached, f"{module} reaches {reached[0]}"
        if room_of(module) == "models":
            numbers = {"formats", "quantization", "recipes", "nn"}
            assert not {room_of(source) for source, _ in imports} & numbers, module


def test_no_folder_holds_more_than_sixteen_entries():
    for folder in {path.parent for path in FILES}:
        entries = [p for p in folder.iterdir() if p.suffix == ".py" or (p / "__init__.py").exists()]
        assert len([p for p in entries if not p.name.startswith("__")]) <= 16, folder


@pytest.mark.tier("thorough")  # imports everything
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
# Private in name only (os._exit, named tuples, an operator of ATen), argparse's, and of a pool of processes.
OF_OTHERS = {"_exit", "_replace", "_asdict", "_to_copy", "_actions", "_option_string_actions"}
OF_OTHERS |= {"_processes", "_call_queue", "_reader"}


def dotted(node: ast.expr) -> str:
    """`torch._C.name` as text; "" for anything but a chain of names."""
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
        elif isinstance(node, ast.Attribute):
            name, owner = dotted(node), dotted(node.value)
            is_own = owner in ("self", "cls")
            if owner.startswith("torch") and private(name):
                found.add(name)
            elif (
                (node.attr in OF_TORCH and not is_own)
                or (private(node.attr) and not is_own and node.attr not in ours | OF_OTHERS)
                or node.attr in ("all_gather_into_tensor", "reduce_scatter_tensor")
            ):
                found.add(node.attr)
        elif isinstance(node, ast.Constant) and re.match(r"torch\.\S+$", str(node.value)):
            found |= {node.value} if private(node.value) else set()
    return found


def names_we_define(tree: ast.Module) -> set[str]:
    names = {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    stored = [n for n in ast.walk(tree) if isinstance(getattr(n, "ctx", None), ast.Store)]
    names |= {n.attr for n in stored if isinstance(n, ast.Attribute)}
    return names | {n.id for n in stored if isinstance(n, ast.Name)}


@pytest.mark.tier("thorough")  # walks all sources
def test_private_names_of_torch_stand_in_one_file():
    ours = set().union(*(names_we_define(tree_of(path)) for path in FILES))
    for path in FILES:
        found = private_names_of_torch(tree_of(path), ours)
        assert bool(found) == (path.name == "torch_compat.py"), f"{path}: {found} belong in torch_compat.py"


FILE_LINES, FUNCTION_LINES = 500, 80  # the limits that CONTRIBUTING states


def test_files_and_functions_stay_within_the_limits_that_contributing_states():
    stated = (ROOT.parents[1] / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert f"Files under {FILE_LINES} lines, functions under {FUNCTION_LINES}" in stated
    for path in FILES:
        source = path.read_text(encoding="utf-8")
        assert len(source.splitlines()) <= FILE_LINES, path
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.FunctionDef):
                assert (node.end_lineno or 0) - node.lineno < FUNCTION_LINES, f"{path}: {node.name}"


BUDGETS = Path(__file__).with_name("budgets.toml")
READING_PATH = 9, 1_537, 19  # files, lines, modules that they import beyond each other: only lowered


def lines_of(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def lines_by_room() -> Counter[str]:
    """Lines of code, templates and web files by room, wherever the room lies; `root` is what lies in none."""
    lines: Counter[str] = Counter()
    rooms = set(tomllib.loads(BUDGETS.read_text(encoding="utf-8"))["lines"])
    for path in ROOT.rglob("*"):
        if path.suffix in (".js", ".css", ".html"):
            lines["web"] += lines_of(path)
        elif path.suffix in (".py", ".c", ".h", ".jinja"):
            folders = path.relative_to(ROOT).parts[:-1]
            lines[next((folder for folder in folders if folder in rooms), "root")] += lines_of(path)
    tests = Path(__file__).parent
    return lines + Counter({"tests": sum(map(lines_of, tests.rglob("*.py")))})


def test_no_room_is_above_its_budget_of_lines():
    """A budget is what the room holds, or more; lower it when the room shrinks."""
    budget = tomllib.loads(BUDGETS.read_text(encoding="utf-8"))["lines"]
    lines = lines_by_room()
    print("\n".join(f"{room:12} {lines[room]:7,} of {most:7,}" for room, most in budget.items()))
    assert not {room: (n, budget.get(room)) for room, n in lines.items() if n > budget.get(room, 0)}


def test_the_reading_path_does_not_grow_unnoticed():
    page = (ROOT.parents[1] / "CONTRIBUTING.md").read_text(encoding="utf-8")
    files = [ROOT / name for name in re.findall(r"^\| \d+ \| `(.*?)` \|", page, re.MULTILINE)]
    path = {module_of(file) for file in files}
    names = {(f"{m}.{n}", m) for one in path for m, n in all_imports()[one]}
    beyond = {name if name in MODULES else module for name, module in names} - path
    figures = len(files), sum(map(lines_of, files)), len(beyond)
    assert all(now <= most for now, most in zip(figures, READING_PATH, strict=True)), (figures, beyond)
