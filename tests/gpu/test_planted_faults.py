"""Any difference is found, costs itself alone, and stands on the page; other files plant theirs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gpu.compare import close, near, same

ADVICE = "read the failure: the comparison itself is wrong"
HERE = Path(__file__).parent


def fails(compare, got, expected, **options):
    with pytest.raises(AssertionError) as error:
        compare({"y": got}, {"y": expected}, **options)
    return str(error.value)


def test_bits_are_the_same_or_not():
    x = torch.tensor([1.0, -0.0, float("nan"), 3.0])
    same({"y": x, "z": None}, {"y": x.clone(), "z": None})
    for i, other in enumerate((torch.nextafter(x[0], x[1]), 0.0, 1.0, float("nan"))):
        wrong = x.clone()
        wrong[i] = other
        assert fails(same, wrong, x).startswith("1 of 4 values of y are wrong")
    assert "is missing" in fails(same, None, x)
    assert "torch.float64" in fails(same, x.double(), x)


@pytest.mark.parametrize("wrong", [1.02, 1.5, float("nan"), float("inf")])
def test_sums_may_differ_by_a_rounding_and_no_more(wrong):
    x = torch.randn(100, generator=torch.Generator().manual_seed(0)).bfloat16()
    x[7] = 2.0
    neighbour, off = x.clone(), x.clone()
    neighbour[7], off[7] = 2.0 + 2.0**-6, 2.0 * wrong
    near({"y": neighbour}, {"y": x})
    assert "Mismatched elements: 1 / 100" in fails(near, off, x)
    if wrong != 1.02:
        assert "of its norm" in fails(close, off, x, share=0.01)


PLANTED = '''
import os, time
import pytest

ADVICE, MOST_S = "use another one", 2


def test_agrees():
    """It does."""


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
'''


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
    assert ": 3 of 6 cases passed, 1 take another machine\n" in found, found
    assert f"- torch: {torch.__version__}\n" in found
    for name in ("differs", "ends", "hangs"):
        assert f"## test_some: test_{name} failed" in found, found
    for words in ("3 of 4 <values> are wrong", "use another one", "it takes a GPU", "nearly the same"):
        assert words in found, found
