"""The pages of docs/ say what there is, and each file that a page shows is accepted where it goes."""

import ast
import json
import re
from importlib import import_module
from pathlib import Path

import pytest

import narrowgauge as ng
import start_page
from narrowgauge.cluster import load_site
from narrowgauge.models import model_names
from narrowgauge.recipes import Device, choose_backend
from support.markdown import blocks

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = {str(path.relative_to(DOCS)): path.read_text(encoding="utf-8") for path in DOCS.rglob("*.md")}
PAGES["index.md"] = start_page.text()
ARCHIVE = "lab-log-archive.md"
NOTEBOOK = DOCS / "which-format.ipynb"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder, where a reader pastes the lines."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("page", [page for page in PAGES if page.startswith("how-to/")])
def test_the_files_that_a_page_shows_are_what_it_says(page, folder):
    shown = folder / "shown.toml"
    for block in blocks(PAGES[page], "toml"):
        shown.write_text(block, encoding="utf-8")
        assert load_site(str(shown)) if "devices_per_node" in block else ng.load_recipe(str(shown))
    for block in blocks(PAGES[page], "json"):
        assert json.loads(block)
    for block in blocks(PAGES[page], "python"):
        ast.parse(block)


def test_every_page_is_in_the_navigation():
    listed = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").split("\nnav:\n")[1].split("\n\n")[0]
    nav = re.findall(r"[\w./-]+\.(?:md|ipynb)\b", listed)
    assert sorted(nav) == sorted({*PAGES, NOTEBOOK.name} - {"faults.md"})


@pytest.mark.parametrize("page", PAGES)
def test_links_between_pages_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", PAGES[page]):
        file = (DOCS / page).parent.joinpath(target).resolve()
        assert file.exists() or file == DOCS / "index.md", target
        assert file.is_relative_to(DOCS), f"{target} is no page of the site: write the path in `code`"


#: What pages name and a checkout does not hold: files of a user, of a run, of the examples of CONTRIBUTING.
OF_OTHERS = {
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
    "config.json",
    ".vscode/launch.json",
    "blobs/",
}
OF_A_RUN = {
    "first-day.json",
    "index.json",
    "identity.json",
    "state.json",
    "status.json",
    "scaling.json",
    "probe.json",
    "sensitivity.json",
}
OF_EXAMPLES = {"dist/", "utils.py", "src/narrowgauge/recipes/shipped/mxfp8-e3m4.toml"}


NAMED = [*sorted(PAGES.keys() - {ARCHIVE, "index.md"}), "../README.md", "../CONTRIBUTING.md"]


@pytest.mark.parametrize("page", NAMED)
def test_files_that_a_page_names_exist(page):
    """In `code`: of the package, the checkout, or one of those above; the archive may name lost files."""
    text = (DOCS / page).read_text(encoding="utf-8")
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    for name in re.findall(r"`([\w./-]+(?:\.py|\.toml|\.json|/))`", prose):
        if name in OF_OTHERS | OF_A_RUN | OF_EXAMPLES or name.startswith(("RUN/", "OUT/", "runs/")):
            continue
        assert any((folder / name).exists() for folder in (ROOT, ROOT / "src" / "narrowgauge")), name


def test_a_recorded_stack_is_of_this_code():
    """The files and functions of a stack that a page shows; lines move."""
    frames = re.findall(
        r"^ +([\w.<>]+) \(narrowgauge/([\w/.]+):\d+\)$", PAGES["how-to/debugging.md"], re.MULTILINE
    )
    assert frames
    for function, file in frames:
        source = (ROOT / "src" / "narrowgauge" / file).read_text(encoding="utf-8")
        assert f"def {function.rpartition('.')[2]}(" in source, f"{function} ({file})"


def test_recipes_and_models_that_pages_name_exist():
    """In `code`, whatever begins like a recipe or a model is one."""
    for page, text in PAGES.items():
        if not page.startswith(("how-to/", "index")):
            continue
        prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
        for name in re.findall(r"`((?:msamp-|mxfp|mxint|nvfp|gpt2-|gpt3-|llama3-)[a-z0-9.-]*)`", prose):
            assert name in {*ng.recipe_names(), *model_names()}, f"docs/{page}: {name}"


def test_what_is_native_on_a_4090():
    row = re.search(r"^\| native \| (.*) \|$", PAGES["how-to/fp8-on-a-4090.md"], re.MULTILINE)
    card = Device(maker="nvidia", capability=(8, 9), library=(13, 0))
    native = [name for name in ng.recipe_names() if choose_backend(ng.recipe(name), card).name == "native"]
    assert re.findall(r"`([^`]+)`", row[1]) == native


def test_the_reference_names_what_exists():
    """`::: narrowgauge.room.name` is a public name of that room; where a file has the same name (and would be
    shown in its place), the file stands between them."""
    shown = set()
    for page, text in PAGES.items():
        for path in re.findall(r"^::: narrowgauge\.(\S+)$", text, re.MULTILINE):
            (*module, name), room = path.split("."), path.split(".")[0]
            folder = ROOT / "src" / "narrowgauge"
            package = folder.joinpath(*module).is_dir()
            public = import_module(".".join(("narrowgauge", *module)) if package else f"narrowgauge.{room}")
            assert name in getattr(public, "__all__", ng.__all__), f"docs/{page}: {path}"
            if len(module) > 1:
                file = folder.joinpath(*module)
                file = file / "__init__.py" if package else file.with_suffix(".py")
                assert f"def {name}(" in file.read_text(encoding="utf-8"), f"docs/{page}: {path}"
            else:
                hidden = (folder / room / f"{name}.py").exists() or (folder / room / name).is_dir()
                assert not hidden, f"docs/{page}: {path} is the file"
            shown.add(name)
    assert set(ng.__all__) <= shown


def test_the_notebook_was_executed_from_first_to_last():
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    assert not [o for cell in code for o in cell["outputs"] if o["output_type"] == "error"]
