"""What fits into a device: tensors, what the allocator loses and what the driver keeps."""

import pytest

from narrowgauge.cluster import load_cluster, make_plan
from narrowgauge.simulate import ALONE, Memory, Room
from narrowgauge.simulate.memory import CLASSES
from narrowgauge.simulate.room import CONTEXT, FRAGMENTATION
from narrowgauge.training import make_config

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


@pytest.mark.tier("thorough")
@pytest.mark.parametrize("name", ["rtx4090", "mi300x"])
def test_a_plan_reserves_memory_of_a_gpu(name):
    config = make_config({"model": {"name": "debug"}, "data": {"sequence_length": 64}})
    plan = make_plan(config, cluster=load_cluster(name))
    peak = plan.step.memory.peak
    assert plan.reserved == CONTEXT + int(FRAGMENTATION * peak)
    assert plan.needed == peak + plan.reserved
