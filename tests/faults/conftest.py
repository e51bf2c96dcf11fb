"""Runs to try faults on."""

from support.fault_runs import _runs, out, runs

__all__ = ["_runs", "out", "runs"]
