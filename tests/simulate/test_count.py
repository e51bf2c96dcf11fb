"""A step counted on a GPU that is not here: the path of that GPU, every kernel, wait and byte."""

import pytest
import torch

from narrowgauge.recipes import named_device
from narrowgauge.system.devices import imagine
from narrowgauge.system.errors import UserError
from narrowgauge.trainer.models import count_parameters
from narrowgauge.trainer.simulate import H200, count_step
from narrowgauge.trainer.simulate.operations import Cost
from narrowgauge.trainer.simulate.recorder import Recorder
from support.runs import config_of

META = torch.device("meta")


def config(recipe, layers=2, **model):
    sizes = {"dim": 128, "heads": 2, "kv_heads": 1, "ffn_dim": 256, "vocab_size": 512, "layers": layers}
    return config_of(recipe, sizes | model, 64)


def names(count):
    return {event.name for event in count.micro.events}


def test_each_gpu_multiplies_what_it_has():
    fp8, old = (count_step(config("fp8"), named_device(gpu)) for gpu in ("h200", "a100"))
    assert "_scaled_mm_v2" in names(fp8) - names(old)
    assert "triton cast_given" in names(fp8) & names(old)


def test_flops_are_those_of_the_model():
    """Three matmuls of each linear layer; half of attention's two of T x T, as it is causal, 3.5 times."""
    count, tokens = count_step(config("bf16"), named_device("h200")), 2 * 64
    weights = 2 * (128 * (128 + 2 * 64) + 128 * 128 + 128 * 512 + 256 * 128) + 512 * 128
    attention = 2 * 3.5 * (2 * 2 * 64 * 64 * 128 * 2) / 2
    assert count.totals(H200).further.flops == 6 * weights * tokens + attention
    assert count.micro_batches == 4


def test_bytes_are_what_kernels_read_and_write():
    count = count_step(config("bf16"), named_device("h200"))
    swiglu = [e for e in count.micro.events if e.name == "triton swiglu_forward"]
    rows, amax = 128, 2 * 4  # raised: read and written
    assert [e.cost.bytes for e in swiglu] == [rows * (512 + 256) * 2 + amax] * 2
    update = [e.cost for e in count.update.events if e.name == "_fused_adamw_"]
    assert sum(cost.bytes for cost in update) == 28 * count_parameters(config("bf16").spec.model)


def test_waits_of_the_host_are_found():
    recorder = Recorder()
    with imagine(named_device("h200"), recorder.on_launch), recorder.watching():
        recorder.phase = "here"
        x = torch.ones(4, device=META)
        assert x.sum().item() == 1.0
        assert torch.tensor([1.0, 2.0], device=META).shape == (2,)
        x.copy_(torch.ones(4))
        assert x.cpu().tolist() == [0.0] * 4
        torch.ones(4).to(META, non_blocking=True)  # as from pinned memory: does not wait
    assert recorder.parts["here"].waits == 4


@pytest.mark.parametrize("recipe", ["fp8", "nvfp4", "quartet"])
def test_no_micro_batch_waits_for_the_device(recipe):
    count = count_step(config(recipe), named_device("h200"))
    assert (count.micro.waits, count.update.waits) == (0, 2)  # the norm and the loss


def test_seconds_are_the_slowest_of_products_bytes_and_launches():
    count = count_step(config("fp8"), named_device("h200"))
    for event in count.micro.events:
        cost, seconds = event.cost, H200.seconds(event.cost)
        assert seconds >= max(cost.bytes / 4.25e12, cost.launches * 3e-6)
    large = Cost(10**9, 10**12, "bf16")
    assert H200.seconds(large) == 10**12 / 777e12
    assert H200.calibrated().seconds(large) == pytest.approx(10**12 / (777e12 * 0.888))
    assert H200.seconds(Cost(10**9)) == 10**9 / 4.25e12


def test_what_is_no_gpu_is_refused():
    with pytest.raises(UserError, match="a step is counted for a GPU, not for a CPU; name one, such as h200"):
        count_step(config("fp8"), named_device("cpu"))
