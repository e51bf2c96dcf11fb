"""What fits into a device: tensors as a GPU's kernels hold them, what the allocator and the driver keep."""

import pytest

from narrowgauge.recipes import named_device
from narrowgauge.system.devices import imagine
from narrowgauge.trainer.simulate import ALONE, Memory, Room, count_step, estimate_memory
from narrowgauge.trainer.simulate.memory import CLASSES
from narrowgauge.trainer.simulate.room import CONTEXT, FRAGMENTATION
from narrowgauge.trainer.training import make_config
from support.runs import config_of

GIB = 2**30


def memory_of(peak, host=0):
    return Memory(dict.fromkeys(CLASSES, 0) | {"weights": peak}, {"m": host} if host else {}, 1)


def room(size, has_host=True, **training):
    return Room.of(make_config({"training": training}), size, "a device", has_host)


def test_tensors_cannot_fill_a_gpu():
    card = room(24 * GIB)
    assert not card.fits(memory_of(24 * GIB), ALONE)
    most = int((24 * GIB - CONTEXT) / (1 + FRAGMENTATION))
    assert card.fits(memory_of(most), ALONE)
    assert not card.fits(memory_of(most + 2), ALONE)
    assert card.needed(memory_of(most), ALONE) == pytest.approx(24 * GIB, abs=2)


def test_a_limit_of_the_allocator_holds_no_context():
    """What the driver keeps lies outside what torch's allocator may take."""
    limited = room(24 * GIB, memory_limit="1GiB")
    assert limited.reserved(memory_of(GIB)) == int(FRAGMENTATION * GIB)
    assert not limited.fits(memory_of(GIB), ALONE)


def test_a_cpu_reserves_nothing_and_holds_the_state_of_the_host():
    machine = room(GIB, has_host=False)
    assert machine.reserved(memory_of(GIB)) == 0
    memory = memory_of(1000, host=24)
    assert machine.needed(memory, ALONE) == 1000 + 24 + machine.copy(memory, ALONE)


def on_a_gpu(recipe, **training):
    sizes = {"dim": 256, "heads": 4, "kv_heads": 2, "ffn_dim": 1024, "layers": 6}
    return config_of(recipe, sizes, 512, batch_size=24, micro_batch_size=8, **training)


@pytest.mark.tier("thorough")
@pytest.mark.parametrize(
    ("recipe", "recompute"),
    [("nvfp4", False), ("msamp-o2", False), ("fp8", "selective")],
)
def test_the_account_is_what_a_gpu_holds(recipe, recompute):
    h200, values = named_device("h200"), on_a_gpu(recipe, recompute=recompute)
    with imagine(h200):
        told = estimate_memory(values).peak
    assert told == pytest.approx(count_step(values, h200).peak_bytes, rel=0.02)


@pytest.mark.tier("thorough")
def test_kernels_and_native_products_keep_less_than_plain_operations():
    with imagine(named_device("h200")):
        native = estimate_memory(on_a_gpu("fp8"))
    plain = estimate_memory(on_a_gpu("fp8"))
    assert native.device["saved activations"] < 0.9 * plain.device["saved activations"]
    assert native.state == plain.state
