"""The account of memory is that of the device: kernels and native matmuls on, as a count sees them."""

import pytest

from narrowgauge.devices import imagine
from narrowgauge.recipes import named_device
from narrowgauge.simulate import count_step, estimate_memory
from narrowgauge.training import make_config


def config(recipe, **training):
    return make_config(
        {
            "model": {"name": "debug", "dim": 256, "heads": 4, "kv_heads": 2, "ffn_dim": 1024, "layers": 6},
            "data": {"sequence_length": 512},
            "training": {"batch_size": 24, "micro_batch_size": 8} | training,
            "recipe": {"name": recipe},
        }
    )


@pytest.mark.tier("thorough")
@pytest.mark.parametrize(
    ("recipe", "recompute"),
    [("fp8", False), ("bf16", False), ("nvfp4", False), ("msamp-o2", False), ("fp8", "selective")],
)
def test_the_account_is_what_a_gpu_holds(recipe, recompute):
    h200, values = named_device("h200"), config(recipe, recompute=recompute)
    with imagine(h200):
        told = estimate_memory(values).peak
    assert told == pytest.approx(count_step(values, h200).peak_bytes, rel=0.02)


@pytest.mark.tier("thorough")
def test_kernels_and_native_products_keep_less_than_plain_operations():
    with imagine(named_device("h200")):
        native = estimate_memory(config("fp8"))
    plain = estimate_memory(config("fp8"))
    assert native.device["saved activations"] < 0.9 * plain.device["saved activations"]
    assert native.state == plain.state
