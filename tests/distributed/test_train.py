"""`train` itself on two processes: the estimate, the steps, the sample and the end."""

from shutil import rmtree

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


@pytest.mark.tier("thorough")  # test_parity.py trains in ranks
def test_a_run_goes_on_on_another_number_of_processes(narrowgauge, line, look, tmp_path):
    """Begun by one process, which computes both sequences at once; two have one each; one continues so."""
    out, words = tmp_path / "run", line({"checkpoint.every": 2, "training.steps": 4})
    given = words.index("--training.micro_batch_size")
    words = [*words[:given], *words[given + 2 :], "--out", str(out)]
    begun = narrowgauge(*words)
    assert begun.code == 0, begun.err
    assert "micro-batches of 2 (training.micro_batch_size), which was chosen" in begun.out

    def as_killed_after_step_2():
        rmtree(out / "checkpoints" / "step-4")
        (out / "status.json").unlink()

    as_killed_after_step_2()
    options = ["--standalone", "--nproc-per-node", "2", "-m", "narrowgauge"]
    ended = narrowgauge(*options, *words, script=TORCHRUN)
    assert ended.code == 0, ended.err
    assert ended.out.count("each process has 1 of the 2 sequences of a step; they were of 2") == 1
    (change,) = [line for line in look(out).lines if line.get("event") == "change"]
    assert (change["step"], change["changes"]) == (2, {"training.micro_batch_size": [2, 1]})
    as_killed_after_step_2()
    ended = narrowgauge("train", out / "config.toml", "--out", out)
    assert ended.code == 0, ended.err
    assert "micro-batches of 1 (training.micro_batch_size), as before in this run" in ended.out
    ended = narrowgauge(*options, *words, script=TORCHRUN)
    assert "is done" in ended.out
