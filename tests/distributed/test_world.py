"""The place of a process from each launcher's variables; to train alone or to share a GPU is refused."""

import pytest

from narrowgauge.distributed import world_from
from narrowgauge.distributed.launch.slurm_env import expand_hosts, port_of, tasks_of_nodes
from narrowgauge.errors import UserError
from support.fault_table import case
from support.launch_environments import DEVICES, REFUSED, WORLDS, env


@pytest.mark.parametrize(("text", "expected"), WORLDS)
def test_the_place_of_a_process(text, expected):
    w = world_from(env(text), gpus=0)
    place = (w.rank, w.size, w.local_rank, w.local_size, w.node, w.nodes)
    assert (*place, w.launcher, w.master_addr, w.master_port) == expected
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


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n1", ["n1"]),
        ("frontier[00123-00125,00200]", ["frontier00123", "frontier00124", "frontier00125", "frontier00200"]),
        ("a,b[1-2],c[9-11]-ib", ["a", "b1", "b2", "c9-ib", "c10-ib", "c11-ib"]),
        ("r[1-2]n[08-09]", ["r1n08", "r1n09", "r2n08", "r2n09"]),
        ("x-1.site.org,x-2.site.org", ["x-1.site.org", "x-2.site.org"]),
    ],
)
def test_lists_of_hosts(text, hosts):
    assert list(expand_hosts(text)) == hosts


@pytest.mark.parametrize(
    "text", ["", ",", "a,", ",a", "a,,b", "a[", "a]", "a[]", "a[1-]", "a[1,]", "a b", "a[[1]]", "a[x]"]
)
def test_what_is_no_list_of_hosts(text):
    with pytest.raises(UserError, match="Slurm's form"):
        list(expand_hosts(text))


def test_only_the_first_host_of_a_huge_list_is_made():
    assert next(expand_hosts("n[0-99999999999999]")) == "n0"


def test_tasks_and_ports():
    assert tasks_of_nodes("8(x2),4") == [8, 8, 4]
    ports = {port_of(job) for job in range(1000)}
    assert len(ports) == 1000
    assert min(ports) > 1024
    assert max(port_of(job) for job in (14999, 15000, 10**9)) < 32768
    assert port_of(7, 1) != port_of(7)
