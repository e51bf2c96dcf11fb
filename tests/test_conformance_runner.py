"""The runner of the conformance vectors: what passes, what differs and where, and the exit code."""

import runpy
from pathlib import Path

import numpy as np
import pytest

from narrowgauge.conformance import compare, read_vectors
from narrowgauge.conformance.__main__ import main

EXAMPLES = Path(__file__).parents[1] / "conformance" / "adapters"
OURS = str(EXAMPLES / "narrowgauge_adapter.py")


@pytest.fixture(scope="module")
def quantize():
    return runpy.run_path(OURS)["quantize"]


@pytest.fixture(scope="module")
def vectors():
    return {v.name: v for v in read_vectors()}


def written(tmp_path, text):
    file = tmp_path / "mine.py"
    file.write_text(f"import runpy\nours = runpy.run_path({OURS!r})['quantize']\n{text}")
    return str(file)


def test_narrowgauge_passes_all_that_it_is_asked(capsys):
    assert main([OURS]) == 0
    assert "vectors pass" in capsys.readouterr().out


def test_the_first_wrong_code_is_named_with_its_number(vectors, quantize):
    def wrong(x, cast):
        codes, scales, second = quantize(x, cast)
        codes[3, 7] ^= 1
        return codes, scales, second

    vector = vectors["mxfp4 normal"]
    result = compare(wrong, vector)
    (difference,) = result.differences
    assert (result.verdict, difference.what, difference.where) == ("differs", "code", (3, 7))
    assert difference.share == pytest.approx(1 / vector.x.size)
    assert f"of x = {vector.x[3, 7]:.9g}" in difference.text


def test_a_code_is_the_whole_number_that_was_returned(vectors, quantize):
    """No cut at the decimal point or at 32 bits makes a wrong code a right one."""
    vector = vectors["mxfp8 normal"]
    codes, scales, second = map(np.asarray, quantize(vector.x, vector.cast))
    for index, wrong in ((0, codes + 0.4), (0, codes.astype(np.int64) + 2**32), (1, scales + 0.5)):
        returned = [codes, scales, second]
        returned[index] = wrong
        assert compare(lambda x, cast, r=returned: tuple(r), vector).verdict in ("fails", "differs")
    assert compare(lambda x, cast: (codes.astype(np.float64), scales, second), vector).verdict == "passes"


@pytest.mark.parametrize("name", ["nvfp4 normal", "nvfp4-2d normal axis 0", "fp8-row wide"])
def test_wrong_scales_are_found_in_every_kind(name, vectors, quantize):
    def wrong(x, cast):
        codes, scales, second = quantize(x, cast)
        scales[-1, -1] += 1
        return codes, scales, second * 2

    found = {d.what: d.where for d in compare(wrong, vectors[name]).differences}
    scales = vectors[name].scales
    assert found["scale"] == (scales.shape[0] - 1, scales.shape[1] - 1)
    assert ("tensor scale" in found) == name.startswith("nvfp4")


def test_a_module_imports_what_lies_beside_it(tmp_path, capsys):
    (tmp_path / "beside_mine.py").write_text(f"import runpy\nquantize = runpy.run_path({OURS!r})['quantize']")
    (tmp_path / "mine.py").write_text("from beside_mine import quantize")
    assert main([str(tmp_path / "mine.py"), "--only", "mxfp4 normal"]) == 0
    assert "1 of 1 vectors pass" in capsys.readouterr().out


def test_what_a_library_does_not_have_is_no_failure_and_what_raises_is(vectors):
    def absent(x, cast):
        raise NotImplementedError

    def broken(x, cast):
        raise IndexError("beyond the block")

    vector = vectors["mxfp8 normal"]
    assert compare(absent, vector).verdict == "is not there"
    assert compare(lambda x, cast: None, vector).verdict == "is not there"
    assert compare(broken, vector).why == "IndexError: beyond the block"
    assert compare(lambda x, cast: (x[:1], x[:1]), vector).verdict == "fails"


def test_exit_codes(tmp_path, capsys):
    differs = written(
        tmp_path, "def quantize(x, cast):\n    c, *rest = ours(x, cast)\n    return c ^ 1, *rest\n"
    )
    assert main([differs, "--only", "mxfp4 *"]) == 1
    assert "normal: code [0, 0] is" in " ".join(capsys.readouterr().out.split())
    nothing = written(tmp_path, "def quantize(x, cast):\n    raise NotImplementedError\n")
    assert main([nothing, "--only", "mxfp4 *"]) == 1  # nothing was shown
    for words, said in (
        ([str(tmp_path / "absent.py")], "cannot be imported"),
        ([written(tmp_path, "")], "has no function quantize(x, cast)"),
        ([OURS, "--only", "mxpf4"], "fits the name of no vector"),
        ([OURS, "--vectors", str(tmp_path)], "no conformance vectors in"),
    ):
        assert main(words) == 2
        assert said in capsys.readouterr().err
