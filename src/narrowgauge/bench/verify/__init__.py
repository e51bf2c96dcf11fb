"""Verifies a machine: its native GEMMs, kernels, layers and losses against the CPU's."""

from narrowgauge.bench.verify.verify import Verdict, verify

__all__ = ["Verdict", "verify"]
