"""The place of a process from torchrun's variables; to train alone or to share a GPU is refused."""

import pytest

from narrowgauge.system.errors import UserError
from narrowgauge.trainer.distributed import world_from
from support.fault_table import case
from support.launch_environments import DEVICES, REFUSED, WORLDS, env


@pytest.mark.parametrize(("text", "expected"), WORLDS)
def test_the_place_of_a_process(text, expected):
    w = world_from(env(text), gpus=0)
    place = (w.rank, w.size, w.local_rank, w.local_size)
    assert (*place, w.master_addr, w.master_port) == expected
    assert w.device == 0


@case("G5", tier="quick")
@pytest.mark.parametrize(("text", "words"), REFUSED)
def test_what_is_refused_with_the_way_out(text, words):
    with pytest.raises(UserError) as error:
        world_from(env(text), gpus=0)
    assert "\n" not in str(error.value)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(("text", "gpus", "device"), DEVICES)
def test_each_process_has_a_gpu_of_its_own(text, gpus, device):
    if device is not None:
        assert world_from(env(text), gpus).device == device
        return
    with pytest.raises(UserError, match=rf"would share {gpus} GPU\(s\).*at most {gpus} a node"):
        world_from(env(text), gpus)
