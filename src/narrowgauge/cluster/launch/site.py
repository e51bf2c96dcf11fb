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
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from narrowgauge.errors import UserError, unknown
from narrowgauge.files import named_text, shipped_names, shipped_text, unknown_name
from narrowgauge.toml_text import parse_toml

_SHIPPED = "cluster/launch/sites"
_SLURM_WORD = re.compile(r"[A-Za-z0-9_.,:@+=/%-]+")


@dataclass(frozen=True, slots=True)
class Variable:
    """An environment variable and the reason for it."""

    name: str
    value: str
    why: str


@dataclass(frozen=True, slots=True)
class Limit:
    """The most nodes and hours of a job in a partition."""

    partition: str
    nodes: int
    hours: int


@dataclass(frozen=True, slots=True)
class Site:
    """The settings of a cluster that a launch script uses."""

    title: str = "none (--site gives a cluster's variables)"
    source: tuple[str, ...] = ()
    architecture: str = ""
    devices_per_node: int = 1
    partition: str = ""
    account: str = ""
    cpus_per_task: int = 0
    gpu_per_task: bool = False
    signal_seconds: int = 300
    options: tuple[str, ...] = ()
    srun: tuple[str, ...] = ()
    limit: tuple[Limit, ...] = ()
    environment: tuple[Variable, ...] = ()
    setup: tuple[str, ...] = ()


def site_names() -> list[str]:
    """Names of the shipped sites."""
    return shipped_names(_SHIPPED)


def load_site(name: str) -> Site:
    """Load a shipped site by name, or another by the path of its `.toml` file."""
    if not name.endswith(".toml"):
        if name not in site_names():
            raise unknown_name("site", name, site_names())
        return parse_site(shipped_text(_SHIPPED, name), f"{name}.toml")
    return parse_site(named_text("site", name, site_names()), name)


def slurm_word(key: str, text: str) -> str:
    """Return a text after checking that it is safe in an #SBATCH line, which cannot be quoted."""
    if not _SLURM_WORD.fullmatch(text):
        raise UserError(f"{key} is {text!r}; it may hold letters, digits and _ . , : @ + = / % - only")
    return text


def parse_site(text: str, file: str) -> Site:
    """Parse the TOML text of a site."""
    root = _checked(parse_toml(text, f"site file {file}"), file, "", _ROOT)
    slurm = _checked(root.pop("slurm", {}), file, "slurm.", _SLURM)
    setup = _checked(root.pop("setup", {}), file, "setup.", {"lines": _lines})
    if "devices_per_node" not in root:
        raise UserError(f"site file {file} has no devices_per_node; say how many devices a node has")
    for key in ("partition", "account"):
        slurm_word(f"{file}: slurm.{key}", slurm.get(key, "x"))
    for option in slurm.get("options", ()):
        if not slurm_word(f"{file}: slurm.options", option).startswith("-"):
            raise UserError(f"{file}: slurm.options holds {option!r}; write an option as --name=value")
    variables = _variables(root.pop("environment", {}), file)
    return Site(**root, **slurm, environment=variables, setup=setup.get("lines", ()))


def _variables(table: Mapping[str, Any], file: str) -> tuple[Variable, ...]:
    variables = []
    for name, entry in table.items():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise UserError(f"{file}: {name!r} cannot be the name of a variable; letters, digits and _ only")
        if not isinstance(entry, dict):
            form = '{value = "...", why = "..."}'
            raise UserError(f"{file}: environment.{name} is not a table; write {name} = {form}")
        words = _checked(entry, file, f"environment.{name}.", {"value": _text, "why": _text})
        if "value" not in words:
            raise UserError(f"{file}: environment.{name} has no value; leave the variable out or give it one")
        variables.append(Variable(name, words["value"], words.get("why", "")))
    return tuple(variables)


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value.isprintable():
        raise ValueError("text of one line")
    return value


def _lines(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise ValueError("a list of texts of one line each")
    return tuple(_text(line) for line in value)


def _count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError("a whole number of at least 1")
    return value


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("true or false")
    return value


def _table(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("a section")
    return value


def _limits(value: Any) -> tuple[Limit, ...]:
    checks: _Checks = {"partition": _text, "nodes": _count, "hours": _count}
    if not isinstance(value, list) or any(not isinstance(row, dict) or {*row} != {*checks} for row in value):
        raise ValueError("tables of partition, nodes and hours")
    return tuple(Limit(**{key: check(row[key]) for key, check in checks.items()}) for row in value)


_Checks = Mapping[str, Callable[[Any], Any]]
_ROOT: _Checks = {
    "title": _text,
    "source": _lines,
    "architecture": _text,
    "devices_per_node": _count,
    "slurm": _table,
    "environment": _table,
    "setup": _table,
}
_SLURM: _Checks = {
    "partition": _text,
    "account": _text,
    "cpus_per_task": _count,
    "gpu_per_task": _flag,
    "signal_seconds": _count,
    "options": _lines,
    "srun": _lines,
    "limit": _limits,
}


def _checked(table: Mapping[str, Any], file: str, prefix: str, checks: _Checks) -> dict[str, Any]:
    """Check keys and value types of a table, and return the checked values."""
    result = {}
    for key, value in table.items():
        if key not in checks:
            raise unknown(f"key of {file}", f"{prefix}{key}", [f"{prefix}{name}" for name in checks])
        try:
            result[key] = checks[key](value)
        except ValueError as error:
            raise UserError(f"{file}: {prefix}{key} is {value!r}, but it must be {error}") from None
    return result
