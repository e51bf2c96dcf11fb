"""What the README shows is what happens: its code blocks are run, its tables are compared with the house."""

import contextlib
import io
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import narrowgauge as ng
from fenced import blocks, shell_lines
from narrowgauge.recipes import parse_recipe
from narrowgauge.training import make_config

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SMALL = "--model.layers 1 --model.dim 64 --model.ffn_dim 64 --data.sequence_length 32 --training.batch_size 1"


def test_make_targets_exist():
    targets = [words[1:] for words in shell_lines(README) if words[0] == "make"]
    assert ["train"] in targets
    assert ["test"] in targets
    for target in [*targets, ["bench"], ["check"], ["test-slow"]]:
        subprocess.run(["make", "-n", *target], cwd=ROOT, check=True, capture_output=True)


def test_command_lines_run_as_they_stand(tmp_path, monkeypatch):
    """Only the size of the model and the number of steps are made small."""
    monkeypatch.setenv("NARROWGAUGE_CACHE", str(tmp_path / "cache"))
    lines = [words[1:] for words in shell_lines(README) if words[0] == "narrowgauge"]
    assert {words[0] for words in lines} == {
        *("train", "compare", "sample", "eval", "report", "recipes", "formats", "prepare"),
        *("export", "import", "plan", "convert", "doctor", "launch"),
    }
    make_train = ["train", "--steps", "2"]
    for words in [make_train, *lines]:
        if words[0] in ("train", "compare", "plan"):
            words = [*words, "--training.micro_batch_size", "1", "--steps", "2", *SMALL.split()]
        ended = subprocess.run(
            [sys.executable, "-m", "narrowgauge", *words],
            cwd=tmp_path,
            check=False,
            capture_output=True,
            text=True,
        )
        assert ended.returncode == 0 or words == ["doctor"], ended.stderr  # which may have found something
        assert ended.stderr == ""
        assert ended.stdout


def test_python_prints_what_its_comments_say():
    (block,) = blocks(README, "python")
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(block, {})
    expected = re.findall(r"^print\(.*?\)\s+# (.*)$", block, re.MULTILINE)
    assert said.getvalue().splitlines() == expected


def test_the_configuration_is_one_and_the_recipe_another():
    configuration, recipe = blocks(README, "toml")
    config = make_config(tomllib.loads(configuration))
    assert config.resolved_recipe().casts["wgrad.dy"].rounding == "stochastic"
    assert len(parse_recipe(recipe, "README.toml").rules) == 2


def test_tables_name_what_exists():
    def table(heading: str) -> str:
        return re.split(r"^## ", README.split(f"## {heading}\n")[1], maxsplit=1, flags=re.MULTILINE)[0]

    def first_column(text: str) -> list[str]:
        rows = [row.split("|")[1] for row in text.splitlines() if row.startswith("| ")]
        return re.findall(r"`([^`]+)`", " ".join(rows[1:]))

    assert set(first_column(table("Recipes").split("A recipe of your own")[0])) == set(ng.recipe_names())
    package = ROOT / "src" / "narrowgauge"
    folders = {f"{p.name}/" for p in package.iterdir() if (p / "__init__.py").exists()}
    assert set(first_column(table("The house"))) == folders


@pytest.mark.parametrize("target", re.findall(r"\]\((?!https://)([^)]+)\)", README))
def test_links_lead_somewhere(target):
    assert (ROOT / target).exists()
