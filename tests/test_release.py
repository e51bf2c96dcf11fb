"""What a release is made of: one version, workflows whose steps exist, forms that ask for facts."""

import re
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

import narrowgauge as ng
import versions
import workflows

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
WORKFLOWS = sorted(path.stem for path in (ROOT / ".github" / "workflows").glob("*.yml"))


def read(path):
    return yaml.safe_load((ROOT / path).read_text(encoding="utf-8"))


def test_every_file_has_the_version_of_the_package():
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    released = re.search(r"^## \[([\d.]+)\] - (\S+)", changes, re.MULTILINE)
    citation = read("CITATION.cff")
    assert (citation["version"], str(citation["date-released"])) == (released[1], released[2])
    assert read("release/recipe.yaml")["context"]["version"] == ng.__version__ == released[1]


def test_the_citation_has_what_its_schema_asks_for():
    """The keys that version 1.2.0 of the Citation File Format requires."""
    citation = read("CITATION.cff")
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
    assert citation["cff-version"] == "1.2.0"
    assert citation["license"] == PROJECT["license"]


def test_the_conda_recipe_needs_what_the_package_needs():
    run = read("release/recipe.yaml")["requirements"]["run"]
    needed = {line.replace("torch>", "pytorch>").replace(">=", " >=") for line in PROJECT["dependencies"]}
    assert set(run) - {f"python {PROJECT['requires-python']}"} == needed


@pytest.mark.parametrize("name", WORKFLOWS)
def test_the_steps_of_a_workflow_are_targets_of_make(name):
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    found = [(values, step) for _, values, step in workflows.steps(name)]
    assert any("run" in step for _, step in found)
    for values, step in found:
        if "run" in step:
            command = workflows.fill(step["run"], values)
            make, target, *assignments = command.split()
            assert make == "make"
            assert target in targets
            assert all(re.fullmatch(r"[A-Z]+=\S+", word) for word in assignments), command


@pytest.mark.parametrize("name", WORKFLOWS)
def test_a_workflow_takes_an_action_by_its_commit(name):
    """A tag can be moved to other code; the comment states which release the commit is."""
    text = (ROOT / ".github" / "workflows" / f"{name}.yml").read_text(encoding="utf-8")
    used = re.findall(r"uses: (.*)", text)
    assert used
    for action in used:
        assert re.fullmatch(r"actions/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", action), action


def test_the_tests_run_on_every_python_and_torch_that_are_promised():
    (job,) = workflows.load("tests")["jobs"].values()
    found = workflows.combinations(job)
    classifiers = "\n".join(PROJECT["classifiers"])
    assert {values["python"] for values in found} == set(
        re.findall(r":: (3\.\d+)$", classifiers, re.MULTILINE)
    )
    minors = {tuple(map(int, values["torch"].split(".")[:2])) for values in found}
    lowest = next(line for line in PROJECT["dependencies"] if line.startswith("torch>="))
    assert min(minors) == tuple(map(int, lowest.removeprefix("torch>=").split(".")))
    assert len(minors) == max(minors)[1] - min(minors)[1] + 1


@pytest.mark.parametrize("form", ["bug", "gpu", "feature"])
def test_an_issue_form_asks_for_what_answers_need(form):
    asked = str(read(f".github/ISSUE_TEMPLATE/{form}.yml"))
    assert ("narrowgauge doctor --json" in asked) == (form != "feature")
    assert ("bench --verify" in asked) == (form == "gpu")
    ids = [item["id"] for item in read(f".github/ISSUE_TEMPLATE/{form}.yml")["body"]]
    assert len(ids) == len(set(ids))


def test_the_page_of_versions_is_made_of_its_rows():
    assert versions.PAGE.read_text(encoding="utf-8") == versions.page(versions.read())


def test_a_matrix_is_filled_in_and_its_conditions_are_read():
    job = {"strategy": {"matrix": {"a": ["1", "2"], "b": ["3"], "include": [{"a": "4", "b": "5"}]}}}
    assert workflows.combinations(job) == [{"a": "1", "b": "3"}, {"a": "2", "b": "3"}, {"a": "4", "b": "5"}]
    assert workflows.fill("x ${{ matrix.a }}", {"a": "1"}) == "x 1"
    assert workflows.holds("matrix.a == '1' && matrix.b == '3'", {"a": "1", "b": "3"})
    assert not workflows.holds("matrix.a == '2'", {"a": "1"})
    with pytest.raises(ValueError, match="does not read"):
        workflows.holds("always()", {})


def test_the_locked_versions_have_hashes_and_no_address():
    text = (ROOT / "release" / "requirements.txt").read_text(encoding="utf-8")
    locked = set(re.findall(r"^([\w-]+)==", text, re.MULTILINE))
    assert {re.split(r"[><=]", line)[0] for line in PROJECT["dependencies"]} <= locked
    assert "://" not in text
    for block in re.split(r"\n(?=\w)", text.strip()):
        assert "--hash=sha256:" in block, block[:60]


def test_a_step_takes_nothing_from_the_make_that_runs_the_workflows():
    """`make workflows ARGS=--small` gave --small to the tests of each step, by MAKEFLAGS."""
    assert workflows.clean({"MAKEFLAGS": " -- ARGS=--small", "ARGS": "--small", "HOME": "/"}) == {"HOME": "/"}


def test_an_interpreter_that_does_not_start_is_not_here(tmp_path, monkeypatch):
    shim = tmp_path / "python9.9"
    shim.write_text("#!/bin/sh\nexit 127\n")
    shim.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert not workflows.runs("python9.9")
    assert not workflows.runs("python9.8")
    assert workflows.runs(sys.executable)


def test_the_small_part_of_each_tier_has_tests_of_it():
    assert 'tier("thorough"' in (ROOT / workflows._SMALL["make test-thorough"]).read_text(encoding="utf-8")
    assert (ROOT / workflows._SMALL["make test "]).is_file()


def test_a_result_takes_the_place_of_the_reason_why_there_was_none(tmp_path, monkeypatch):
    monkeypatch.setattr(versions, "ROWS", tmp_path / "versions.csv")
    none = dict.fromkeys(versions.COLUMNS, "")
    versions.keep([none | {"tool": "torch", "version": v, "note": "no wheel"} for v in ("2.12.1", "2.15.0")])
    result = {"tool": "torch", "version": "2.15.0", "torch": "2.15.0", "python": "3.11.7", "passed": "7"}
    rows = versions.keep([none | result])
    assert [(row["version"], row["passed"], row["note"]) for row in rows] == [
        ("2.12.1", "", "no wheel"),
        ("2.15.0", "7", ""),
    ]
