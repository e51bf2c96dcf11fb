"""What the command imports for an answer: torch where a verb computes, and no verb but the one asked for."""

import json
import subprocess
import sys

import pytest

from narrowgauge.cli.options import OPTIONS
from narrowgauge.cli.parsing.verbs import VERBS

MODULES = """
import contextlib, io, json, sys
from narrowgauge.cli.main import main
with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
    if sys.argv[1:]:
        try:
            main(sys.argv[1:])
        except SystemExit:
            pass
print(json.dumps(sorted(sys.modules)))
"""
#: The verbs that compute with torch on every line.
WITH_TORCH = {
    *("train", "compare", "plan", "bench", "scaling", "sample", "eval", "advise"),
    *("export", "import", "served", "probe", "sensitivity", "search", "launch"),
}


def modules_of(folder, *words):
    """The modules that a process has imported at the end of a line."""
    ended = subprocess.run(
        [sys.executable, "-c", MODULES, *words], check=True, capture_output=True, text=True, cwd=folder
    )
    return set(json.loads(ended.stdout))


def verbs_in(modules):
    found = {name.removeprefix("narrowgauge.cli.verbs.") for name in modules if ".cli.verbs." in name}
    return found


def test_the_list_of_verbs_with_torch_is_exact():
    assert {name for name, verb in VERBS.items() if verb.has_torch} == WITH_TORCH


def test_every_verb_has_options_and_an_action():
    assert sorted(OPTIONS) == sorted(VERBS)
    for verb in VERBS.values():
        assert callable(verb.load())


@pytest.mark.tier("thorough")
def test_the_command_imports_no_verb_and_no_torch(tmp_path):
    for words in ([], ["--help"], ["trian"], ["train", "--help"], ["train", "--stpes", "5"]):
        modules = modules_of(tmp_path, *words)
        assert verbs_in(modules) == set(), words
        assert "torch" not in modules, words


@pytest.mark.tier("thorough", keep=("recipes mxfp4", "runs"))
@pytest.mark.parametrize(
    ("line", "verb"),
    [
        ("formats", "recipes"),
        ("models", "recipes"),
        ("recipes mxfp4", "recipes"),
        ("recipes mxfp4 --diff mxfp8", "recipes"),
        ("runs", "runs"),
        ("doctor --json", "doctor"),
    ],
)
def test_what_takes_no_torch_imports_its_own_verb_alone(tmp_path, line, verb):
    modules = modules_of(tmp_path, *line.split())
    assert verbs_in(modules) == {verb}
    assert "torch" not in modules


@pytest.mark.tier("thorough")
def test_the_report_of_a_run_needs_no_torch(tmp_path, finished):
    modules = modules_of(tmp_path, "report", str(finished), "--out", str(tmp_path / "page.html"))
    assert (tmp_path / "page.html").exists()
    assert verbs_in(modules) == {"runs"}
    assert "torch" not in modules


def test_tables_import_neither_the_configuration_nor_numpy(tmp_path):
    modules = modules_of(tmp_path, "formats")
    assert not {"numpy", "pydantic", "narrowgauge.training.config.schema"} & modules


@pytest.mark.tier("thorough")
def test_a_verb_that_computes_imports_no_other_verb(tmp_path):
    assert verbs_in(modules_of(tmp_path, "eval", "nothing")) == {"models"}


@pytest.mark.tier("thorough")
@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("advise --model gpt2-124m --cluster 40900", "unknown cluster '40900'; the nearest is 'rtx4090'"),
        ("advise --model gtp2-124m --cluster rtx4090", "unknown model 'gtp2-124m'"),
        ("train --data /nope", "data source '/nope' does not exist: there is no '/nope'"),
        ("scaling --data .", "data source '.' leads to no file that can be read"),
        ("prepare /nope --out x", "data source '/nope' does not exist: there is no '/nope'"),
        ("plan --cluster h1000", "unknown cluster 'h1000'; the nearest is 'h100'"),
    ],
)
def test_a_wrong_name_is_refused_before_torch_is_imported(tmp_path, line, sentence):
    words = line.split()
    assert "torch" not in modules_of(tmp_path, *words)
    ended = subprocess.run(
        [sys.executable, "-m", "narrowgauge", *words], capture_output=True, text=True, cwd=tmp_path
    )
    assert ended.returncode == 2
    assert sentence in ended.stderr
    assert len(ended.stderr.splitlines()) == 1
