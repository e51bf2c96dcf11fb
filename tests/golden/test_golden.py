"""Every digit that a run computes today is the digit that it computed when the golden files were made."""

import pytest

from golden import cells, exact, old_checkpoints, outputs
from golden.runs import lines_of, read_kept, worker
from narrowgauge.quantization import cast_names
from narrowgauge.recipes import recipe_names
from support.covering import properties_of

EXACT, DIGITS, RESUMED = (read_kept(part) for part in ("exact", "digits", "old_checkpoints"))


@pytest.fixture(scope="module")
def pinned(tmp_path_factory):
    with worker(tmp_path_factory.mktemp("golden")) as process:
        yield process


@pytest.fixture(scope="module")
def other_arithmetic(pinned):
    """The kinds of arithmetic that give other digits here than where the golden ones were made."""
    (here,) = pinned({"fingerprint": True})
    return [kind for kind, digest in DIGITS["arithmetic"].items() if here.get(kind) != digest]


def require_same(kept, now):
    """Fail with the first differences, and without the lines of code that found them."""
    if differences := outputs.differences(kept, now):
        pytest.fail("\n".join([f"{len(differences)} differences", *differences[:20]]), pytrace=False)


@pytest.mark.tier("nightly", keep=cells.THOROUGH)
@pytest.mark.tier("thorough")
@pytest.mark.parametrize("name", cells.RUNS)
def test_digits(pinned, request, name):
    assert name in DIGITS["runs"], "no digits are kept of it: see tests/golden/make.py"
    if cells.RUNS[name].products != "fp64" and (other := request.getfixturevalue("other_arithmetic")):
        pytest.skip(f"{', '.join(other)} differ here, and so do these digits")
    require_same(DIGITS["runs"][name], cells.take(pinned, name))


@pytest.mark.parametrize("name", cast_names())
def test_the_digits_of_a_cast_are_those_of_every_cpu(name):
    assert exact.of_cast(name) == EXACT["casts"][name]


@pytest.mark.parametrize("name", recipe_names())
def test_the_digits_of_a_layer_are_those_of_every_cpu(name):
    assert exact.of_layer(name) == EXACT["layers"][name]


def test_the_recipes_of_the_four_models_have_every_property():
    have, are = ({p for n in names for p in properties_of(n)} for names in (cells.RECIPES, recipe_names()))
    assert have == are


def test_nothing_is_kept_that_no_test_compares():
    assert set(DIGITS["runs"]) == set(cells.RUNS)
    assert [*EXACT["casts"], *EXACT["layers"]] == [*cast_names(), *recipe_names()]


# the others are plans of seconds
@pytest.mark.tier("thorough", keep=("words", "report"))
@pytest.mark.parametrize("name", outputs.OUTPUTS)
def test_outputs(pinned, other_arithmetic, name):
    kept, now = read_kept(name), outputs.OUTPUTS[name](pinned)
    if other_arithmetic:  # without what follows from digits
        kept, now = outputs.form(kept), outputs.form(now)
    if name == "plans" and "torch" in other_arithmetic:  # what an operation saves is torch's own
        kept, now = outputs.shape_of(kept), outputs.shape_of(now)
    require_same(kept, now)


@pytest.mark.tier("nightly", keep=[name for name in cells.RECIPES if name in RESUMED])
@pytest.mark.tier("thorough", keep=("msamp-o3",))
@pytest.mark.parametrize("name", RESUMED)
def test_a_checkpoint_of_an_earlier_commit_is_resumed_to_the_bit(pinned, other_arithmetic, tmp_path, name):
    run = old_checkpoints.extract(name, tmp_path)
    now = old_checkpoints.resume(pinned, run, name)
    assert [line["step"] for line in lines_of(run / "metrics.jsonl") if line.get("event") == "resume"] == [2]
    assert len(now["loss and grad_norm"]) == 4
    if not other_arithmetic:
        require_same(RESUMED[name], now)
