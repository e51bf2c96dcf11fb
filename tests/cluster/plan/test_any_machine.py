"""A plan is the same wherever it is made: with Triton or without."""

import json
import subprocess
import sys

import pytest

WITHOUT = "import sys; sys.modules['triton'] = None; from narrowgauge.cli.main import main; main()"
LINE = "--data.sequence_length 128 --model.layers 2 --training.batch_size 8 --training.micro_batch_size 4"


@pytest.mark.tier("thorough")
@pytest.mark.parametrize(("recipe", "cluster"), [("fp8", "rtx4090"), ("nvfp4", "h200"), ("fp4", "h100")])
def test_a_plan_does_not_need_triton(recipe, cluster, narrowgauge):
    """Kernels are declared without it, so memory and the counted step equal a machine's that has it."""
    line = ["plan", "--model", "gpt2-124m", *LINE.split(), "--recipe", recipe, "--cluster", cluster, "--json"]
    here = narrowgauge(*line)
    command = [sys.executable, "-c", WITHOUT, *line]
    told = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert "counted" in told["expect"]
    assert told == json.loads(here.out)
