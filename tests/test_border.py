"""The library works with torch and numpy alone: nothing that the trainer needs can be imported."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import narrowgauge as ng

PACKAGE = Path(ng.__file__).parent
PROGRAM = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in sys.argv[1:]:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
import torch
import narrowgauge as ng

model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64))
model = ng.convert(model, "nvfp4")
optimizer = ng.AdamW(ng.parameter_groups(model, 0.1), lr=1e-3)
with ng.gauges(model) as gauges:
    for _ in range(2):
        model(torch.randn(32, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
print(gauges.map())
print(ng.quantize(torch.randn(4, 32), "mxfp8").codes.dtype, ng.audit(model) is not None)
import narrowgauge.conformance, narrowgauge.exchange, narrowgauge.forecast, narrowgauge.guard
"""


@pytest.mark.tier("thorough")  # imports torch
def test_the_library_works_with_torch_and_numpy_alone(tmp_path):
    project = tomllib.loads((PACKAGE.parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed = [line.split(">")[0] for line in project["dependencies"]]
    absent = sorted({"pynvml" if name == "nvidia-ml-py" else name for name in needed} - {"torch", "numpy"})
    assert "pydantic" in absent
    assert "jinja2" in absent
    program = tmp_path / "program.py"
    program.write_text(PROGRAM, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE.parent)}
    words = [sys.executable, str(program), *absent, "yaml", "transformers", "scipy"]
    ended = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "fprop.x" in ended.stdout
