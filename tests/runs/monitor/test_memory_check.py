"""A run that cannot fit is refused before it begins, with the changes that make it fit."""

import pytest
import torch

from narrowgauge.errors import UserError
from narrowgauge.runs.monitor import hardware
from narrowgauge.runs.monitor.memory_check import require_memory
from narrowgauge.simulate import cheaper
from narrowgauge.simulate.memory_estimate import estimate_memory
from narrowgauge.simulate.room import FRAGMENTATION
from narrowgauge.training import make_config

CPU = torch.device("cpu")
WIDE = {"model.dim": 128, "model.ffn_dim": 256}  # matrices large enough for narrow moments


@pytest.mark.tier("thorough")
def test_a_limit_is_obeyed_before_anything_is_trained(tiny):
    config = make_config(tiny(WIDE | {"training.micro_batch_size": 2}))
    memory = estimate_memory(config)
    needed = memory.peak + int(FRAGMENTATION * memory.peak)
    limited = config.model_copy(
        update={"training": config.training.model_copy(update={"memory_limit": f"{needed - 1}B"})}
    )
    with pytest.raises(UserError, match=r"memory_limit is .*; it fits with .*--training.recompute true"):
        require_memory(limited, CPU)
    roomy = config.model_copy(
        update={"training": config.training.model_copy(update={"memory_limit": f"{needed}B"})}
    )
    assert require_memory(roomy, CPU).peak == memory.peak


@pytest.mark.tier("thorough")
def test_what_is_cheaper(tiny):
    config = make_config(tiny(WIDE | {"training.micro_batch_size": 2}))
    peak, found = estimate_memory(config).peak, dict(cheaper(config))
    assert list(found)[:4] == [
        "--training.chunked_loss true",
        "--training.micro_batch_size 1",
        "--training.recompute true",
        "--recipe.offload master,grad,m,v",
    ]
    together = found[" ".join(list(found)[:4])]
    assert together.peak == min(m.peak for m in found.values()) < peak
    whole, part = (found[f"--training.recompute {kind}"].peak for kind in ("true", "selective"))
    assert whole < part < peak


@pytest.mark.tier("thorough")
def test_a_model_larger_than_the_machine_is_refused(tiny, monkeypatch):
    state = estimate_memory(make_config(tiny(WIDE))).state
    for there, way_out in (
        (10**6, "choose a smaller --model"),
        (state - 1, "it fits with --recipe msamp-o2"),
    ):
        monkeypatch.setattr(hardware, "total_memory", lambda device, there=there: there)
        with pytest.raises(UserError, match=rf"state under recipe 'fp8' takes .* and this cpu .*; {way_out}"):
            require_memory(make_config(tiny(WIDE)), CPU)
