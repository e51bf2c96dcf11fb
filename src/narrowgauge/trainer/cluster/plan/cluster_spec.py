"""The specification of a cluster: a TOML file of figures, each with its source in a comment.

    title = "Our cluster"
    device = "NVIDIA H100 SXM"
    gpu = "sm_90"               # or gfx942, or cpu: the formats with native matmuls (`recipes --device`)
    devices_per_node = 8
    memory = "79.2GiB"          # per device, as its driver reports it
    memory_bandwidth = 3.35e12  # bytes/s
    inside = 450e9              # bytes/s that a device sends to others of its node while it receives
    between = 50e9              # bytes/s to other nodes, per device
    host = 55e9                 # bytes/s to and from the host's memory
    price = "3.50 USD"          # per device-hour; optional
    vector = 67e12              # fp32 FLOP/s outside the matrix units; default: peak.fp32

    [peak]                      # dense FLOP/s of matmuls: the reference of MFU
    bf16 = 989e12

    [attainable]                # measured FLOP/s of large matmuls; default: the share measured for bf16
    bf16 = 794.5e12

    [[measured]]                # a measured run, repeatable: the basis of the column "expect" of `plan`
    run = "torchtitan, Llama-3 8B, bf16, compiled"
    devices = 8
    parameters = 8.03e9
    format = "bf16"             # of its matmuls
    tokens_per_s = 6667         # per device
    at_best = 9000              # `plan`'s "at best" for the same settings
    source = "github.com/pytorch/torchtitan"

A recipe is native where `gpu` multiplies its formats (`recipes.choose_backend`), and emulated elsewhere.
Without `gpu`, low-precision recipes are priced as emulated.
"""

import math
from collections.abc import Mapping
from typing import Annotated, Literal, get_args

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo, field_validator

from narrowgauge.recipes import Device, named_device
from narrowgauge.system.errors import UserError, ending_with, unknown
from narrowgauge.system.files import shipped_names, unknown_name
from narrowgauge.system.units import parse_bytes
from narrowgauge.trainer.cluster.data_file import Table, load_table
from narrowgauge.trainer.cluster.plan.budget import Price, parse_price

_SHIPPED = "trainer/cluster/plan/machines"
Format = Literal["bf16", "fp16", "fp8", "fp6", "fp4", "fp32"]
FORMATS = get_args(Format)


class MeasuredRun(Table):
    """A measured run on a cluster, and the speed at best for its settings."""

    run: str
    devices: int = Field(ge=1)
    parameters: float = Field(gt=0)
    format: Format = "bf16"
    tokens_per_s: float = Field(gt=0)
    at_best: float = Field(gt=0)
    source: str

    @property
    def share(self) -> float:
        """Measured speed divided by the speed at best."""
        return self.tokens_per_s / self.at_best


def _known_device(name: str) -> str:
    if name:
        named_device(name)
    return name


def _price(text: object) -> Price | None:
    return None if text == "" else parse_price("price", str(text))


class Cluster(Table):
    """A cluster of identical devices; units are bytes, bytes/s and FLOP/s."""

    title: str
    device: str = ""
    gpu: Annotated[str, AfterValidator(_known_device)] = ""
    devices_per_node: int = Field(ge=1)
    memory: Annotated[str, AfterValidator(lambda size: parse_bytes(size) and size)]
    memory_bandwidth: float = Field(gt=0)
    inside: float = Field(gt=0)
    between: float = Field(gt=0)
    host: float = Field(gt=0)
    price: Annotated[Price | None, BeforeValidator(_price)] = None
    vector: float = Field(0.0, ge=0)
    peak: Mapping[str, Annotated[float, Field(gt=0)]]
    attainable: Mapping[str, Annotated[float, Field(gt=0)]] = {}
    measured: tuple[MeasuredRun, ...] = ()

    @field_validator("peak", "attainable")
    @classmethod
    def _are_speeds(cls, speeds: Mapping[str, float], info: ValidationInfo) -> Mapping[str, float]:
        for name in speeds:
            if name not in FORMATS:
                raise unknown("format", f"{info.field_name}.{name}", FORMATS)
        if info.field_name == "peak" and not {"bf16", "fp32"} & speeds.keys():
            raise UserError("[peak] has neither bf16 nor fp32; one of them is what MFU refers to")
        return speeds

    @property
    def facts(self) -> Device:
        """The facts that decide which matmuls are native; without `gpu`, no low-precision ones are."""
        return named_device(self.gpu) if self.gpu else Device(maker="unknown")

    @property
    def lane_rate(self) -> float:
        """Instructions/s of all fp32 lanes; a fused multiply-add counts as two operations.

        It is infinite where Triton's kernels do not run: the instructions of others are not counted.
        """
        fp32 = self.vector or self.peak.get("fp32", min(self.peak.values()))
        return fp32 / 2 if self.facts.has_triton else math.inf

    def format_of(self, kind: str, compute: str) -> str:
        """The format that computes a kind of matmul of `simulate.operations`, in a recipe of `compute`.

        What the device lacks is computed in the next wider format that it has.
        """
        if kind == "fp32":
            wanted = ["fp32"]
        elif kind.startswith("attention") or kind == "bf16":  # 16 bits
            wanted = [compute, "fp32"]
        else:
            wanted = [*(["fp4"] if kind == "fp4" else []), "fp8", compute, "fp32"]
        return next((name for name in wanted if name in self.peak), "bf16")

    def speed(self, name: str) -> float:
        """FLOP/s of large matmuls: measured, or the format's peak times the share measured for bf16."""
        if name in self.attainable:
            return self.attainable[name]
        base = next((n for n in ("bf16", "fp16", "fp32") if n in self.attainable and n in self.peak), None)
        return self.peak[name] * (self.attainable[base] / self.peak[base] if base else 1.0)


def cluster_names() -> list[str]:
    """Names of the shipped clusters."""
    return shipped_names(_SHIPPED)


def cluster_name(name: str) -> str:
    """The whole name of a shipped cluster, as rtx4090 for 4090; the path of a `.toml` file as it is."""
    names = cluster_names()
    whole = name if name.endswith(".toml") else ending_with(name, names)
    if whole not in names and not whole.endswith(".toml"):
        raise unknown_name("cluster", name, names)
    return whole


def load_cluster(name: str) -> Cluster:
    """Load a shipped cluster by name (`cluster_name`), or another by the path of its `.toml` file."""
    return load_table(Cluster, "cluster", _SHIPPED, cluster_name(name))
