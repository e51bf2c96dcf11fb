"""Specification of a cluster: a TOML file of figures, each with its source in a comment.

    title = "Our cluster"
    device = "NVIDIA H100 SXM"
    devices_per_node = 8
    memory = "80GB"             # per device
    memory_bandwidth = 3.35e12  # bytes/s
    inside = 450e9              # bytes/s that a device sends to others of its node, while it receives as many
    between = 50e9              # bytes/s to other nodes, for each device
    host = 55e9                 # bytes/s to and from the host's memory
    price = 3.5                 # of a device-hour; may be left out

    [peak]                      # FLOP/s of matrix products without sparsity: what MFU refers to
    bf16 = 989e12

    [attainable]                # FLOP/s that somebody measured of large products; else the share of bf16
    bf16 = 794.5e12

The device does not support a format that is not in [peak]: its products run in bf16, or in fp32.
"""

import tomllib
from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from narrowgauge.errors import UserError, unknown
from narrowgauge.files import shipped_names, shipped_text
from narrowgauge.units import parse_bytes

_SHIPPED = "cluster/plan/machines"
FORMATS = ("bf16", "fp16", "fp8", "fp6", "fp4", "fp32")


class Cluster(BaseModel):
    """A cluster of equal devices; units are bytes, bytes/s, FLOP/s and the user's currency."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    title: str
    device: str = ""
    devices_per_node: int = Field(ge=1)
    memory: str
    memory_bandwidth: float = Field(gt=0)
    inside: float = Field(gt=0)
    between: float = Field(gt=0)
    host: float = Field(gt=0)
    price: float = Field(0.0, ge=0)
    peak: Mapping[str, float]
    attainable: Mapping[str, float] = {}

    @field_validator("memory")
    @classmethod
    def _is_a_size(cls, value: str) -> str:
        parse_bytes(value)
        return value

    @property
    def memory_bytes(self) -> int:
        """Bytes of memory per device."""
        return parse_bytes(self.memory)

    def format_for(self, bits: int, compute: str) -> str:
        """The narrowest format of at least `bits` bits that the device multiplies, else `compute`."""
        for name, width in (("fp4", 4), ("fp6", 6), ("fp8", 8)):
            if width >= bits and name in self.peak:
                return name
        return compute if compute in self.peak else "fp32"

    def speed(self, name: str) -> float:
        """FLOP/s of large products: measured, or the format's peak times the measured share of bf16."""
        if name in self.attainable:
            return self.attainable[name]
        base = next((n for n in ("bf16", "fp16", "fp32") if n in self.attainable and n in self.peak), None)
        return self.peak[name] * (self.attainable[base] / self.peak[base] if base else 1.0)


def cluster_names() -> list[str]:
    """Names of the shipped clusters."""
    return shipped_names(_SHIPPED)


def load_cluster(name: str) -> Cluster:
    """Load a shipped cluster by name, or another one by the path of its `.toml` file.

    Raises:
        UserError: the name is unknown, or the file does not have the form above.
    """
    if name.endswith(".toml"):
        try:
            return parse_cluster(Path(name).read_text(encoding="utf-8"), name)
        except (OSError, UnicodeDecodeError) as error:
            shipped = ", ".join(cluster_names())
            raise UserError(
                f"cluster file {name} cannot be read: {error}; those that ship: {shipped}"
            ) from None
    if name not in cluster_names():
        raise unknown("cluster", name, [*cluster_names(), "FILE.toml"])
    return parse_cluster(shipped_text(_SHIPPED, name), f"{name}.toml")


def parse_cluster(text: str, file: str) -> Cluster:
    """Parse the TOML text of a cluster.

    Raises:
        UserError: the text is not TOML, a key or format is unknown, or a value is missing or invalid.
    """
    try:
        table = tomllib.loads(text)
        cluster = Cluster.model_validate(table)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"cluster file {file} is no TOML: {error}") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden":
            raise unknown(f"key of {file}", where, list(Cluster.model_fields)) from None
        rule = first["msg"][0].lower() + first["msg"][1:]
        raise UserError(f"{file}: {where}: {rule}; the keys are {', '.join(Cluster.model_fields)}") from None
    for section in ("peak", "attainable"):
        for name, speed in getattr(cluster, section).items():
            if name not in FORMATS:
                raise unknown(f"format of {file}", f"{section}.{name}", FORMATS)
            if speed <= 0:
                raise UserError(f"{file}: {section}.{name} is {speed}; FLOP/s are positive")
    if "bf16" not in cluster.peak and "fp32" not in cluster.peak:
        raise UserError(f"{file}: [peak] has neither bf16 nor fp32; one of them is what MFU refers to")
    return cluster
