"""Converts counted work to seconds: the speeds of a GPU.

    kernel    max(FLOPs / rate of their format, bytes / memory bandwidth, 3 us per launch), and in a plan
              instructions / rate of the fp32 lanes, for kernels that record many
    host      6 us per launch, 20 us per call of a Python autograd function (assumed: an eager step)
    step      for each micro-batch the longer of the two, as the host runs ahead where nothing waits

The rates of an H200 were measured (torch 2.11, 2026-11-20): matmuls of a large shape, a copy, cuDNN's
attention at 4096 tokens. Whole steps reach less. *Calibrated* rates are those at which the count of a plain
bf16 step comes within 20 % of its measured time: matmuls at 0.888, memory at 0.85. They are not a measurement
of this program.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from narrowgauge.trainer.simulate.operations import Cost

KERNEL_FLOOR_S = 3e-6
LAUNCH_S = 6e-6
FUNCTION_S = 20e-6
CALIBRATED_PRODUCTS, CALIBRATED_BYTES = 0.888, 0.85


@dataclass(frozen=True)
class Speeds:
    """The rates of a GPU, and their origin in words.

    Attributes:
        words: the origin.
        bytes_per_s: memory bandwidth.
        flops_per_s: of the matrix units, by format.
        lanes_per_s: instructions of all fp32 lanes; infinite if instructions are not priced.
        kernel_s: the shortest time of a kernel.
    """

    words: str
    bytes_per_s: float
    flops_per_s: Mapping[str, float]
    lanes_per_s: float = math.inf
    kernel_s: float = KERNEL_FLOOR_S

    def seconds(self, cost: Cost) -> float:
        """The seconds of an operation."""
        products = cost.flops / self.flops_per_s[cost.kind] if cost.flops else 0.0
        of_memory, of_lanes = cost.bytes / self.bytes_per_s, cost.lanes / self.lanes_per_s
        return max(products, of_memory, of_lanes, cost.launches * self.kernel_s)

    def calibrated(self) -> "Speeds":
        """The rates that whole steps reach, according to measured steps of plain torch."""
        rates = {
            kind: rate * (1.0 if kind.startswith("attention") else CALIBRATED_PRODUCTS)
            for kind, rate in self.flops_per_s.items()
        }
        words, bytes_per_s = f"{self.words}, calibrated", self.bytes_per_s * CALIBRATED_BYTES
        return replace(self, words=words, bytes_per_s=bytes_per_s, flops_per_s=rates)

    def within(self, ceilings: "Speeds") -> "Speeds":
        """These rates, none above that of the ceilings: no operation then takes less time than at them."""
        rates = {kind: min(rate, ceilings.flops_per_s[kind]) for kind, rate in self.flops_per_s.items()}
        return replace(
            self,
            bytes_per_s=min(self.bytes_per_s, ceilings.bytes_per_s),
            flops_per_s=rates,
            lanes_per_s=min(self.lanes_per_s, ceilings.lanes_per_s),
            kernel_s=max(self.kernel_s, ceilings.kernel_s),
        )


#: Attention's backward alone: derived from 503 TFLOP/s for forward and backward, and 620 for forward.
_ATTENTION_BACKWARD = 2.5 / (3.5 / 503e12 - 1 / 620e12)

H200 = Speeds(
    "an H200's, measured",
    4.25e12,
    {
        "bf16": 777e12,
        "fp8": 1453e12,
        "fp8-row": 1472e12,
        "fp8-block": 1130e12,
        "mxfp8": 1453e12,  # an H200 has neither MXFP8 nor FP4: as FP8
        "fp4": 1453e12,
        "fp32": 55e12,
        "attention forward": 620e12,
        "attention backward": _ATTENTION_BACKWARD,
    },
)
