"""A step counted on a GPU that is not here: the path of that GPU, every kernel, wait and byte."""

import pytest
import torch

from narrowgauge.kernels.dispatch import has_kernels
from narrowgauge.recipes import device_facts, named_device
from narrowgauge.system.devices import imagine
from narrowgauge.system.errors import UserError
from narrowgauge.system.torch_compat import TorchDispatchMode, operation_name
from narrowgauge.trainer.models import count_parameters
from narrowgauge.trainer.simulate import H200, count_step
from narrowgauge.trainer.simulate.operations import Cost
from narrowgauge.trainer.simulate.recorder import Recorder
from narrowgauge.trainer.training import make_config
from narrowgauge.trainer.training.step.build_model import build_model

META = torch.device("meta")


def config(recipe, layers=2, **model):
    sizes = {"name": "debug", "dim": 128, "heads": 2, "kv_heads": 1, "ffn_dim": 256, "vocab_size": 512}
    training = {"batch_size": 8, "micro_batch_size": 2}
    values = {"data": {"sequence_length": 64}, "training": training, "recipe": {"name": recipe}}
    return make_config(values | {"model": sizes | {"layers": layers} | model})


def names(count):
    return {event.name for event in count.micro}


def test_a_meta_device_stands_for_a_gpu_only_while_one_is_imagined():
    sm_90 = named_device("sm_90")
    with imagine(sm_90):
        assert device_facts(META) == sm_90
        assert has_kernels(META)
    assert device_facts(META).maker == "meta"
    assert not has_kernels(META)
    with imagine(named_device("v100")):
        assert not has_kernels(META)  # Triton compiles from Ampere on


def test_each_gpu_multiplies_what_it_has():
    fp8, old = (count_step(config("fp8"), named_device(gpu)) for gpu in ("h200", "a100"))
    assert "_scaled_mm_v2" in names(fp8)
    assert "_scaled_mm_v2" not in names(old)
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
    swiglu = [e for e in count.micro if e.name == "triton swiglu_forward"]
    rows, amax = 128, 2 * 4  # raised: read and written
    assert [e.cost.bytes for e in swiglu] == [rows * (512 + 256) * 2 + amax] * 2
    update = [e.cost for e in count.update if e.name == "_fused_adamw_"]
    assert sum(cost.bytes for cost in update) == 28 * count_parameters(config("bf16").spec.model)


def test_waits_of_the_host_are_found_and_named():
    recorder = Recorder()
    with imagine(named_device("h200"), recorder.told), recorder.watching():
        recorder.phase = "here"
        x = torch.ones(4, device=META)
        assert x.sum().item() == 1.0
        assert torch.tensor([1.0, 2.0], device=META).shape == (2,)
        x.copy_(torch.ones(4))
        assert x.cpu().tolist() == [0.0] * 4
        torch.ones(4).to(META, non_blocking=True)  # as from pinned memory: does not wait
    assert sum(recorder.waits.values()) == 4


@pytest.mark.parametrize("recipe", ["fp8", "nvfp4", "quartet"])
def test_no_micro_batch_waits_for_the_device(recipe):
    count = count_step(config(recipe), named_device("h200"))
    assert count.waits == {}
    assert count.update_waits == 2  # the norm and the loss


class Strides(TorchDispatchMode):
    """Keeps the bytes from row to row of what matmuls of a vocabulary read and write."""

    def __init__(self, vocabulary):
        super().__init__()
        self.vocabulary, self.found = vocabulary, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if operation_name(func) == "mm":
            seen = [t for t in (*args, out) if self.vocabulary in t.shape]
            self.found += [max(t.stride()) * t.element_size() for t in seen]
        return out


def test_rows_of_logits_are_aligned_on_a_gpu():
    """GPT-2's 50,257 logits are not a multiple of 16 bytes, and three matmuls of a step are of them."""
    values = config("bf16", name="gpt2-debug", vocab_size=257, layers=1)
    with imagine(named_device("h200"), lambda work: None), Strides(257) as strides:
        model = build_model(values.spec, META)
        ids_BT = torch.empty(2, 64, dtype=torch.int64, device=META)
        model.loss(ids_BT, ids_BT).backward()
    assert len(strides.found) == 6, "logits, their gradient twice, and the weight twice and its gradient"
    assert all(stride % 16 == 0 for stride in strides.found)


def test_recomputation_runs_forward_functions_again_and_keeps_less():
    values = config("fp8")
    plain = count_step(values, named_device("h200"))
    again = values.model_copy(update={"training": values.training.model_copy(update={"recompute": True})})
    found = count_step(again, named_device("h200"))
    assert found.functions > 1.2 * plain.functions
    assert found.peak_bytes < plain.peak_bytes
    attention = [c.totals(H200).further.attention_seconds for c in (found, plain)]
    assert attention[0] > attention[1]


def test_seconds_are_the_slowest_of_products_bytes_and_launches():
    count = count_step(config("fp8"), named_device("h200"))
    for event in count.micro:
        cost, seconds = event.cost, H200.seconds(event.cost)
        assert seconds >= max(cost.bytes / 4.25e12, cost.launches * 3e-6)
    large = Cost(10**9, 10**12, "bf16")
    assert H200.seconds(large) == 10**12 / 777e12
    assert H200.calibrated().seconds(large) == pytest.approx(10**12 / (777e12 * 0.888))
    assert H200.seconds(Cost(10**9)) == 10**9 / 4.25e12


def test_what_is_no_gpu_is_refused():
    with pytest.raises(UserError, match="a step is counted for a GPU, not for a CPU; name one, such as h200"):
        count_step(config("fp8"), named_device("cpu"))
