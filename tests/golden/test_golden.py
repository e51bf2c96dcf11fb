"""Every digit that a run computes today is the digit that it computed when the golden files were made."""

import pytest

from golden import cells
from golden.runs import worker


@pytest.fixture(scope="module")
def pinned(tmp_path_factory):
    with worker(tmp_path_factory.mktemp("golden")) as process:
        yield process


@pytest.fixture(scope="module")
def kept():
    return cells.read(cells.DIGITS)


@pytest.fixture(scope="module")
def bounds():
    return cells.read(cells.BOUNDS)


@pytest.fixture(scope="module")
def other_arithmetic(pinned, kept):
    """The kinds of arithmetic that give other digits here than where the golden ones were made."""
    (here,) = pinned({"fingerprint": True})
    return [kind for kind, digest in kept["arithmetic"].items() if here.get(kind) != digest]


@pytest.mark.parametrize("name", cells.RUNS)
def test_digits(pinned, kept, bounds, other_arithmetic, record_property, name):
    run = cells.RUNS[name]
    assert name in kept["runs"], "no digits are kept of it: see tests/golden/make.py"
    now = cells.take(pinned, run)
    if other_arithmetic:
        record_property("golden", f"within bounds: {', '.join(other_arithmetic)} are others here")
        differences = list(cells.near(kept["runs"][name], now, bounds[run.recipe]))
    else:
        record_property("golden", "digit for digit")
        differences = list(cells.same(kept["runs"][name], now))
    assert not differences, "\n".join([name, *differences])


def test_nothing_is_kept_that_no_test_compares(kept):
    assert set(kept["runs"]) == set(cells.RUNS)
