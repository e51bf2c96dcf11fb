"""A run that cannot fit is refused before it begins, with the changes that make it fit."""

import pytest
import torch

from narrowgauge.system.errors import UserError
from narrowgauge.trainer.runs.monitor import hardware
from narrowgauge.trainer.runs.monitor.memory_check import require_memory
from narrowgauge.trainer.simulate import cheaper
from narrowgauge.trainer.simulate.memory_estimate import estimate_memory
from narrowgauge.trainer.simulate.room import FRAGMENTATION
from narrowgauge.trainer.training import make_config

CPU = torch.device("cpu")
WIDE = {"model.dim": 128, "model.ffn_dim": 256, "training.micro_batch_size": 2}


@pytest.mark.tier("thorough")
def test_a_limit_is_obeyed_before_anything_is_trained_and_what_is_cheaper_is_named(tiny):
    memory = estimate_memory(make_config(tiny(WIDE)))
    needed = memory.peak + int(FRAGMENTATION * memory.peak)
    assert require_memory(make_config(tiny(WIDE | {"training.memory_limit": f"{needed}B"})), CPU) == memory
    with pytest.raises(UserError, match=r"memory_limit is .*; it fits with .*--training.recompute true"):
        require_memory(make_config(tiny(WIDE | {"training.memory_limit": f"{needed - 1}B"})), CPU)
    found = dict(cheaper(make_config(tiny(WIDE))))
    single = list(found)[:4]
    assert single == [
        "--training.chunked_loss true",
        "--training.micro_batch_size 1",
        "--training.recompute true",
        "--recipe.offload master,grad,m,v",
    ]
    assert found[" ".join(single)].peak == min(m.peak for m in found.values()) < memory.peak
    whole, part = (found[f"--training.recompute {kind}"].peak for kind in ("true", "selective"))
    assert whole < part < memory.peak


@pytest.mark.tier("thorough")
def test_a_model_larger_than_the_machine_is_refused(tiny, monkeypatch):
    config = make_config(tiny(WIDE))
    ways = {
        10**6: "choose a smaller --model",
        estimate_memory(config).state - 1: "it fits with --recipe msamp-o2",
    }
    for there, way_out in ways.items():
        monkeypatch.setattr(hardware, "total_memory", lambda device, there=there: there)
        with pytest.raises(UserError, match=rf"state under recipe 'fp8' takes .* and this cpu .*; {way_out}"):
            require_memory(config, CPU)
