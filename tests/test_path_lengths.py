"""How long the two paths are that a reader follows: Python calls, and the files that they pass through."""

import sys
import tomllib
from pathlib import Path
from weakref import WeakKeyDictionary

import pytest
import torch

import narrowgauge as ng
from narrowgauge.nn import step_state
from narrowgauge.quantization.passes.in_c import c_library

SOURCE = str(Path(ng.__file__).parent)
BUDGET = tomllib.loads(Path(__file__).with_name("budgets.toml").read_text(encoding="utf-8"))["paths"]


def nvfp4_layer():
    """One layer, forward and backward."""
    model = ng.convert(torch.nn.Sequential(torch.nn.Linear(64, 64)), "nvfp4")
    x = torch.randn(32, 64, requires_grad=True)

    def go():
        model(x).sum().backward()

    return go


def msamp_o2_parameter():
    """One step of the optimizer on one matrix."""
    model = ng.convert(torch.nn.Sequential(torch.nn.Linear(64, 64, bias=False)), "msamp-o2")
    optimizer = ng.AdamW(model.parameters(), "msamp-o2")
    model(torch.randn(32, 64)).sum().backward()
    return optimizer.step


@pytest.mark.skipif(c_library() is None, reason="counted with the passes in C")
@pytest.mark.parametrize("path", [nvfp4_layer, msamp_o2_parameter], ids=lambda path: path.__name__)
def test_a_path_has_no_more_calls_and_files_than_its_budget(path, monkeypatch):
    monkeypatch.setattr(step_state, "_COUNTING", WeakKeyDictionary())  # no layers of other tests
    for warm in (nvfp4_layer, msamp_o2_parameter):  # what is made once is made
        warm()()
    go = path()
    files: list[str] = []

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(SOURCE):
            files.append(frame.f_code.co_filename)

    sys.setprofile(note)
    try:
        go()
    finally:
        sys.setprofile(None)
    calls, most = BUDGET[path.__name__]
    assert (len(files) <= calls, len(set(files)) <= most) == (True, True), (len(files), len(set(files)))
