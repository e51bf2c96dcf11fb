"""torch.compile: the same training, compiled."""

import shutil

import pytest

DRIFTS = pytest.mark.xfail(
    reason="the loss of mxfp8 is 6e-5 away in step 8, that of nvfp4 3e-3 in step 6; the cause is not proven"
)


@pytest.mark.tier("thorough")
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile on a CPU needs g++")
@pytest.mark.parametrize(
    ("name", "of_loss", "of_norm"),
    [
        pytest.param("mxfp8", 1e-6, 1e-5, marks=DRIFTS),
        pytest.param("nvfp4", 1e-3, 2e-2, marks=DRIFTS),
        ("fp8-attention", 1e-3, 2e-2),
    ],
)
def test_a_compiled_run_trains_and_resumes(narrowgauge, line, look, tmp_path, name, of_loss, of_norm):
    """Gradients of norms are summed in another order, which random bits of NVFP4 find after a few steps."""
    changes = {"training.steps": 8, "checkpoint.every": 4, "recipe.name": name}
    eager, compiled = tmp_path / "eager", tmp_path / "compiled"
    words = line(changes | {"training.compile": True})
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
    assert narrowgauge(*line(changes), "--out", eager).code == 0
    ended = narrowgauge(*words, "--out", compiled, **cache)
    assert ended.code == 0, ended.err
    assert list((tmp_path / "inductor").rglob("*.cpp")), "something was compiled"
    assert "recompile_limit" not in ended.err, "a step is compiled once, not again for each step's numbers"
    for key, bound in (("loss", of_loss), ("grad_norm", of_norm)):
        assert look(compiled).column(key) == pytest.approx(look(eager).column(key), rel=bound)
    before = look(compiled).trajectory
    shutil.rmtree(compiled / "checkpoints" / "step-8")
    (compiled / "status.json").unlink()
    assert narrowgauge(*words, "--out", compiled, **cache).code == 0
    assert look(compiled).trajectory == before
