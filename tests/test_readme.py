"""What the README and the pages about topics show is what happens: code is run, tables are compared."""

import contextlib
import io
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import narrowgauge as ng
from narrowgauge.models import model_names
from narrowgauge.recipes import parse_recipe
from narrowgauge.training import make_config
from support.markdown import blocks, shell_lines, titled
from support.other_tools import write_files

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
TOPICS = ("recipes", "data", "models", "gauges", "run-directory", "plan", "launch", "which-number-hurts")
TOPICS += ("how-to/my-run-diverged",)
PAGES = {"README.md": README} | {
    f"docs/{name}.md": (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8") for name in TOPICS
}
SMALL = "--model.layers 1 --model.dim 64 --model.heads 2 --model.kv_heads 1 --model.ffn_dim 64"
SMALL += " --data.sequence_length 32 --training.batch_size 1"


def test_make_targets_exist():
    targets = [words[1:] for words in shell_lines(README) if words[0] == "make"]
    assert ["train"] in targets
    assert ["test"] in targets
    for target in [*targets, ["bench"], ["check"], ["test-thorough"]]:
        subprocess.run(["make", "-n", *target], cwd=ROOT, check=True, capture_output=True)


def commands(text: str) -> list[list[str]]:
    """The words of each line of `narrowgauge` in the `sh` blocks."""
    return [words[1:] for words in shell_lines(text) if words[0] == "narrowgauge"]


def test_every_verb_is_shown():
    assert {words[0] for page in PAGES.values() for words in commands(page)} == {
        *("train", "compare", "sample", "eval", "report", "recipes", "formats", "prepare"),
        *("runs", "watch", "models"),
        *("export", "import", "plan", "advise", "doctor", "launch"),
        *("probe", "sensitivity", "search"),
    }


@pytest.mark.tier("thorough")  # below, commands run in forked processes
def test_the_first_line_runs_in_a_process_of_its_own(tmp_path):
    """What `make train` starts, as Python starts it; on a text that is small as well."""
    words = ["train", "--steps", "1", *SMALL.split()]
    text = ["--data", str(ROOT / "docs" / "*.md"), "--data.tokenizer", "bytes"]
    command = [sys.executable, "-m", "narrowgauge", *words, *text]
    ended = subprocess.run(command, cwd=tmp_path, check=False, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout


@pytest.fixture(scope="module")
def run(narrowgauge, tmp_path_factory):
    """Runs `narrowgauge` in a folder that has what `make train` leaves behind."""
    folder = tmp_path_factory.mktemp("reader")

    def run(words):
        if words == ["train"]:  # whose name would say what is small
            words = ["train", "--out", "runs/debug-stdlib-fp8"]
        if words[0] in ("train", "compare", "plan"):
            words = [*words, "--steps", "4" if "--branch" in words else "2", *SMALL.split()]
        if words[0] == "watch" and "--once" not in words:  # serves until it is stopped
            words = [*words, "--once", "page.html"]
        if words[0] == "search":  # the head is nine tenths of so small a model
            words = [*words, "--keep", ""]
        ended = narrowgauge(*words, folder=folder, NARROWGAUGE_CACHE=str(folder / "cache"))
        assert ended.code == 0 or words == ["doctor"], ended.err  # which may have found something
        assert ended.err == ""
        assert ended.out

    run.folder = folder
    write_files(folder)
    run(["train"])
    return run


@pytest.mark.tier("thorough")  # each verb has its own test
@pytest.mark.parametrize("page", PAGES)
def test_command_lines_run_as_they_stand(page, run):
    """Only the size of the model and the number of steps are made small."""
    for name, text in titled(PAGES[page]).items():
        (run.folder / name).write_text(text, encoding="utf-8")
    for words in commands(PAGES[page]):
        if "--cluster" not in words:  # of hundreds of devices; `test_docs` reads that line
            run(words)


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(PAGES[page], "python")])
def test_python_prints_what_its_comments_say(page):
    for block in blocks(PAGES[page], "python"):
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            exec(block, {})
        expected = re.findall(r"^print\(.*?\)\s+# (.*)$", block, re.MULTILINE)
        assert said.getvalue().splitlines() == expected


def test_the_configuration_is_one_and_the_recipe_another():
    (configuration,) = blocks(README, "toml")
    recipe, attention, channels = blocks(PAGES["docs/recipes.md"], "toml")
    config = make_config(tomllib.loads(configuration))
    assert config.spec.recipe.casts["wgrad.dy"].rounding.mode == "stochastic"
    assert len(parse_recipe(recipe, "README.toml").rules) == 2
    assert parse_recipe(attention, "attention.toml").narrows_attention
    assert parse_recipe(channels, "channels.toml").casts["fprop.x"].channels.share == 0.1


def first_column(text: str) -> list[str]:
    """What stands in `code` in the first column of the tables of a text, below their headings."""
    rows = [row.split("|")[1] for row in text.splitlines() if row.startswith("| ")]
    return re.findall(r"`([^`]+)`", " ".join(rows[1:]))


def section(text: str, heading: str) -> str:
    return re.split(r"^## ", text.split(f"## {heading}\n")[1], maxsplit=1, flags=re.MULTILINE)[0]


def test_the_tables_of_recipes_name_all_of_them():
    page = PAGES["docs/recipes.md"]
    named = [*first_column(section(page, "Recipes for the matmuls"))]
    named += first_column(section(page, "Recipes for the state"))
    assert sorted(named) == sorted(ng.recipe_names())


def test_the_table_of_models_names_what_exists():
    table = section(PAGES["docs/models.md"], "Named models")
    assert set(first_column(table)) <= set(model_names())


def test_the_table_of_rooms_is_the_package():
    page = (ROOT / "docs" / "reading-order.md").read_text(encoding="utf-8")
    package = ROOT / "src" / "narrowgauge"
    folders = {f"{p.name}/" for p in package.iterdir() if (p / "__init__.py").exists()}
    assert set(first_column(section(page, "The rooms"))) == folders


def test_the_readme_is_short():
    assert len(README.splitlines()) <= 300


@pytest.mark.parametrize("target", re.findall(r"\]\((?!https://)([^)#]+)(?:#[^)]*)?\)", README))
def test_links_lead_somewhere(target):
    assert (ROOT / target).exists()
