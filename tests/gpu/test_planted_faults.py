"""A case that fails, ends its process or hangs costs itself alone, and stands on the page."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ADVICE = "read the failure: the comparison itself is wrong"
HERE = Path(__file__).parent


PLANTED = """
import os, time
import pytest

ADVICE, MOST_S = "use another one", 2


def test_differs():
    assert not "3 of 4 <values> are wrong"


def test_ends():
    os._exit(9)


def test_hangs():
    time.sleep(600)


def test_elsewhere():
    pytest.skip("it takes a GPU")


def test_last(record_property):
    record_property("found", "nearly the same")
"""


@pytest.mark.tier("thorough")  # real processes
def test_a_case_that_breaks_its_process_stops_no_other(tmp_path):
    """By the command of `make gpu`, and the page that it makes."""
    for name in ("conftest.py", "test_machine.py"):
        (tmp_path / name).write_text((HERE / name).read_text())
    (tmp_path / "test_some.py").write_text(PLANTED)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    makefile = (HERE.parents[1] / "Makefile").read_text()
    line = next(line for line in makefile.splitlines() if "--junitxml=gpu.xml" in line)
    words = line.replace("$(ARGS)", "").replace("tests/gpu", ".").partition("-m pytest")[2].split()
    command = [sys.executable, "-m", "pytest", *(word.strip("'") for word in words)]
    ended = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 1, ended.stdout
    page = [sys.executable, HERE / "page.py", "gpu.xml", "gpu.md"]
    assert subprocess.run(page, cwd=tmp_path, capture_output=True, check=False).returncode == 1
    found = (tmp_path / "gpu.md").read_text()
    assert ": 2 of 5 cases passed, 1 take another machine\n" in found, found
    assert f"- torch: {torch.__version__}\n" in found
    for name in ("differs", "ends", "hangs"):
        assert f"## test_some: test_{name} failed" in found, found
    for words in ("3 of 4 <values> are wrong", "use another one", "it takes a GPU", "nearly the same"):
        assert words in found, found
