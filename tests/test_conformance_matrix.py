"""The matrix of libraries: its page follows from the rows, a difference has a cause, installed ones agree."""

import importlib.metadata
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "conformance"))
import answer  # noqa: E402
import found  # noqa: E402
import matrix  # noqa: E402
import page  # noqa: E402

ROWS, CAUSES = page.read("matrix.csv"), page.read("causes.csv")
# The libraries of the tests' environment, and their distributions; those that load in no time come first.
HERE = {
    "gguf": "gguf",
    "ml_dtypes": "ml_dtypes",
    "gfloat": "gfloat",
    "narrowgauge": "narrowgauge",
    "torchao": "torchao",
    "compressed_tensors": "compressed-tensors",
    "transformers": "transformers",
}


def stored(library, formats=matrix.FORMATS):
    kept = [r for r in ROWS if r["library"] == library and r["format"] in formats]
    return [{k: v for k, v in r.items() if k != "date"} for r in kept]


def is_stored_version(library):
    """Whether the library is here in the version of its rows; others are for `conformance/matrix.py`."""
    try:
        version = importlib.metadata.version(HERE[library])
    except importlib.metadata.PackageNotFoundError:
        return False
    return {r["version"] for r in ROWS if r["library"] == library} == {version}


def case(name, of="normal"):
    return next(c for c in matrix.questions(name) if c.name == of)


def test_the_page_is_made_of_the_rows_and_the_reproductions():
    assert page.PAGE.read_text() == page.page()
    assert {r["library"] for r in ROWS} == set(matrix.names())
    assert {r["format"] for r in ROWS} <= set(matrix.FORMATS)
    assert all(r["version"] and r["date"] for r in ROWS)


def test_each_difference_has_a_cause_and_each_cause_a_difference():
    wrong = [r for r in ROWS if r["verdict"] in ("differs", "fails")]
    found_causes = [page.cause_of(r, CAUSES) for r in wrong]
    assert [r for r, c in zip(wrong, found_causes, strict=True) if c is None] == []
    assert [c for c in CAUSES if c not in found_causes] == []
    assert {c["kind"] for c in CAUSES} <= set(page.MARKS)
    assert not [r for r in wrong if r["library"] == "narrowgauge"]


@pytest.mark.tier("thorough", keep=("ml_dtypes",))  # loading torch takes seconds
@pytest.mark.parametrize("library", HERE)
def test_an_installed_library_gives_the_stored_rows(library):
    if not is_stored_version(library):
        pytest.skip("another version is installed")
    rows = matrix.ask(library, None, dict.fromkeys(r["format"] for r in stored(library)))
    assert [{k: v for k, v in r.items() if k != "date"} for r in rows] == stored(library) != []


def test_a_wrong_code_differs_and_another_scale_of_the_same_values_does_not():
    asked = case("mxfp4 floor")
    codes, scales = asked.codes.copy(), asked.scales.copy()
    right = {"codes": codes.ravel().tolist(), "scales": scales.ravel().tolist()}
    assert matrix.judge(asked, right)[0] == "equal"
    one = codes.ravel().copy()
    one[5] ^= 1
    verdict, share, where = matrix.judge(asked, right | {"codes": one.tolist()})
    assert (verdict, share) == ("differs", 1 / one.size)
    assert " at 5 is " in where
    zeros = case("mxfp4 floor", "zeros")
    other = {
        "codes": zeros.codes.ravel().tolist(),
        "scales": (zeros.scales + 9 * (zeros.scales == 0)).tolist(),
    }
    assert matrix.judge(zeros, other)[0] == "values"
    flat = [float(v).hex() for v in asked.values.ravel()]
    assert matrix.judge(asked, {"values": flat})[0] == "values"
    assert matrix.judge(asked, {"values": flat[:-1]})[0] == "fails"


def test_the_law_of_stochastic_rounding_finds_a_bias():
    asked = case("e2m1 element", "stochastic")
    below, above, shares = asked.codes
    drawn = np.random.default_rng(1).random(asked.x.shape)

    def rounded(bias):
        up = drawn < np.tile(shares, 2)[:, None] + bias
        low, high = (np.concatenate([v, -v])[:, None] for v in (below, above))
        return {"values": [float(v).hex() for v in np.where(up, high, low).ravel()]}

    assert matrix.judge(asked, rounded(0))[0] == "equal"
    verdict, _, where = matrix.judge(asked, rounded(0.05))
    assert verdict == "differs"
    assert "went up" in where


@pytest.mark.tier("thorough", keep=2)
@pytest.mark.parametrize("library", HERE)
def test_an_adapter_refuses_a_key_that_it_does_not_read(library):
    if library == "narrowgauge":  # it hands every key on, and an unknown one is an error there
        pytest.skip("its keys come from the casts")
    pytest.importorskip(library)
    module = answer.load(ROOT / "conformance" / "adapters" / f"{library}_adapter.py")
    for name in dict.fromkeys(r["format"] for r in stored(library)):
        asked = matrix._question(case(name)) | {"asks": "quantize"}
        more = asked | {"cast": asked["cast"] | {"hadamard": 16}}
        assert answer.answer(module, more) == {"verdict": "is not there"}, name


@pytest.mark.tier("thorough")
@pytest.mark.parametrize("library", [*HERE, "triton"])
def test_a_reproduction_prints_what_the_page_says(library):
    of_library = [one for one in found.reproductions() if one.library == library]
    if not of_library:
        pytest.skip("it has none")
    if library != "triton" and not is_stored_version(library):
        pytest.skip("another version is installed")
    if library == "triton" and not pytest.importorskip("triton").__version__.startswith("3.8."):
        pytest.skip("another version is installed")
    together = found.Reproduction(
        library, *("".join(part) for part in list(zip(*of_library, strict=True))[1:])
    )
    assert found.run(together) == together.prints
