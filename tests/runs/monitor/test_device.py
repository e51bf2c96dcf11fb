"""A run whose device is not there, or that cannot fit, is refused before it begins, with what would do."""

import pytest
import torch

from narrowgauge.system.errors import UserError
from narrowgauge.trainer.runs.loop.resolve import require_memory
from narrowgauge.trainer.runs.monitor import machine
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
        monkeypatch.setattr(machine, "total_memory", lambda device, there=there: there)
        with pytest.raises(UserError, match=rf"state under recipe 'fp8' takes .* and this cpu .*; {way_out}"):
            require_memory(config, CPU)


def test_auto_takes_the_gpu_if_there_is_one():
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    assert machine.choose_device("auto").type == kind
    assert machine.choose_device("cpu") == CPU


@pytest.mark.parametrize(
    ("wish", "gpus", "words"),
    [
        *(
            (wish, 0, "unknown device .*auto, cpu, cuda")
            for wish in ("cudax", "cpu:x", "auto:1", "cuda:", "")
        ),
        *((wish, 0, f"device = '{wish}', .* sees no GPU; use --device cpu") for wish in ("cuda", "cuda:1")),
        ("cuda:2", 2, r"device = 'cuda:2', .* last GPU .* 'cuda:1'"),
    ],
)
def test_a_device_that_is_not_there_is_refused(wish, gpus, words, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert not gpus or machine.choose_device("cuda:1") == torch.device("cuda", 1)
    with pytest.raises(UserError, match=words):
        machine.choose_device(wish)
