"""Site settings of a cluster: a TOML file of variables, each with its reason.

    title = "Our cluster"
    source = ["https://..."]            # where the values come from
    architecture = "sm_90"              # of the devices, for the reader
    devices_per_node = 4

    [slurm]
    partition = "gpu"                   # --partition and --account on the command line take precedence
    account = "abc123"
    cpus_per_task = 16
    gpu_per_task = false                # true: Slurm shows each process only its GPU
    signal_seconds = 300                # signal the run to save this long before the time limit
    options = ["--constraint=ib"]       # further #SBATCH lines
    srun = ["--cpu-bind=cores"]         # further options of srun

    [[slurm.limit]]                     # the most nodes of a job, and its most hours; of a partition's
                                        # tables, the first with enough nodes for a job counts
    partition = "gpu"
    nodes = 16
    hours = 48

    [environment.NCCL_SOCKET_IFNAME]
    value = "ib0"
    why = "the interface of the fast network"

    [setup]
    lines = ["module load cuda"]        # shell lines to run first

Only `devices_per_node` is required. An unknown key is an error: a misspelt variable would silently make a
cluster slow.
"""

import re
from collections.abc import Mapping
from typing import Annotated

from pydantic import AfterValidator, Field, StrictBool, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from narrowgauge.system.errors import UserError
from narrowgauge.system.files import shipped_names
from narrowgauge.trainer.cluster.data_file import Table, load_table

_SHIPPED = "trainer/cluster/launch/sites"
_SLURM_WORD = re.compile(r"[A-Za-z0-9_.,:@+=/%-]+")


def _one_line(text: str) -> str:
    if not text.isprintable():
        raise PydanticCustomError("one_line", "text of one line")
    return text


def _name(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", text):
        raise UserError(f"{text!r} cannot be the name of a variable; letters, digits and _ only")
    return text


Line = Annotated[str, AfterValidator(_one_line)]
Name = Annotated[str, AfterValidator(_name)]
Count = Annotated[int, Field(ge=1, strict=True)]


class Variable(Table):
    """The value of an environment variable and the reason for it."""

    value: Line
    why: Line = ""


class Limit(Table):
    """The most nodes and hours of a job in a partition."""

    partition: Line
    nodes: Count
    hours: Count


class Slurm(Table):
    """What a site's Slurm is asked for."""

    partition: str = ""
    account: str = ""
    cpus_per_task: Count | None = None
    gpu_per_task: StrictBool = False
    signal_seconds: Count = 300
    options: tuple[str, ...] = ()
    srun: tuple[Line, ...] = ()
    limit: tuple[Limit, ...] = ()

    @field_validator("partition", "account")
    @classmethod
    def _is_a_word(cls, value: str, info: ValidationInfo) -> str:
        return slurm_word(f"slurm.{info.field_name}", value)

    @field_validator("options")
    @classmethod
    def _are_options(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for option in value:
            if not slurm_word("slurm.options", option).startswith("-"):
                raise UserError(f"slurm.options holds {option!r}; write an option as --name=value")
        return value


class Setup(Table):
    """The shell lines that a site needs first."""

    lines: tuple[Line, ...] = ()


class Site(Table):
    """The settings of a cluster that a launch script uses."""

    title: Line = "none (--site gives a cluster's variables)"
    source: tuple[Line, ...] = ()
    architecture: Line = ""
    devices_per_node: Count
    slurm: Slurm = Slurm()
    environment: Mapping[Name, Variable] = {}
    setup: Setup = Setup()


def site_names() -> list[str]:
    """Names of the shipped sites."""
    return shipped_names(_SHIPPED)


def load_site(name: str) -> Site:
    """Load a shipped site by name, or another by the path of its `.toml` file."""
    return load_table(Site, "site", _SHIPPED, name)


def slurm_word(key: str, text: str) -> str:
    """Return a text after checking that it is safe in an #SBATCH line, which cannot be quoted."""
    if not _SLURM_WORD.fullmatch(text):
        raise UserError(f"{key} is {text!r}; it may hold letters, digits and _ . , : @ + = / % - only")
    return text
