"""`train` itself on two processes: the estimate, the steps, the sample and the end."""

import pytest

from support.processes import TORCHRUN


@pytest.mark.tier("thorough")  # test_parity.py trains in ranks
@pytest.mark.parametrize("kind", ["tensor", "context"])
def test_fp4_is_trained_by_two_processes(narrowgauge, line, look, tmp_path, kind):
    """Its quantiles are elements on both, and the estimate before step 1 has none to read."""
    changes = {"recipe.name": "fp4", "model.kv_heads": 2, f"parallel.{kind}": 2, "training.steps": 2}
    options = ["--standalone", "--nproc-per-node", "2", "-m", "narrowgauge"]
    ended = narrowgauge(*options, *line(changes), "--out", tmp_path / "run", script=TORCHRUN)
    assert ended.code == 0, ended.err
    assert [step["step"] for step in look(tmp_path / "run").steps] == [1, 2]
