"""torch.compile: the same training, compiled.

Inductor adds up the elements of a norm and of the loss in another order than eager code, and its exponential
has another last bit. A float32 bit that differs seldom survives the next rounding to bf16; where it does, it
can become a whole step of a format's grid, and the compiled run leaves the eager one. With norms,
activations and loss left to eager code nothing may differ, under any recipe.
"""

import shutil

import pytest
import torch

from narrowgauge.recipes import recipe_names
from narrowgauge.trainer.data import prepare
from narrowgauge.trainer.models import experts, layers, transformer
from narrowgauge.trainer.training import make_config
from narrowgauge.trainer.training.step.trainer import Trainer
from support.runs import interrupted

CPU = torch.device("cpu")
pytestmark = [
    pytest.mark.tier("thorough"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile on a CPU needs g++"),
    pytest.mark.filterwarnings(
        "ignore::DeprecationWarning", "ignore:Dynamo detected a call to a"
    ),  # torch's own
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),  # torch hides it
]


@pytest.fixture
def eager_sums(monkeypatch):
    """Leaves norms, activations and the loss to eager code."""
    places = [(layers, "add_norm"), (layers, "norm"), (experts, "swiglu"), (experts, "gelu")]
    places.append((transformer, "cross_entropy"))
    for module, name in places:
        monkeypatch.setattr(module, name, torch.compiler.disable(getattr(module, name)))
    yield
    torch.compiler.reset()


def begin(tiny, name, compiles):
    changes = {"recipe.name": name, "training.compile": compiles, "model.layers": 1}
    return Trainer.begin(make_config(tiny(changes)), CPU)


# quick: nn/test_compile.py, the traced layers of every recipe
@pytest.mark.tier("nightly", keep=("mxfp8-fwd-nvfp4-bwd", "fp8-row"))
@pytest.mark.parametrize("name", recipe_names())
@pytest.mark.usefixtures("eager_sums")
def test_a_compiled_run_is_the_eager_one_but_for_the_order_of_sums(tiny, text, name):
    corpus = prepare(text, "bytes")
    eager, compiled = begin(tiny, name, False), begin(tiny, name, True)
    for _ in range(6):
        assert compiled.train_step(compiled.batches(corpus.train)) == eager.train_step(
            eager.batches(corpus.train)
        )
    for (parameter, a), b in zip(eager.model.named_parameters(), compiled.model.parameters(), strict=True):
        assert torch.equal(a, b), parameter


@pytest.mark.tier("nightly", keep=("bf16",))
@pytest.mark.parametrize("name", ["bf16", "nvfp4"])
def test_a_compiled_run_trains_and_resumes(narrowgauge, line, look, tmp_path, name):
    changes = {"checkpoint.every": 3, "recipe.name": name, "training.compile": True, "model.layers": 1}
    words, run = line(changes), tmp_path / "compiled"
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
    ended = narrowgauge.start(*words, "--out", run, **cache).wait(400)  # a busy machine compiles for minutes
    assert ended.code == 0, ended.err
    assert list((tmp_path / "inductor").rglob("*.cpp")), "something was compiled"
    assert "recompile_limit" not in ended.err, "a step is compiled once, not again for each step's numbers"
    before = look(run).trajectory
    interrupted(run, 6)
    assert narrowgauge(*words, "--out", run, **cache).code == 0
    assert look(run).trajectory == before
