"""What fits into a device, and the smallest change that does.

Tensors are as a GPU's kernels hold them, with what the allocator and the driver keep. Nothing is said to fit
nowhere that some combination of settings fits.
"""

from itertools import product

import pytest

from narrowgauge.recipes import named_device
from narrowgauge.system.devices import imagine
from narrowgauge.trainer.simulate import SINGLE, Memory, Room, count_step, estimate_memory, fitting
from narrowgauge.trainer.simulate.advice import least_state
from narrowgauge.trainer.simulate.memory import CLASSES
from narrowgauge.trainer.simulate.room import CONTEXT, FRAGMENTATION
from narrowgauge.trainer.training import make_config
from support.runs import config_of

GIB = 2**30


def memory_of(peak, host=0):
    return Memory(dict.fromkeys(CLASSES, 0) | {"weights": peak}, {"m": host} if host else {}, 1)


def room(size, has_host=True, **training):
    return Room.of(make_config({"training": training}), size, "a device", has_host)


def test_tensors_cannot_fill_a_gpu_and_can_fill_a_cpu():
    card = room(24 * GIB)
    assert not card.fits(memory_of(24 * GIB), SINGLE)
    most = int((24 * GIB - CONTEXT) / (1 + FRAGMENTATION))
    assert card.fits(memory_of(most), SINGLE)
    assert not card.fits(memory_of(most + 2), SINGLE)
    assert card.needed(memory_of(most), SINGLE) == pytest.approx(24 * GIB, abs=2)
    # what the driver keeps lies outside what torch's allocator may take
    assert room(24 * GIB, memory_limit="1GiB").reserved(memory_of(GIB)) == int(FRAGMENTATION * GIB)
    machine, memory = room(GIB, has_host=False), memory_of(1000, host=24)
    assert machine.reserved(memory) == 0
    assert machine.needed(memory, SINGLE) == 1000 + 24 + machine.copy(memory, SINGLE)


def on_a_gpu(recipe, **training):
    sizes = {"dim": 256, "heads": 4, "kv_heads": 2, "ffn_dim": 1024, "layers": 6}
    return config_of(recipe, sizes, 512, batch_size=24, micro_batch_size=8, **training)


@pytest.mark.tier("thorough")
@pytest.mark.parametrize("recipe", ["nvfp4", "msamp-o2", "fp8"])
def test_the_account_is_what_a_gpu_holds(recipe):
    h200, recompute = named_device("h200"), "selective" if recipe == "fp8" else False
    values = on_a_gpu(recipe, recompute=recompute)
    with imagine(h200):
        told = estimate_memory(values).peak
    assert told == pytest.approx(count_step(values, h200).peak_bytes, rel=0.02)


ALL = "master,grad,m,v"
STATES = ("fp8", "eco", "msamp-o3")  # wide, without a master, and with one


def config(recipe, length=128, micro=2, recompute=False, chunked=False, offload="", batch=2):
    training = {"batch_size": batch, "micro_batch_size": micro, "device": "cpu"}
    values = {
        "model": {"name": "debug", "layers": 1},
        "data": {"sequence_length": length},
        "training": training | {"recompute": recompute, "chunked_loss": chunked},
        "recipe": {"name": recipe} | ({"offload": offload} if offload else {}),
    }
    return make_config(values)


def least():
    """The least peak of all combinations of settings and kinds of state, one by one."""
    every = product(STATES, (128,), (1, 2), (False, True), (False, True), ("", ALL))
    return min(estimate_memory(config(*one)).peak for one in every)


@pytest.mark.tier("thorough")
def test_a_step_fits_where_any_combination_of_recipe_and_settings_does():
    limit = least()
    for own in STATES:
        given = config(own)
        found = fitting(given, lambda memory: memory.peak <= limit, recipes=STATES)
        assert found is not None, own
        assert found[1].peak == limit
        assert fitting(given, lambda memory: memory.peak < limit, recipes=STATES) is None, own


@pytest.mark.tier("thorough")
def test_a_shorter_sequence_is_the_last_resort():
    limit = estimate_memory(config("eco", 128, 1, True, False, ALL)).peak
    found = fitting(config("eco", 256), lambda memory: memory.peak <= limit, recipes=["eco"])
    assert found is not None
    assert "--data.sequence_length 128" in found[0]
    assert found[1].peak <= limit


def test_the_least_state_is_that_of_the_narrowest_recipe():
    """The weights of 8 bits, with the rest in the host's memory; else the state of MS-AMP."""
    for has_host, own, least in ((True, 4, 1), (False, 16, (16 + 8 + 8 + 16) / 8)):
        state = least_state(config("fp8"), has_host)
        assert (state[""], min(state.values())) == (own, least)
