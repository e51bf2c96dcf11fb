"""Every digit that a run computes today is the digit that it computed when the golden files were made."""

import pytest

from golden import cells, outputs
from golden.runs import read_kept


@pytest.fixture(scope="module")
def digits():
    return read_kept("digits")


@pytest.fixture(scope="module")
def bounds():
    return read_kept("bounds")


@pytest.fixture(scope="module")
def other_arithmetic(pinned, digits):
    """The kinds of arithmetic that give other digits here than where the golden ones were made."""
    (here,) = pinned({"fingerprint": True})
    return [kind for kind, digest in digits["arithmetic"].items() if here.get(kind) != digest]


def require_none(differences):
    """Fail with the first differences, and without the lines of code that found them."""
    if differences:
        pytest.fail("\n".join([f"{len(differences)} differences", *differences[:20]]), pytrace=False)


@pytest.mark.tier("thorough", keep=10)
@pytest.mark.parametrize("name", cells.RUNS)
def test_digits(pinned, digits, bounds, other_arithmetic, record_property, name):
    assert name in digits["runs"], "no digits are kept of it: see tests/golden/make.py"
    kept, now = digits["runs"][name], cells.take(pinned, name)
    if other_arithmetic:
        record_property("golden", f"runs compared within bounds: {', '.join(other_arithmetic)} differ here")
        differences = list(cells.near(kept, now, bounds[cells.RUNS[name].recipe]))
    else:
        record_property("golden", "runs compared digit for digit")
        differences = list(cells.same(kept, now))
    require_none(differences)


def test_nothing_is_kept_that_no_test_compares(digits):
    assert set(digits["runs"]) == set(cells.RUNS)


# the others are plans of seconds; test_time_obeys_its_ceilings plans as well
@pytest.mark.tier("thorough", keep=("words", "exports", "report"))
@pytest.mark.parametrize("name", outputs.OUTPUTS)
def test_outputs(pinned, other_arithmetic, record_property, name):
    kept, now = read_kept(name), outputs.OUTPUTS[name](pinned)
    if other_arithmetic:
        record_property("golden", "outputs compared without what follows from digits")
        kept, now = outputs.form(kept), outputs.form(now)
    else:
        record_property("golden", "outputs compared byte for byte")
    if name == "plans" and "torch" in other_arithmetic:  # what an operation saves is torch's own
        kept, now = outputs.shape_of(kept), outputs.shape_of(now)
    differences = list(outputs.differences(kept, now))
    require_none(differences)
