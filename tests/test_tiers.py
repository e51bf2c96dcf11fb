"""The marker `tier` of `support.tiers`: what stays in the quick tier, and names that no parameter has."""

import subprocess
import sys
from pathlib import Path

import pytest

TESTS = """
import pytest

@pytest.mark.tier("thorough")
def test_whole(): pass

@pytest.mark.tier("thorough", keep=2)
@pytest.mark.parametrize("n", [1, 2, 3])
def test_number(n): pass

@pytest.mark.tier("thorough", keep=("fp8", ("bf16", 2)))
@pytest.mark.parametrize(("name", "n"), [("fp8", 1), ("fp8-row", 1), ("bf16", 1), ("bf16", 2)])
def test_names(name, n): pass

@pytest.mark.tier("thorough", keep=1)
@pytest.mark.parametrize("n", [1, pytest.param(2, marks=pytest.mark.tier("faults"))])
def test_the_last_tier_wins(n): pass
"""


@pytest.fixture
def collected(tmp_path):
    """The ids of the tests of a file that `-m` selects, with the exit code and the words of the error."""

    def do(text, selected):
        file = tmp_path / "test_it.py"
        file.write_text(text)
        words = ("-m", "pytest", "--collect-only", "-q", "-p", "support.tiers", "-p", "no:cacheprovider")
        run = subprocess.run(
            [sys.executable, *words, "-c", "/dev/null", "--rootdir", tmp_path, "-m", selected, file],
            capture_output=True,
            text=True,
            check=False,
            env={"PYTHONPATH": str(Path(__file__).parent), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        )
        return [line.partition("::")[2] for line in run.stdout.splitlines() if "::" in line], run

    return do


def test_tier_keeps_a_number_of_parameters_or_the_named_ones(collected):
    ids, _ = collected(TESTS, "not thorough and not faults")
    assert ids == [
        *("test_number[1]", "test_number[2]", "test_names[fp8-1]", "test_names[bf16-2]"),
        "test_the_last_tier_wins[1]",
    ]


def test_tier_that_is_the_last_wins(collected):
    assert collected(TESTS, "faults")[0] == ["test_the_last_tier_wins[2]"]


def test_tier_refuses_a_name_that_no_parameter_has(collected):
    _, run = collected(TESTS.replace('"fp8", (', '"fp7", ('), "thorough")
    assert run.returncode == pytest.ExitCode.USAGE_ERROR
    assert "`keep` names parameters that do not exist: test_it.py::test_names: fp7" in run.stderr + run.stdout
