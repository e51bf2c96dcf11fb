"""Sites are data: those that ship say why of each variable, and a mistake in one's own is named."""

import pytest

from narrowgauge.system.errors import UserError
from narrowgauge.trainer.cluster.data_file import read_tables
from narrowgauge.trainer.cluster.launch.site import Limit, Site, load_site, site_names


def test_those_that_ship_give_reasons_and_sources():
    for name in site_names():
        site = load_site(name)
        assert (bool(site.title), site.devices_per_node, bool(site.source)) == (True, 8, True)
        assert all(source.startswith("https://") for source in site.source)
        assert all(variable.why for variable in site.environment.values())
    assert load_site("frontier").architecture == "gfx90a"
    assert load_site("azure-ndv5").environment["NCCL_SOCKET_IFNAME"].value == "eth0"


def test_the_form_in_the_module_is_a_site(tmp_path):
    from narrowgauge.trainer.cluster.launch import site as module

    lines = module.__doc__.split("\n\n    ", 1)[1].split("\n\nOnly")[0]
    file = tmp_path / "mine.toml"
    file.write_text(lines.replace("\n    ", "\n"))
    site = load_site(str(file))
    assert (site.slurm.account, site.slurm.cpus_per_task, site.slurm.signal_seconds) == ("abc123", 16, 300)
    assert site.slurm.limit == (Limit(partition="gpu", nodes=16, hours=48),)
    assert site.setup.lines == ("module load cuda",)
    assert [(name, v.value) for name, v in site.environment.items()] == [("NCCL_SOCKET_IFNAME", "ib0")]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("devices_per_nod = 8", ("devices_per_nod", "the nearest is 'devices_per_node'")),
        ("[environment.A]\nvalue = '1'\nwhi = 'x'", ("environment.A.whi", "'environment.A.why'")),
        ("title = 'x'", ("no devices_per_node",)),
        ("devices_per_node = 0", ("devices_per_node is 0", "at least 1")),
        ("slurm = 1", ("slurm is 1", "must be a section")),
        ("[slurm]\nsrun = '--x'", ("slurm.srun", "a list")),
        ("[[slurm.limit]]\nnodes = 1", ("has no slurm.limit.0.partition",)),
        ("[slurm]\noptions = ['x']", ("'x'", "--name=value")),
        ("[slurm]\naccount = 'a\"b'", ("slurm.account", "may hold")),
        ("[environment.A]\nwhy = 'x'", ("has no environment.A.value",)),
        ("[environment.'A B']\nvalue = '1'", ("'A B' cannot be the name",)),
        ('[environment.A]\nvalue = "1"\nwhy = "a\\nrm"', ("one line",)),
        ("devices_per_node = ", ("is not valid TOML",)),
    ],
)
def test_a_mistake_is_named_with_the_nearest_key(text, words):
    is_whole = text.startswith(("devices", "title"))
    with pytest.raises(UserError) as error:
        read_tables(Site, "site", text if is_whole else f"devices_per_node = 8\n{text}", "mine.toml")
    assert "\n" not in str(error.value).replace("\\n", "")
    for word in ("mine.toml", *words):
        assert word in str(error.value)


def test_a_site_that_is_not_there():
    for name, words in (("fronteer", "the nearest is 'frontier'"), ("nowhere.toml", "does not exist")):
        with pytest.raises(UserError, match=words):
            load_site(name)
