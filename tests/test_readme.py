"""What pages show is what happens: their commands and programs run, their files are read, their names exist.

`test_command_lines.py` reads every line of every page; here the lines of some pages run to their ends.
"""

import ast
import contextlib
import doctest
import importlib
import io
import json
import re
import tomllib
from pathlib import Path

import pytest
import torch

import narrowgauge as ng
from narrowgauge.recipes import Device, choose_backend, parse_recipe
from narrowgauge.trainer.cluster.launch.site import load_site
from narrowgauge.trainer.models import model_names
from narrowgauge.trainer.training import make_config
from nn import test_own_loop
from nn.own_loop import PAGE as OWN_LOOP
from nn.own_loop import ROWS
from support.markdown import blocks, shell_lines, titled
from support.other_tools import write_files

ROOT = Path(__file__).parents[1]
DOCS, PACKAGE = ROOT / "docs", ROOT / "src" / "narrowgauge"
README = (ROOT / "README.md").read_text(encoding="utf-8")
TOPICS = ("recipes", "data", "models", "runs", "plan", "which-number-hurts", "how-to/troubleshooting")
PAGES = {"README.md": README} | {
    f"docs/{name}.md": (DOCS / f"{name}.md").read_text(encoding="utf-8") for name in TOPICS
}
SMALL = "--model.layers 1 --model.dim 64 --model.heads 2 --model.kv_heads 1 --model.ffn_dim 64"
SMALL += " --data.sequence_length 32 --training.batch_size 1"


def commands(text):
    """The words of each line of `narrowgauge` in the `sh` blocks."""
    return [words[1:] for words in shell_lines(text) if words[0] == "narrowgauge"]


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
            words = [*words, "--once", "--out", "page.html"]
        if words[0] == "search":  # the head is nine tenths of so small a model
            words = [*words, "--keep", "", "--fork-steps", "1", "--fork-seeds", "1"]
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
        if "--cluster" not in words:  # of hundreds of devices; `test_command_lines` reads that line
            run(words)


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(PAGES[page], "python")])
def test_python_prints_what_its_comments_say(page):
    for block in blocks(PAGES[page], "python"):
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            exec(block, {})
        assert said.getvalue().splitlines() == re.findall(r"^print\(.*?\)\s+# (.*)$", block, re.MULTILINE)


def test_the_examples_of_docstrings_say_what_happens():
    for path in sorted(PACKAGE.rglob("*.py")):
        if re.search(r"^\s*>>> ", path.read_text(encoding="utf-8"), re.MULTILINE):
            parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
            result = doctest.testmod(importlib.import_module(".".join(parts).removesuffix(".__init__")))
            assert (result.attempted > 0, result.failed) == (True, 0), path


def test_the_files_that_pages_show_are_what_they_say(tmp_path):
    shown = tmp_path / "shown.toml"
    for page in (DOCS / "how-to").glob("*.md"):
        text = page.read_text(encoding="utf-8")
        for block in blocks(text, "toml"):
            shown.write_text(block, encoding="utf-8")
            assert load_site(str(shown)) if "devices_per_node" in block else ng.load_recipe(str(shown))
        assert all(json.loads(block) for block in blocks(text, "json"))
        assert all(ast.parse(block) for block in blocks(text, "python"))
        prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
        named = set(re.findall(r"`((?:msamp-|mxfp|mxint|nvfp|gpt2-|gpt3-|llama3-)[a-z0-9.-]*)`", prose))
        assert named <= {*ng.recipe_names(), *model_names()}, page
    (configuration,) = blocks(README, "toml")
    recipe, attention, channels = blocks(PAGES["docs/recipes.md"], "toml")
    config = make_config(tomllib.loads(configuration))
    assert config.spec.recipe.casts["wgrad.dy"].rounding == "stochastic"
    assert len(parse_recipe(recipe, "README.toml").rules) == 2
    assert parse_recipe(attention, "attention.toml").narrows_attention
    assert parse_recipe(channels, "channels.toml").casts["fprop.x"].keep_channels == 0.1


def first_column(page, heading):
    """What stands in `code` in the first column of the tables of a section, below their headings."""
    text = (DOCS / page).read_text(encoding="utf-8").split(f"## {heading}\n")[1]
    rows = re.findall(r"^\| ([^|]*)\|", re.split(r"^## ", text, flags=re.MULTILINE)[0], re.MULTILINE)
    return re.findall(r"`([^`]+)`", " ".join(rows[1:]))


def test_tables_name_what_exists_and_links_of_the_readme_lead_somewhere():
    assert set(first_column("models.md", "Named models")) <= set(model_names())
    rooms = {p.parent for at in (PACKAGE, PACKAGE / "trainer") for p in at.glob("*/__init__.py")}
    folders = {f"{p.relative_to(PACKAGE)}/" for p in rooms} - {"trainer/"}
    assert set(first_column("../CONTRIBUTING.md", "The map")) == folders
    for target in re.findall(r"\]\((?!https://)([^)#]+)(?:#[^)]*)?\)", README):
        assert (ROOT / target).exists(), target
    card = (DOCS / "how-to" / "fp8-on-a-4090.md").read_text(encoding="utf-8")
    ada = Device(maker="nvidia", capability=(8, 9), library=(13, 0))
    native = [name for name in ng.recipe_names() if choose_backend(ng.recipe(name), ada).name == "native"]
    assert re.findall(r"`([^`]+)`", re.search(r"^\| native \| (.*) \|$", card, re.MULTILINE)[1]) == native
    listed = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").split("\nnav:\n")[1].split("\n\n")[0]
    pages = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")} - {"faults.md"}
    assert pages <= {*re.findall(r"[\w./-]+\.md\b", listed)}, "a page is in no navigation"


@pytest.mark.tier("thorough")  # trains
def test_fp8_in_100_lines_learns_and_is_what_convert_computes():
    page = (DOCS / "fp8-in-100-lines.md").read_text(encoding="utf-8")
    (source,) = blocks(page, "python")
    assert len(source.splitlines()) <= 100
    names, printed = {}, io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(source, names)
    shown = next(block for block in blocks(page, "text") if block.startswith("step"))
    words = [[word for word in text.split() if "." not in word] for text in (printed.getvalue(), shown)]
    assert words[0] == words[1], "it prints what the page shows, but for the digits"
    for losses in (names["wide"], names["narrow"]):
        assert losses[0] > 5.4  # log 256 is 5.545
        assert sum(losses[-50:]) / 50 < 2.5
    model = names["make_model"](torch.nn.Linear)
    for i in (2, 4):
        model[i] = ng.convert(model[i], "fp8")
    losses = names["train"](model)
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        assert losses == names["narrow"]
    else:  # the package multiplies in fp32 there, and the sums are added up in another order
        assert losses[0] == pytest.approx(names["narrow"][0], rel=1e-4)
        assert sum(losses[-50:]) == pytest.approx(sum(names["narrow"][-50:]), rel=0.02)


#: In distributed/test_fsdp.py, optim/test_loop_state.py and nn/test_huggingface.py.
ELSEWHERE = {
    "`DistributedDataParallel`",
    "`ng.prepare_ddp`, then `DistributedDataParallel`",
    "`fully_shard` (FSDP2)",
    "`ng.fully_shard`",
    "`ng.fully_shard` on the meta device, then `to_empty`",
    "`ng.state_dict`, `ng.load_state_dict`: resume",
    "mixtures of experts of transformers 5 (Mixtral, Qwen3-MoE, gpt-oss and others)",
}


def test_each_row_of_your_own_loop_is_a_test():
    assert test_own_loop
    works, _, table = OWN_LOOP.partition("These work under all of them:")[2].partition("| | GEMMs")
    rows = re.findall(r"^\| (.+?) \|", table.partition("\n\n")[0], re.MULTILINE)
    listed = re.split(r"; |\s*- \*\*.+?\*\*: ", works.strip())[1:]
    rows += [" ".join(re.sub(r" \(\d+\)$", "", one).split()) for one in listed]
    assert sorted(rows) == sorted(ROWS | ELSEWHERE)


@pytest.mark.tier("thorough")
def test_the_program_of_your_own_loop_trains_and_resumes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {}
    for block in blocks(OWN_LOOP, "python")[:2]:
        exec(block, names)
    assert names["losses"][-1] < 0.9 * names["losses"][0]
