"""What a run reports of its recipe: layers that stay wide, blocks that are cut, wrong names."""

import io

import pytest
from rich.console import Console

from narrowgauge.nn import outline_of
from narrowgauge.system.errors import UserError
from narrowgauge.trainer.cluster.plan.plan import make_plan
from narrowgauge.trainer.cluster.plan.plan_text import print_plan
from narrowgauge.trainer.models import Transformer, model_config
from narrowgauge.trainer.report import read_run, render_report
from narrowgauge.trainer.training import make_config
from narrowgauge.trainer.training.outline import outline_of_model

HUGE = '[fprop]\nw = {element = "e2m1", block = [4096, 32], scale = "e8m0"}\n[keep]\nlast_blocks = 1\n'
CUT = "blocks of 4096 in fprop.w do not divide the outputs of 5 of 9 layers: "


@pytest.fixture
def file(tmp_path):
    """Writes a recipe's file."""
    path = tmp_path / "mine.toml"
    return lambda text: path.write_text(text) and str(path)


TYPOS = (
    'fprop = "mxfp4"\n[keep]\nmodules = ["haed"]',
    '[[rule]]\nmodules = ["blocks.77.*"]\nfprop = "mxfp4"',
)


def test_a_misspelt_layer_is_refused_before_anything_is_made(file, train, tmp_path):
    words = r"recipe 'mine': .* matches no layer of the model; the nearest name is"
    for typo in TYPOS:
        with pytest.raises(UserError, match=words):
            train("run", {"recipe.name": file(typo)})
    assert not (tmp_path / "run").exists()


@pytest.mark.tier("thorough")
def test_a_run_its_page_and_its_plan_say_what_is_kept_and_what_is_cut(file, train, tiny):
    said = io.StringIO()
    changes = {"recipe.name": file(HUGE), "training.steps": 1}
    path = train("run", changes, said)
    assert "kept in bf16: blocks.1\n" in said.getvalue()
    assert CUT in said.getvalue()
    assert f"mine: kept in bf16: blocks.1; {CUT}" in render_report([read_run(path)])
    planned = io.StringIO()
    print_plan(make_plan(make_config(tiny(changes)), 1, None), Console(file=planned, width=500))
    assert "kept in bf16: blocks.1\n" in planned.getvalue()
    assert CUT in planned.getvalue()


@pytest.mark.tier("thorough", keep=("changes0", "changes2"))
@pytest.mark.parametrize(
    "changes", [{"name": "debug"}, {"name": "gpt2-124m", "layers": 3}, {"name": "debug", "experts": 3}]
)
def test_an_outline_of_one_block_is_that_of_the_model(changes):
    model = model_config(**changes)
    assert outline_of_model(model) == outline_of(Transformer(model))
