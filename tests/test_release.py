"""What a release is made of: every file in the wheel, one version, workflows whose steps exist."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml

import narrowgauge as ng
import versions
import workflows
from narrowgauge.trainer.cluster.doctor.facts import LIMITS, release

ROOT = Path(__file__).parents[1]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = SETTINGS["project"]
PACKAGE = Path(ng.__file__).parent
ENDS = "c h csv json toml css jinja js typed"
WORKFLOWS = sorted(path.stem for path in (ROOT / ".github" / "workflows").glob("*.yml"))


def read(path):
    return yaml.safe_load((ROOT / path).read_text(encoding="utf-8"))


def test_every_data_file_is_in_the_wheel():
    patterns = SETTINGS["tool"]["setuptools"]["package-data"]["narrowgauge"]
    shipped = {path for pattern in patterns for path in PACKAGE.glob(pattern)}
    data = {p for p in PACKAGE.rglob("*") if p.is_file() and p.suffix not in (".py", ".pyc")}
    assert data == shipped
    assert {p.suffix for p in data} == {f".{end}" for end in ENDS.split()}


def test_every_file_has_the_version_of_the_package():
    assert SETTINGS["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "narrowgauge.__version__"}
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    version, date = re.search(r"^## \[([\d.]+)\] - (\S+)", changes, re.MULTILINE).groups()
    citation = read("CITATION.cff")
    assert (citation["version"], str(citation["date-released"])) == (version, date)
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
    assert citation["license"] == PROJECT["license"]
    assert read("release/recipe.yaml")["context"]["version"] == ng.__version__ == version


def test_the_doctor_and_the_conda_recipe_want_what_the_package_needs():
    needed = dict(line.split(">=") for line in PROJECT["dependencies"])
    assert LIMITS["version"]["torch"] == release(needed["torch"])
    assert LIMITS["packages"] == {n: release(version) for n, version in needed.items() if n != "torch"}
    assert release(PROJECT["requires-python"]) == LIMITS["version"]["python"]
    run = set(read("release/recipe.yaml")["requirements"]["run"])
    lines = {line.replace("torch>", "pytorch>").replace(">=", " >=") for line in PROJECT["dependencies"]}
    assert run - {f"python {PROJECT['requires-python']}"} == lines


def test_the_locked_versions_have_hashes_and_no_address():
    text = (ROOT / "release" / "requirements.txt").read_text(encoding="utf-8")
    locked = set(re.findall(r"^([\w-]+)==", text, re.MULTILINE))
    assert {re.split(r"[><=]", line)[0] for line in PROJECT["dependencies"]} <= locked
    assert "://" not in text
    for block in re.split(r"\n(?=\w)", text.strip()):
        assert "--hash=sha256:" in block, block[:60]


@pytest.mark.parametrize("name", WORKFLOWS)
def test_a_workflow_runs_targets_of_make_and_takes_actions_by_their_commits(name):
    """A tag can be moved to other code; the comment states which release the commit is."""
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    commands = [workflows.fill(s["run"], values) for _, values, s in workflows.steps(name) if "run" in s]
    assert commands
    for command in commands:
        make, target, *assignments = command.split()
        assert (make, target in targets) == ("make", True)
        assert all(re.fullmatch(r"[A-Z]+=\S+", word) for word in assignments), command
    used = re.findall(r"uses: (.*)", (ROOT / ".github" / "workflows" / f"{name}.yml").read_text())
    assert used
    for action in used:
        assert re.fullmatch(r"actions/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", action), action


def test_the_tests_run_on_every_python_and_torch_that_are_promised():
    (job,) = workflows.load("tests")["jobs"].values()
    found = workflows.combinations(job)
    promised = re.findall(r":: (3\.\d+)$", "\n".join(PROJECT["classifiers"]), re.MULTILINE)
    assert {values["python"] for values in found} == set(promised)
    minors = sorted({tuple(map(int, values["torch"].split(".")[:2])) for values in found})
    lowest = next(line for line in PROJECT["dependencies"] if line.startswith("torch>="))
    assert minors[0] == tuple(map(int, lowest.removeprefix("torch>=").split(".")))
    assert len(minors) == minors[-1][1] - minors[0][1] + 1


def test_pages_that_are_made_of_rows_are_what_the_rows_make():
    assert versions.PAGE.read_text(encoding="utf-8") == versions.page(versions.read())
