"""The program of docs/fp8-in-100-lines.md: it runs, it is short, it computes what `ng.convert` computes."""

import contextlib
import io
from pathlib import Path

import pytest
import torch

import narrowgauge as ng
from support.markdown import blocks

PAGE = (Path(__file__).parents[1] / "docs" / "fp8-in-100-lines.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def program():
    """The names that the program leaves behind, and what it printed."""
    (source,) = blocks(PAGE, "python")
    assert len(source.splitlines()) <= 100
    names, printed = {}, io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(source, names)
    return names, printed.getvalue()


@pytest.mark.tier("thorough")  # trains
def test_it_prints_what_the_page_shows_but_for_the_digits(program):
    shown = next(block for block in blocks(PAGE, "text") if block.startswith("step"))

    def words(text):
        return [word for word in text.split() if "." not in word]

    assert words(program[1]) == words(shown)


@pytest.mark.tier("thorough")  # trains
def test_it_learns(program):
    for losses in (program[0]["wide"], program[0]["narrow"]):
        assert losses[0] > 5.4  # log 256 is 5.545
        assert sum(losses[-50:]) / 50 < 2.5


@pytest.mark.tier("thorough")  # trains
def test_it_is_what_convert_computes(program):
    names, _ = program
    model = names["make_model"](torch.nn.Linear)
    for i in (2, 4):
        model[i] = ng.convert(model[i], "fp8")
    losses = names["train"](model)
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        assert losses == names["narrow"]
    else:  # the package multiplies in fp32 there, and the sums are added up in another order
        assert losses[0] == pytest.approx(names["narrow"][0], rel=1e-4)
        assert sum(losses[-50:]) == pytest.approx(sum(names["narrow"][-50:]), rel=0.02)
